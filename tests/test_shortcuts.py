"""`prepare.prepare`, `prepare.report` and the other names of the package itself."""

import copy
import re
import subprocess
import sys
from importlib import metadata

import pytest
import torch
from torch import nn

import prepare
from paths import ROOT
from prepare.core.forward.torch_state import read_amp
from prepare.errors import ConfigError
from prepare.registry import STEPS


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.Conv2d(8, 4, 3))


@pytest.mark.parametrize("word", ["channels_last", "nhwc", torch.channels_last], ids=str)
def test_prepare_makes_the_model_channels_last_and_repaired(word):
    model = net()
    assert prepare.prepare(model, memory_format=word) is model
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert type(model[1]) is not nn.InstanceNorm2d
    assert model(torch.randn(1, 3, 8, 8)).is_contiguous(memory_format=torch.channels_last)


def test_prepare_by_rank_prepares_both_kinds():
    model = nn.ModuleList([nn.Conv2d(2, 2, 3), nn.Conv3d(2, 2, 3)])
    prepare.prepare(model, memory_format="by_rank", repair_layout=False)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last_3d)
    prepare.prepare(model, memory_format=torch.contiguous_format)
    assert model[1].weight.is_contiguous()


@pytest.mark.parametrize("word", ["bf16", "BF16", torch.bfloat16, "torch.bfloat16"], ids=str)
def test_names_of_dtypes_and_formats_are_understood_by_every_call(word):
    model = prepare.prepare(nn.Conv2d(3, 4, 3), memory_format="contiguous_format", dtype=word)
    assert model.weight.dtype is torch.bfloat16
    assert model.weight.is_contiguous()
    assert type(model) is nn.Conv2d  # contiguous asks for no repair
    flow = prepare.predict(
        nn.Conv2d(3, 4, 3), torch.randn(1, 3, 4, 4), amp=word, wanted="nhwc", device="gpu"
    )
    assert (flow.wanted, flow.device) == ({4: "channels_last"}, "cuda")
    assert read_amp(word) == "bfloat16"
    assert STEPS["device"].from_options({"device": "gpu:1"}).device == "cuda:1"


def test_prepare_casts_formats_inputs_and_moves_the_optimizer():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1)
    model(torch.randn(1, 3, 8, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    prepare.prepare(model, dtype=torch.bfloat16, device="cpu", optimizer=optimizer)
    assert model(torch.randn(1, 3, 8, 8)).dtype is torch.bfloat16
    assert optimizer.state[model[0].weight]["momentum_buffer"].dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match="same|dtype|type"):
        prepare.prepare(net(), dtype="half", format_inputs=False)(torch.randn(1, 3, 8, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "prepare: nothing is asked for; give memory_format, dtype, device or example"),
        ({"memory_format": "chanels_last"}, "memory_format: 'chanels_last' is not allowed; did you mean 'channels_last'"),
        ({"dtype": torch.int8}, "dtype: 'int8' is not allowed"),
        ({"memory_format": "channels_last_3d"}, "did you mean the step conv2d_memory_format"),
        ({"memory_format": "channels_last", "repair_layout": False}, "add the step repair_layout"),
    ],
    ids=["nothing", "format", "dtype", "rank", "gradients"],
)  # fmt: skip
def test_a_wrong_option_of_prepare_is_one_clear_error(options, message):
    with pytest.raises(ConfigError) as raised:
        prepare.prepare(net(), **options)
    assert message in str(raised.value)


def test_report_shows_and_saves_what_was_found(tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    reference = net()
    model = prepare.prepare(copy.deepcopy(reference), memory_format="channels_last")
    batch = torch.randn(2, 3, 12, 12)
    found = prepare.report(model, batch, reference=reference, verify="short")
    summary = found.summary()
    assert (summary["verified"], summary["layout_breaks"]) == ("pass", 0)
    title, *rows = str(found).splitlines()
    assert (
        title == "Sequential on cpu, channels_last + repair_layout: 2 of 2 convolutions converted"
    )
    assert [row[2:10].strip() for row in rows] == ["layout", "right", "faster", "next"]
    assert rows[2].endswith("not measured: bench=none")
    assert "time it before you use it" in rows[3]
    assert repr(found).startswith("Report(Audit(")
    found.save(tmp_path / "one.html")
    found.save(tmp_path / "folder")
    assert {"report.html", "audit.json", "flow.json", "verify.json"} == {
        path.name for path in (tmp_path / "folder").iterdir()
    }
    page = (tmp_path / "one.html").read_text()
    assert "<!doctype html>" in page
    assert "<h1>Sequential</h1>" in page
    assert "bench=none" not in page  # of the command line


@pytest.mark.parametrize("wrong", [True, "shrot"])
def test_report_names_the_levels_that_there_are(wrong):
    with pytest.raises(ConfigError, match=f"bench: {wrong!r} is not a level; .*short"):
        prepare.report(net(), torch.randn(1, 3, 8, 8), reference=net(), bench=wrong)


def test_the_names_of_the_package_are_lazy_and_listed():
    code = (
        "import sys, prepare; assert 'torch' not in sys.modules; import prepare.app.report.sentences; "
        "print(callable(prepare.report), prepare.Pipeline.__name__, prepare.prepare.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "Pipeline", "prepare"]
    assert {"Pipeline", "prepare", "report", "__version__"} <= set(dir(prepare))
    assert prepare.__version__ == metadata.version("torch-prepare")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        prepare.nothing


# -------------------------------------------------------------------------- the names of the package itself


def test_the_public_names_are_those_of_the_page():
    before_the_names = (ROOT / "docs/reference.md").read_text().partition(":::")[0]
    named = re.findall(r"`prepare\.(\w+)`", before_the_names)
    assert named == prepare.__all__ == sorted(prepare.__all__)
    assert set(prepare.__all__) <= set(dir(prepare))
