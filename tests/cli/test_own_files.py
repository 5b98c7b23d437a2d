"""Files and models of a user's own: an option file in the wrong place, resolvers, `_convert_` of a node."""

import dataclasses

import pytest
import yaml
from torch import nn

from prepare.app.cli import main as cli
from prepare.app.job.build_model import instantiated
from prepare.app.report import compare_runs
from prepare.errors import FileError

NODE = {"_target_": "torch.nn.Conv2d", "in_channels": 3, "out_channels": 4, "kernel_size": 3}
GLOBAL = "# @package _global_\n"
PLAN = ("--config-dir", "own", "task=plan", "device=cpu")


@dataclasses.dataclass
class Sizes:
    width: int = 8
    classes: int = 2


class ReadsAttributes(nn.Module):
    """A network that takes its configuration as one object."""

    def __init__(self, cfg):
        super().__init__()
        self.body = nn.Conv2d(3, cfg.width, 3, padding=1)
        self.head = nn.Conv2d(cfg.width, cfg.classes, 1)

    def forward(self, x):
        return self.head(self.body(x))


class ReadsItems(ReadsAttributes):
    """One that takes a dict, and says so."""

    def __init__(self, cfg, blocks=()):
        assert type(cfg) is dict
        super().__init__(Sizes(**cfg))
        self.blocks = nn.ModuleList(block.body for block in blocks)


class Fails(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.made = {**cfg}.nothing


def target(cls):
    return f"{__name__}.{cls.__name__}"


def write(folder, path, text):
    path = folder / "own" / path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))


def refused(capsys, *words):
    assert cli.run([*PLAN, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


# ------------------------------------------------------------------------------- option files
INPUT = {"shape": [1, 3, 16, 16]}
STEPS = {"steps": {"half": {}}}


@pytest.mark.parametrize(
    "case",
    [
        ("model/my.yaml", {"model": NODE}, ["model=my"]),
        ("model/my.yaml", {"model": NODE, "input": INPUT}, ["model=my"]),
        ("input/my.yaml", {"input": INPUT}, ["model=unet2d", "input=my"]),
        ("memfmt/my.yaml", STEPS, ["model=unet2d", "memfmt=my"]),
        ("precision/my.yaml", STEPS, ["model=unet2d", "precision=my"]),
        ("experiment/my.yaml", {"seed": 3} | STEPS, ["model=unet2d", "+experiment=my"]),
    ],
)
def test_a_file_without_its_package_line_is_named(tmp_path, monkeypatch, capsys, case):
    path, text, words = case
    monkeypatch.chdir(tmp_path)
    write(tmp_path, path, text)
    line = refused(capsys, *words)
    assert line.startswith(f"{path}: ")
    assert GLOBAL.strip() in line
    # What it says to do works.
    write(tmp_path, path, GLOBAL + yaml.safe_dump(text))
    example = [] if "input" in str(text) or "unet2d" in str(words) else ["input.shape=[1,3,16,16]"]
    assert cli.run([*PLAN, *words, *example]) == 0


@pytest.mark.parametrize(
    "case",
    [("model/my.yaml", NODE, ["model=my"]), ("input/my.yaml", INPUT, ["model=unet2d", "input=my"])],
)
def test_a_file_whose_keys_are_at_the_top_is_named(tmp_path, monkeypatch, capsys, case):
    path, text, words = case
    monkeypatch.chdir(tmp_path)
    write(tmp_path, path, GLOBAL + yaml.safe_dump(text))
    line = refused(capsys, *words)
    assert line.startswith(f"{path}: ")
    assert "leave out" in line
    write(tmp_path, path, text)
    assert cli.run([*PLAN, *words]) == 0


def test_a_network_with_a_keyword_model_is_no_mistake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    node = {"_target_": "torch.nn.Sequential", "_args_": [NODE]}
    write(tmp_path, "model/my.yaml", {"_target_": f"{__name__}.wrapped", "model": node})
    assert cli.run([*PLAN, "model=my"]) == 0


def wrapped(model):
    return model


# ------------------------------------------------------------------------------- resolvers
@pytest.mark.parametrize("value", ["${eval:'4*2'}", "${mul:8,2}", "${my.own:a}"])
def test_a_resolver_of_another_program_is_told_where_it_works(tmp_path, monkeypatch, capsys, value):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "model/my.yaml", NODE | {"out_channels": value})
    for words in (["model=my"], ["-m", "model=my,unet2d"]):
        line = refused(capsys, *words)
        assert line.startswith("model.out_channels: ")
        assert "+prepare=default" in line
        assert value[2:].partition(":")[0] in line


# ------------------------------------------------------------------------------- _convert_
CFG = {"width": 8, "classes": 2}


DATA = {"_target_": target(Sizes), "width": 8}


@pytest.mark.parametrize(
    ("cls", "convert", "cfg"),
    [
        *((ReadsAttributes, convert, CFG) for convert in (None, "none", "object")),
        *((ReadsAttributes, convert, DATA) for convert in ("all", "partial")),
        *((ReadsItems, convert, CFG) for convert in (None, "all", "partial", "object")),
    ],
)
def test_a_model_gets_its_configuration_as_it_reads_it(cls, convert, cfg):
    node = {"_target_": target(cls), "cfg": cfg}
    assert instantiated(node | ({"_convert_": convert} if convert else {})).body.out_channels == 8


def test_nodes_in_lists_may_choose_for_themselves():
    inner = {"_target_": target(ReadsAttributes), "cfg": CFG, "_convert_": "none"}
    node = {"_target_": target(ReadsItems), "cfg": CFG, "blocks": [inner, inner]}
    assert [block.out_channels for block in instantiated(node).blocks] == [8, 8]


@pytest.mark.parametrize("convert", ["all", "partial"])
def test_data_that_was_asked_for_and_is_read_by_attributes_names_the_key(
    tmp_path, monkeypatch, capsys, convert
):
    monkeypatch.chdir(tmp_path)
    words = [f"model._target_={target(ReadsAttributes)}", "+model.cfg.width=8"]
    assert cli.run([*words, "+model.cfg.classes=2", f"+model._convert_={convert}"]) == 1
    assert "_convert_=none" in capsys.readouterr().err


def test_a_mistake_of_the_model_itself_stays_what_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.run([f"model._target_={target(Fails)}", "+model.cfg.width=8"]) == 1
    err = capsys.readouterr().err
    assert "'nothing'" in err
    assert "_convert_" not in err


def test_a_model_with_hydras_objects_goes_through_a_whole_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [f"model._target_={target(ReadsAttributes)}", "+model.cfg.width=8", "bench=none"]
    more = ["+model.cfg.classes=2", "input.shape=[1,3,16,16]", "memfmt=channels_last"]
    assert cli.run([*words, *more]) == 0
    assert "right" in capsys.readouterr().out


# ------------------------------------------------------------------------------- other words
def test_a_folder_that_does_not_exist_is_not_taken_for_an_audit(tmp_path):
    (tmp_path / "a2").mkdir()
    with pytest.raises(FileError) as caught:
        compare_runs.differences(tmp_path / "a2", tmp_path / "a3")
    assert caught.value.problems[0].where.endswith("a3")
