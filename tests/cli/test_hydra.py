"""Our groups in other people's Hydra applications, and what of Hydra's passes the border to a pipeline."""

import json
import os
import subprocess
import sys
import types
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from omegaconf import DictConfig, OmegaConf
from prepare.frameworks._recipe import NetworkRecipe, child_network
from torch import nn

import prepare.frameworks.hydra
from paths import CONF
from prepare.app.cli.configuration import choices_in
from prepare.app.job.build_model import listed_targets
from prepare.core.utils.folders import STEP_GROUPS
from prepare.errors import ConfigError
from prepare.pipeline import Pipeline
from small_nets import small_2d
from words import composing

ROOT = CONF.parent
PROJECT = Path(__file__).parent / "hydra_project"
BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
OURS = sorted({path.parent.name for path in CONF.glob("*/*.yaml") if "/steps/" in path.read_text()})
OPTIONS = [(group, path.stem) for group in OURS for path in sorted((CONF / group).glob("*.yaml"))]


@pytest.fixture
def compose():
    """Composes the project's configuration, with our groups registered; nothing is left behind."""
    before = ConfigStore.instance().repo
    ConfigStore.instance().repo = dict(before)
    prepare.frameworks.hydra.register()

    def composed(*overrides: str, name: str = "train") -> DictConfig:
        with hydra.initialize_config_dir(str(PROJECT / "configs"), **BASE):
            return hydra.compose(name, list(overrides))

    yield composed
    ConfigStore.instance().repo = before


def plain(value: Any) -> None:
    """Asserts that no type of OmegaConf's is anywhere in it."""
    assert not type(value).__module__.startswith("omegaconf"), type(value)
    if isinstance(value, dict):
        for item in (*value.keys(), *value.values()):
            plain(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            plain(item)


# ------------------------------------------------------------------------------- the groups


def test_every_group_of_ours_that_brings_steps_is_there_and_no_other(compose):
    from hydra_plugins.prepare_groups import CHOICES, PrepareGroups

    source = PrepareGroups("prepare", "prepare://")
    assert CHOICES == STEP_GROUPS
    assert source.list("", None) == ["prepare"]
    assert source.list("prepare", ObjectType.GROUP) == sorted(["steps", *OURS])
    assert source.list("prepare", ObjectType.CONFIG) == ["default"]
    assert source.list("prepare/memfmt", ObjectType.CONFIG) == sorted(
        name for group, name in OPTIONS if group == "memfmt"
    )
    assert {"memfmt", "precision", "device"} <= set(OURS)


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=lambda word: word)
def test_every_option_gives_the_steps_of_the_command_line(compose, group, option):
    theirs = compose("+prepare=default", f"prepare/{group}={option}").prepare.steps
    with composing() as compose_ours:
        ours = compose_ours(f"{group}={option}").steps
    assert theirs == ours
    assert list(theirs) == list(ours)


def test_every_step_can_be_added_and_every_option_set(compose):
    for path in sorted((CONF / "steps").glob("*.yaml")):
        found = compose("+prepare=default", "~prepare/device", f"+prepare/steps={path.stem}")
        assert found.prepare.steps == OmegaConf.load(path)
    found = compose(
        "+prepare=default", "prepare/precision=half", "prepare.steps.half.keep=[]", "+prepare.steps.brain={a:1}"
    )  # fmt: skip
    assert found.prepare.steps.half == {"dtype": "float16", "keep": [], "clamp": False}
    assert found.prepare.steps.brain == {"a": 1}


def test_a_word_that_is_no_option_is_told_with_those_that_are(compose):
    with pytest.raises(hydra.errors.MissingConfigException, match="channels_last_3d"):
        compose("+prepare=default", "prepare/memfmt=chanels_last")


def test_their_own_groups_and_keys_are_untouched(compose):
    without = compose("model=deep")
    found = compose(
        "model=deep", "+prepare=default", "prepare/memfmt=by_rank", "prepare/device=cpu"
    )
    assert OmegaConf.to_container(without) == {
        key: value for key, value in OmegaConf.to_container(found).items() if key != "prepare"
    }
    assert list(found.prepare) == ["steps"]


def test_without_being_asked_for_it_adds_nothing(compose):
    assert "prepare" not in compose()


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
    with hydra.initialize_config_dir(str(tmp_path), **BASE):
        assert hydra.compose("own", [word]).prepare == right


def test_a_group_of_their_own_called_prepare_is_theirs(compose, tmp_path):
    (tmp_path / "prepare").mkdir()
    (tmp_path / "own.yaml").write_text("defaults: [prepare: default]")
    (tmp_path / "prepare" / "default.yaml").write_text("mine: 1")
    (tmp_path / "prepare" / "other.yaml").write_text("mine: 2")
    with hydra.initialize_config_dir(str(tmp_path), **BASE):
        assert hydra.compose("own").prepare == {"mine": 1}
        assert hydra.compose("own", ["prepare=other"]).prepare == {"mine": 2}


def test_registering_again_does_nothing_and_leaves_what_is_theirs(compose):
    mine = {"steps": {"half": {"dtype": "bfloat16"}}}
    ConfigStore.instance().store(name="mine", group="prepare", node=mine, package="prepare")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare.frameworks.hydra.register()
    assert compose("+prepare=mine").prepare == mine
    assert compose("+prepare=default", "prepare/device=cpu").prepare.steps.device == {
        "device": "cpu"
    }


def test_our_own_command_line_has_its_groups_at_the_root_alone():
    from hydra_plugins.prepare_groups import PrepareSearchPath

    added = {CONF: f"prepare-words://{CONF}", PROJECT / "configs": "prepare://"}
    for folder, source in added.items():
        path = ConfigSearchPathImpl()
        path.append("main", f"file://{folder}")
        PrepareSearchPath().manipulate_search_path(path)
        assert [element.path for element in path.get_path()] == [f"file://{folder}", source]


SYNONYMS = [
    *(("precision", said, "bfloat16") for said in ("bf16", "BF16", "torch.bfloat16")),
    *(("precision", said, "half") for said in ("fp16", "float16")),
    ("precision", "fp32", "float32"),
    *(("memfmt", said, "channels_last") for said in ("nhwc", "cl")),
    *(("memfmt", said, "channels_last_3d") for said in ("ndhwc", "cl3")),
    *(("memfmt", said, word) for said, word in (("both", "by_rank"), ("nchw", "contiguous"))),
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


def test_a_synonym_gives_the_same_run_as_the_word_itself(compose):
    theirs = compose("+prepare=default", "prepare/precision=bf16", "prepare/memfmt=nhwc")
    assert list(theirs.prepare.steps) == ["device", "half", "conv2d_memory_format"]
    with composing() as compose_ours:
        ours = compose_ours("device=gpu", "precision=bf16", "memfmt=nhwc")
    assert ours.steps.device.device == "cuda"
    assert ours.steps.half == theirs.prepare.steps.half
    chosen = {"device": "cuda", "precision": "bfloat16", "memfmt": "channels_last"}
    assert choices_in(ours.hydra).items() >= chosen.items()


def test_a_synonym_in_the_file_of_an_experiment_is_understood(tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - override /memfmt: ndhwc\n"
    (tmp_path / "experiment" / "fast.yaml").write_text(text)
    with composing(tmp_path) as compose_ours:
        assert list(compose_ours("+experiment=fast").steps) == [
            "device",
            "conv3d_memory_format",
        ]


def test_an_option_file_of_theirs_stands_beside_ours(compose, tmp_path):
    (tmp_path / "prepare" / "memfmt").mkdir(parents=True)
    mine = "# @package prepare\ndefaults: [/prepare/steps/conv3d_memory_format@steps]\n"
    (tmp_path / "prepare" / "memfmt" / "mine.yaml").write_text(mine)
    where = f"hydra.searchpath=[file://{tmp_path}]"
    found = compose(where, "+prepare=default", "prepare/memfmt=mine", "~prepare/device")
    assert list(found.prepare.steps) == ["conv3d_memory_format"]


def test_it_may_be_composed_where_hydra_is_initialized_already(compose):
    with hydra.initialize_config_dir(str(PROJECT / "configs"), **BASE):
        assert GlobalHydra.instance().is_initialized()
        prepare.frameworks.hydra.register()
        found = hydra.compose("train", ["+prepare=default", "prepare/memfmt=channels_last"])
        pipeline = Pipeline.from_config(found.prepare.steps)
        assert "conv2d_memory_format" in pipeline.to_config()
        assert GlobalHydra.instance().is_initialized()


def test_only_what_the_words_of_the_model_name_may_be_called():
    model = {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "collections.OrderedDict"}, {"_target_": "shutil.rmtree"},
             {"_target_": "no.such"}]}  # fmt: skip
    assert listed_targets(model) == [
        "torch.nn.Sequential",
        "torch.nn.modules.container.Sequential",  # under which Hydra 1.4 finds it
        "collections.OrderedDict",
        "collections.OrderedDict",
    ]


def test_registering_loads_no_torch_and_nothing_of_the_command_line():
    code = (
        "import sys, prepare.frameworks.hydra; prepare.frameworks.hydra.register(); "
        "print([m for m in ('torch', 'rich', 'prepare.app.cli', 'prepare.app.cli.hydra_app', 'prepare.job') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "[]\n"


# ------------------------------------------------------------------------------- structured configurations


@dataclass
class WithRoom:
    lr: float = 0.1
    layout: str = "channels_last_3d"
    prepare: Any = None


@dataclass
class Format:
    memory_format: str = "${layout}"
    exclude: list[str] = field(default_factory=lambda: ["2"])


@dataclass
class Steps:
    conv3d_memory_format: Format = field(default_factory=Format)
    half: dict[str, Any] | None = None


@dataclass
class Prepared:
    steps: Steps = field(default_factory=Steps)


def test_a_structured_configuration_takes_our_groups(compose):
    ConfigStore.instance().store(name="with_room", node=WithRoom)
    found = compose("+prepare=default", "prepare/memfmt=channels_last_3d", name="with_room")
    assert Pipeline.from_config(found.prepare.steps).to_config()["conv3d_memory_format"]
    assert OmegaConf.get_type(found) is WithRoom


def test_a_structured_pipeline_of_their_own_is_taken(compose):
    store = ConfigStore.instance()
    store.store(name="with_room", node=WithRoom)
    store.store(name="typed", group="prepare", node=Prepared, package="prepare")
    steps = compose("+prepare=typed", name="with_room").prepare.steps
    assert OmegaConf.get_type(steps) is Steps
    assert Pipeline.from_config(steps).to_config() == {
        "conv3d_memory_format": {
            "memory_format": "channels_last_3d",
            "include": [],
            "exclude": ["2"],
        }
    }


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
    plain(pipeline.to_config())
    for step in pipeline.steps.values():
        plain(vars(step))
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


def test_a_pipeline_from_a_composed_configuration_prepares_and_saves(compose, tmp_path):
    found = compose("+prepare=default", "prepare/memfmt=channels_last", "prepare/device=cpu")
    pipeline = Pipeline.from_config(found.prepare.steps)
    model = pipeline.apply(small_2d())
    assert model[0].weight.stride() == (27, 1, 9, 3)
    pipeline.save(tmp_path / "recipe.yaml")
    assert Pipeline.load(tmp_path / "recipe.yaml").to_config() == pipeline.to_config()


# ------------------------------------------------------------------------------- a whole project


def train(folder: Path, *overrides: str) -> dict:
    """Run the project's own program in an empty folder, and return what it leaves."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, PROJECT / "train.py", *overrides, "hydra.run.dir=out"],
        capture_output=True, text=True, cwd=folder, check=False, timeout=120,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "out" / "result.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "stride", "steps"),
    [
        (["+prepare=default", "prepare/memfmt=channels_last"], [9, 1, 3, 1], ["device", "conv2d_memory_format"]),
        pytest.param(["experiment=prepared"], [27, 1, 9, 3, 1],
         ["device", "conv3d_memory_format", "half", "input_format"], marks=pytest.mark.slow),
    ],
    ids=["from the command line", "from an experiment of theirs"],
)  # fmt: skip
def test_a_project_in_the_shape_of_the_template_trains_prepared(tmp_path, overrides, stride, steps):
    found = train(tmp_path, *overrides)
    assert found["strides"]["layers.0.weight"] == stride
    assert list(found["steps"]) == steps
    assert found["device"] == "theirs"
    assert (tmp_path / "out" / ".hydra" / "config.yaml").exists()


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
        with hydra.initialize_config_dir(str(folder / "configs"), **BASE):
            cfg = hydra.compose("train", list(words))
        return hydra.utils.get_method("template.train")(cfg)

    yield trained
    assert not [
        file for file in folder.rglob("*.*") if "prepare" in file.read_text(errors="ignore")
    ]


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
    ],
    ids=["a class", "a factory as timm's create_model", "a callback"],
)
def test_the_code_of_a_stranger_trains_prepared_as_it_is(strangers, monkeypatch, words):
    class Prepare:
        """Stands for `prepare.frameworks.lightning.Prepare`: prepares in `setup`, without the import of Lightning."""

        def __init__(self, recipe):
            self.recipe = NetworkRecipe(recipe)

        def setup(self, trainer, module, stage):
            self.recipe.apply(child_network(module, None))

    monkeypatch.setitem(sys.modules, "theirs_prepare", types.SimpleNamespace(Prepare=Prepare))
    plain, losses = strangers("model=created" if "model=created" in words else "model=lit")
    assert plain.layers[0].weight.stride() == (27, 9, 3, 1)
    net, found = strangers(*ASKED, *words)
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


def test_a_network_of_a_configuration_comes_prepared(compose):
    net = {"_target_": "prepare.frameworks.hydra.prepared", "model": {"_target_": "torch.nn.Conv2d", "in_channels": 3,
           "out_channels": 4, "kernel_size": 3}, "steps": {"conv2d_memory_format": {}}}  # fmt: skip
    conv = hydra.utils.instantiate(OmegaConf.create(net))
    assert conv.weight.stride() == (27, 1, 9, 3)
    assert conv(torch.randn(2, 3, 8, 8)).stride() == (144, 1, 24, 4)


@pytest.mark.parametrize(
    ("node", "words"),
    [({}, "give either"), ({"of": "torch.nn.ReLU", "model": {"_target_": "torch.nn.ReLU"}}, "give either"),
     ({"of": "builtins.dict", "a": 1}, "builtins.dict is a dict and not a module")],
    ids=["nothing", "both", "no module"],
)  # fmt: skip
def test_a_node_that_gives_no_network_is_told_in_one_line(node, words):
    full = {"_target_": "prepare.frameworks.hydra.prepared", "steps": {}, **node}
    with pytest.raises(hydra.errors.InstantiationException, match=words):
        hydra.utils.instantiate(full)


@pytest.mark.slow
def test_the_project_trains_to_the_same_loss_with_and_without(tmp_path):
    plainly, prepared = tmp_path / "plainly", tmp_path / "prepared"
    plainly.mkdir()
    prepared.mkdir()
    found = train(plainly)
    assert found["steps"] == {}
    words = ("+prepare=default", "prepare/memfmt=channels_last", "prepare/device=cpu")
    assert train(prepared, *words)["losses"] == pytest.approx(found["losses"], abs=1e-6)


@pytest.mark.slow
def test_another_applications_sweep_runs_in_joblib_workers(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = ("--multirun", "+prepare=default", "prepare/memfmt=channels_last,contiguous")
    words += ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=out")
    done = subprocess.run(
        [sys.executable, PROJECT / "train.py", *words], capture_output=True, text=True, cwd=tmp_path, check=False,
        timeout=200, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.rglob("result.json"))]
    formats = [found["steps"]["conv2d_memory_format"]["memory_format"] for found in results]
    assert formats == ["channels_last", "contiguous"]
