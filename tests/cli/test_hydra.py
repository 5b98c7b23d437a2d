"""Our groups in other people's Hydra applications, and what of Hydra's passes the border to a pipeline."""

import os
import pickle
import subprocess
import sys
import types
from pathlib import Path

import hydra
import pytest
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from torch import nn

from paths import CONF
from prepare.errors import ConfigError
from prepare.frameworks.outside import Outside
from prepare.pipeline import Pipeline
from words import composing

ROOT = CONF.parent
PROJECT = Path(__file__).parent / "hydra_project"
OURS = sorted({path.parent.name for path in CONF.glob("*/*.yaml") if "/steps/" in path.read_text()})
OPTIONS = [(group, path.stem) for group in OURS for path in sorted((CONF / group).glob("*.yaml"))]


@pytest.fixture
def compose():
    """Composes the project's configuration, with our groups registered; nothing is left behind."""
    before = ConfigStore.instance().repo
    ConfigStore.instance().repo = dict(before)

    def composed(*overrides: str, name: str = "train") -> DictConfig:
        with hydra.initialize_config_dir(str(PROJECT / "configs"), version_base="1.3"):
            return hydra.compose(name, list(overrides))

    yield composed
    ConfigStore.instance().repo = before


# ------------------------------------------------------------------------------- the groups


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=lambda word: word)
def test_every_option_gives_the_steps_of_the_command_line(compose, group, option):
    theirs = compose("+prepare=default", f"prepare/{group}={option}").prepare.steps
    with composing() as compose_ours:
        ours = compose_ours(f"{group}={option}").steps
    assert theirs == ours
    assert list(theirs) == list(ours)


def test_their_own_groups_and_keys_are_untouched(compose):
    without = compose("model=deep")
    found = compose(
        "model=deep", "+prepare=default", "prepare/memfmt=by_rank", "prepare/device=cpu"
    )
    assert OmegaConf.to_container(without) == {
        key: value for key, value in OmegaConf.to_container(found).items() if key != "prepare"
    }
    assert list(found.prepare) == ["steps"]


@pytest.mark.parametrize(
    ("own", "word", "right"),
    [
        ("prepare: false", "prepare=true", True),
        ("prepare: false", "prepare=default", "default"),
        ("prepare: 1", "++prepare=raw", "raw"),
        ("lr: 1", "+prepare=raw", "raw"),
        ("prepare: {a: 1}", "prepare.a=2", {"a": 2}),
    ],
)
def test_a_key_of_their_own_called_prepare_is_theirs(compose, tmp_path, own, word, right):
    compose("+prepare=default")  # and it does not matter what was composed before
    (tmp_path / "own.yaml").write_text(own)
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert hydra.compose("own", [word]).prepare == right


SYNONYMS = [
    ("precision", "BF16", "bfloat16"),
    ("precision", "fp16", "half"),
    ("memfmt", "nhwc", "channels_last"),
    ("memfmt", "ndhwc", "channels_last_3d"),
    ("device", "gpu", "cuda"),
]


@pytest.mark.parametrize(("group", "said", "word"), SYNONYMS)
def test_a_synonym_of_an_option_is_understood_in_every_program(group, said, word):
    from hydra_plugins.prepare_groups import PrepareGroups, PrepareWords

    theirs, ours = PrepareGroups("", "prepare://"), PrepareWords("", f"prepare-words://{CONF}")
    for source, path in ((theirs, f"prepare/{group}"), (ours, group)):
        assert source.is_config(f"{path}/{said}")
        assert not source.is_config(f"{path}/{said}x")
        found, meant = (source.load_config(f"{path}/{name}") for name in (said, word))
        assert (found.config, found.header) == (meant.config, meant.header)
        assert said not in source.list(path, None)


# ------------------------------------------------------------------------------- the border


def test_interpolations_become_plain_data_at_any_depth(plugin):
    from prepare.step import ModelStep

    @plugin("deep_options")
    class DeepOptions(ModelStep):
        """A step whose option holds anything."""

        table: dict

        def targets(self, model):
            return ()

    config = OmegaConf.create({
        "word": "bfloat16", "kept": ["type:LayerNorm", "${word}*"], "number": 3,
        "half": {"dtype": "${word}", "keep": "${kept}"},
        "steps": {
            "half": "${half}",
            "deep_options": {"table": {"a": [{"b": ["${word}", {"c": "${number}"}]}], "d": "${half}"}},
        },
    })  # fmt: skip
    pipeline = Pipeline.from_config(config.steps)
    kept = ["type:LayerNorm", "bfloat16*"]
    table = {"a": [{"b": ["bfloat16", {"c": 3}]}], "d": {"dtype": "bfloat16", "keep": kept}}
    assert pipeline.to_config() == {
        "half": {"dtype": "bfloat16", "keep": kept, "clamp": False},
        "deep_options": {"table": table},
    }  # fmt: skip
    held = [pipeline.to_config(), *map(vars, pipeline.steps.values())]
    assert b"omegaconf" not in pickle.dumps(held)
    config.half.keep[0] = "changed afterwards"
    assert pipeline.to_config()["half"]["keep"] == kept


def test_each_step_that_cannot_be_resolved_is_one_error():
    config = OmegaConf.create({
        "steps": {"half": "???", "device": "${nowhere}", "input_format": {"dtype": "${nowhere}"},
                  "conv3d_memory_format": {"exclude": ["${nowhere}"]}}
    })  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        Pipeline.from_config(config.steps)
    assert [problem.where for problem in caught.value.problems] == [
        f"steps.{name}" for name in config.steps
    ]
    assert "Missing mandatory" in caught.value.problems[0].wrong
    assert all("nowhere" in problem.wrong for problem in caught.value.problems[1:])


# ------------------------------------------------------------------------------- a whole project


STRANGER = """
import sys, hydra

@hydra.main(config_path="configs", config_name="train", version_base=None)
def main(cfg):
    net = hydra.utils.instantiate(cfg.net)
    print([tuple(p.stride()) for p in net.parameters()][0], "torch" in sys.modules, list(cfg.get("prepare", {}).get("steps", {})))

main()
"""
UNTOUCHED = (
    "net:\n  _target_: torch.nn.Conv2d\n  in_channels: 3\n  out_channels: 4\n  kernel_size: 3\n"
)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_program_without_a_line_of_ours_prepares_its_network(tmp_path, whole):
    (tmp_path / "configs").mkdir()
    (tmp_path / "train.py").write_text(STRANGER)
    (tmp_path / "configs" / "train.yaml").write_text(UNTOUCHED)

    def run(*words: str) -> str:
        return subprocess.run(
            [sys.executable, "train.py", "hydra.run.dir=out", *words],
            capture_output=True, text=True, cwd=tmp_path, check=True, timeout=120,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        ).stdout  # fmt: skip

    asked = ["+prepare=default", "prepare/memfmt=channels_last", "prepare/device=cpu"]
    if whole:
        assert "prepare" not in run("--help").partition("== Config ==")[0]
        assert "prepare/memfmt: " in run("+prepare=default", "--help")
        assert "conv2d_memory_format" in run(*asked, "--cfg", "job")
        assert run().startswith("(27, 9, 3, 1)")
    target = ["net._target_=prepare.frameworks.hydra.prepared", "+net.of=torch.nn.Conv2d"]
    assert "\n(27, 1, 9, 3)" in run(*asked, *target, "+net.steps=${prepare.steps}")


@pytest.fixture
def strangers(compose, monkeypatch):
    """Trains by the code and the configuration of a stranger, with words of the command line."""
    folder = Path(__file__).parent / "hydra_stranger"
    monkeypatch.syspath_prepend(str(folder))

    def trained(*words: str) -> tuple[nn.Module, list[float]]:
        with hydra.initialize_config_dir(str(folder / "configs"), version_base="1.3"):
            cfg = hydra.compose("train", list(words))
        return hydra.utils.get_method("template.train")(cfg)

    yield trained
    assert not [f for f in folder.rglob("*.*") if "prepare" in f.read_text(errors="ignore")]


ASKED = ["+prepare=default", "prepare/memfmt=nhwc", "~prepare/device"]
OURS_BUILDS = [
    "model.net._target_=prepare.frameworks.hydra.prepared",
    "+model.net.steps=${prepare.steps}",
]
CALLBACK = [
    "+callbacks.prepare._target_=theirs_prepare.Prepare",
    "+callbacks.prepare.recipe=${prepare.steps}",
]


@pytest.mark.parametrize(
    "words",
    [
        [*OURS_BUILDS, "+model.net.of=template.Net"],
        ["model=created", *OURS_BUILDS, "+model.net.of=template.create_model"],
        CALLBACK,
        [],
    ],
    ids=["a class", "a factory as timm's create_model", "a callback", "from outside"],
)
def test_the_code_of_a_stranger_trains_prepared_as_it_is(strangers, monkeypatch, request, words):
    class Prepare:
        """Stands for `prepare.frameworks.lightning.Prepare`: prepares in `setup`, without the import of Lightning."""

        def __init__(self, recipe):
            self.steps = Pipeline.from_config(recipe)

        def setup(self, trainer, module, stage):
            self.steps.apply(module.net)

    monkeypatch.setitem(sys.modules, "theirs_prepare", types.SimpleNamespace(Prepare=Prepare))
    plain, losses = strangers("model=created" if "model=created" in words else "model=lit")
    assert plain.layers[0].weight.stride() == (27, 9, 3, 1)
    if not words:
        request.addfinalizer(Outside({"conv2d_memory_format": {}}).start().stop)
    net, found = strangers(*(ASKED if words else []), *words)
    assert net.layers[0].weight.stride() == (27, 1, 9, 3)
    assert net(torch.randn(1, 3, 6, 6)).is_contiguous(memory_format=torch.channels_last)
    assert found == pytest.approx(losses, rel=1e-4)


def test_a_partial_of_prepared_takes_the_network_it_is_called_with():
    node = {
        "_target_": "prepare.frameworks.hydra.prepared",
        "_partial_": True,
        "steps": {"conv2d_memory_format": {}},
    }
    conv = nn.Conv2d(3, 4, 3)
    assert hydra.utils.instantiate(node)(conv) is conv
    assert conv.weight.stride() == (27, 1, 9, 3)


@pytest.mark.parametrize(
    ("node", "words"),
    [({}, "not a module; name my.Net"), ({"net": {"_target_": "torch.nn.ReLU"}, "other": 1}, "not a module; name my.Net"),
     ({"of": "builtins.dict", "a": 1}, "builtins.dict is a dict and not a module")],
    ids=["nothing", "two", "no module"],
)  # fmt: skip
def test_a_node_that_gives_no_network_is_told_in_one_line(node, words):
    full = {"_target_": "prepare.frameworks.hydra.prepared", "steps": {}, **node}
    with pytest.raises(hydra.errors.InstantiationException, match=words):
        hydra.utils.instantiate(full)
