"""`replay FOLDER`: what a run has prepared holds here, or not; and the folder is data."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from commands import UNET3D
from prepare.app.cli import main as cli
from prepare.app.cli.replay import _sides, judged
from prepare.app.job.headline import headline
from prepare.app.job.outcome import DONE, NOT_VERIFIED, Outcome
from prepare.app.job.record import Result
from prepare.core.utils.folders import conf_dir, hold_folder

OFF = ("verify=none", "bench=none")
FASTER = {"timed": "inference", "verdict": "faster", "time_ratio": 0.5}
PASSED = {"verified": "pass"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "run"
    words = (*UNET3D, "memfmt=channels_last_3d", *OFF, f"hydra.run.dir={folder}", "--quiet")
    assert cli.run([*words]) == 0
    return folder


@pytest.fixture
def bundle(made, tmp_path, monkeypatch):
    """A copy of the folder of a run, beside a module that must not be imported."""
    (tmp_path / "evil.py").write_text("from torch import nn\n\nNet = nn.Identity\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield Path(shutil.copytree(made, tmp_path / "bundle"))
    sys.modules.pop("evil", None)


def change(bundle, **keys):
    """Replace keys of the recorded configuration; those of the model are added to it."""
    path = bundle / ".hydra" / "config.yaml"
    config = yaml.safe_load(path.read_text())
    model = config["model"] | keys.pop("model", {})
    path.write_text(yaml.safe_dump(config | {"model": model} | keys))


def choose_model(bundle, name, **keys):
    """Let the folder hold a model of ours, with these keys of it changed."""
    job = json.loads((bundle / "job.json").read_text())
    (bundle / "job.json").write_text(json.dumps(job | {"choices": {"model": name}}))
    model = yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text())["model"]
    path = bundle / ".hydra" / "config.yaml"
    config = yaml.safe_load(path.read_text()) | {"model": {"method": None} | model | keys}
    path.write_text(yaml.safe_dump(config))


def test_a_run_holds_where_it_was_made(go, bundle):
    ran = go("replay", "bundle", "bench=none")
    assert (ran.code, ran.err) == (0, "")
    first, *_, record = ran.out.splitlines()
    assert first == "holds here, and was not timed"
    assert record.split() == ["record", str(ran.folder.relative_to(bundle.parent))]
    recipes = [(folder / "recipe.yaml").read_text() for folder in (bundle, ran.folder)]
    assert recipes[0] == recipes[1]
    assert ran.result["figures"]["convolutions_converted"] > 0


def test_both_machines_are_named_where_they_differ(go, bundle):
    path = bundle / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cpu": "a processor"}))
    ran = go("replay", "bundle", "bench=none", "--json")
    told = json.loads(ran.out)
    assert (told["code"], told["replay"]) == (0, "holds here, and was not timed")
    assert told["there_and_here"]["cpu"][0] == "a processor"
    assert Path(told["folder"]) == ran.folder.relative_to(bundle.parent)


@pytest.mark.slow
def test_what_is_equal_on_both_machines_is_said_once(go, bundle):
    ran = go("replay", "bundle", "bench=none")
    rows = [line.split() for line in ran.out.splitlines() if line.startswith("  machine")]
    assert rows in ([["machine", "the", "same"]], [])
    assert _sides("the same", "the same") == "the same"
    assert _sides("2.13", "") == "there: 2.13; here: absent"


def test_a_second_replay_into_a_folder_is_refused(go, bundle, tmp_path):
    with hold_folder(tmp_path / "out") as held:
        ran = go("replay", "bundle", "bench=none", f"hydra.run.dir={tmp_path / 'out'}")
    assert (held, ran.code, [*(tmp_path / "out").iterdir()]) == (True, 2, [])
    assert "another run" in ran.err


def test_a_network_of_your_own_is_asked_for_again(go, bundle):
    config = yaml.safe_load((bundle / ".hydra" / "config.yaml").read_text())
    config["model"] = {"_target_": "evil.Net"}
    (bundle / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    (bundle / "recipe.yaml").write_text("format: prepare.recipe\nversion: 1\nsteps: {}\n")
    refused = go("replay", "bundle")
    assert (refused.code, refused.folders, "evil" in sys.modules) == (2, [], False)
    assert "add model._target_=evil.Net" in refused.err
    other = go("replay", "bundle", "model._target_=evil.Other")
    assert (other.code, "evil" in sys.modules) == (2, False)
    ran = go("replay", "bundle", "model._target_=evil.Net", *OFF)
    assert (ran.code, "evil" in sys.modules) == (0, True)
    assert ran.out.startswith("holds here: the recipe changes nothing in this model\n")


def test_the_autocast_is_that_of_the_run_and_weights_are_given(go, bundle):
    change(bundle, amp="bfloat16", weights="gone.pt")
    missing = go("replay", "bundle", "weights=other.pt", *OFF)
    assert missing.code == 2
    assert missing.out.startswith("cannot be replayed here: weights: other.pt is not there")
    change(bundle, weights=None)
    ran = go("replay", "bundle", "bench=none")
    assert (ran.code, ran.result["amp"]) == (0, "bfloat16")


NESTED = {"_target_": "evil.Net"}
RECIPE = "format: prepare.recipe\nversion: 1\nsteps: {}\n"


def linked(path):
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


def piped(path):
    path.unlink()
    os.mkfifo(path)


HOSTILE = {
    "another target": (lambda b: change(b, model=NESTED), "'evil.Net', which would be imported"),
    "no target": (lambda b: change(b, model={"_target_": None}), "names no class or function"),
    "a target that ends a command": (
        lambda b: change(b, model={"_target_": "evil.Net; evil"}),
        "names no class or function",
    ),
    "a target in the model": (lambda b: change(b, model={"norm": NESTED}), "inside of the model"),
    "one in a list": (lambda b: change(b, model={"norm": [[NESTED]]}), "inside of the model"),
    "one below no name": (lambda b: change(b, model={"": NESTED}), "inside of the model"),
    "another method": (
        lambda b: change(b, model={"method": "cuda"}),
        "would be imported and called",
    ),
    "a target in the input": (
        lambda b: change(b, input={"args": [NESTED]}),
        "names code to import",
    ),
    "a factory": (
        lambda b: change(b, input={"factory": "evil.Net"}),
        "names code to import: factory",
    ),
    "one of a size": (
        lambda b: change(b, input={"workload": [{"factory": "evil.Net"}]}),
        "names code to import: factory",
    ),
    "a plugin": (lambda b: change(b, plugins=["evil"]), "names code to import: plugins"),
    "weights": (lambda b: change(b, weights="/etc/passwd"), "give the file again as weights=FILE"),
    "an interpolation": (lambda b: change(b, seed="${oc.env:HOME}"), "holds '${'"),
    "a tag": (
        lambda b: (b / ".hydra/config.yaml").write_text("model: !!python/name:os.system ''\n"),
        "holds the tag",
    ),
    "other keys of Hydra": (lambda b: change(b, model={"_args_": [1]}), "holds the key '_args_'"),
    "a link to the configuration": (lambda b: linked(b / ".hydra/config.yaml"), "is a link"),
    "a link to its folder": (lambda b: linked(b / ".hydra"), "is a link"),
    "a link to the recipe": (lambda b: linked(b / "recipe.yaml"), "is a link"),
    "a pipe": (lambda b: piped(b / ".hydra/config.yaml"), "cannot be read"),
    "a pipe as result": (lambda b: piped(b / "result.json"), "result.json: is not there"),
    "a huge file": (
        lambda b: os.truncate(b / ".hydra/config.yaml", 1 << 34),
        "is larger than 1,048,576 bytes",
    ),
    "no run": (lambda b: (b / ".hydra/config.yaml").unlink(), "cannot be read"),
    "no result": (lambda b: (b / "result.json").unlink(), "result.json: is not there"),
    "no record": (lambda b: (b / "audit.json").write_text("[" * 100_000), "audit.json"),
    "no step": (
        lambda b: (b / "recipe.yaml").write_text(RECIPE.replace("{}", "{evil: {}}")),
        "no such step",
    ),
    "an option that runs a program": (
        lambda b: (b / "recipe.yaml").write_text(
            RECIPE.replace("{}", "{compile: {options: {cpp.cxx: evil}}}")
        ),
        "a recipe may set only what is known to be harmless",
    ),
    "another network of a library": (
        lambda b: choose_model(b, "timm_resnet50", model_name="hf-hub:evil/net"),
        "would be imported and called",
    ),
    "a switch as a number": (
        lambda b: choose_model(b, "timm_resnet50", pretrained=1),
        "would be imported and called",
    ),
    "another class in a network of a library": (
        lambda b: choose_model(b, "transformers_vit", config={"_target_": "evil.Net"}),
        "inside of the model",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_is_refused_in_one_line(name, go, bundle):
    harm, wrong = HOSTILE[name]
    harm(bundle)
    ran = go("replay", "bundle", *OFF)
    assert (ran.code, ran.out, ran.folders) == (2, "", [])
    assert wrong in ran.err
    assert len(ran.err.splitlines()) == 1
    assert "evil" not in sys.modules


def test_numbers_of_a_network_of_a_library_may_differ(go, bundle):
    choose_model(bundle, "nnunet_plain2d", input_channels=2)
    # The model is not refused; what stops the replay here comes after it.
    (bundle / "recipe.yaml").write_text(RECIPE.replace("{}", "{evil: {}}"))
    assert "such step" in go("replay", "bundle").err


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ((), "takes one folder"),
        (("bundle", "bundle"), "takes one folder"),
        (("bundle", "steps=x"), "takes one folder"),
        (("bundle", "verify=ful"), "did you mean 'full'?"),
        (("nothing",), "nothing"),
        (("bundle", "hydra.run.dir=bundle"), "holds the record of another run"),
    ],
)
def test_wrong_words_are_refused(words, wrong, go, bundle):
    ran = go("replay", *words)
    assert (ran.code, ran.folders) == (2, [])
    assert wrong in ran.err


@pytest.mark.parametrize(
    ("there", "here", "text"),
    [
        (FASTER, FASTER, "holds here; inference: "),
        (FASTER, {**FASTER, "verdict": "slower", "time_ratio": 2.0}, "right, and slower here; "),
        (
            {**FASTER, "verdict": "slower"},
            {**FASTER, "verdict": "slower", "time_ratio": 2.0},
            "right, and slower here and there; ",
        ),
        (FASTER, {**FASTER, "verdict": "no difference", "time_ratio": 1.0}, "right, and not faster here"),
        (FASTER, {**FASTER, "verdict": "unclear"}, "right, and unclear whether faster here; "),
        (
            {**FASTER, "verdict": "slower"},
            {**FASTER, "verdict": "unclear"},
            "right, and unclear whether faster here; ",
        ),
        ({}, {**FASTER, "verdict": "no difference", "time_ratio": 1.0}, "holds here; "),
        (FASTER, {}, "holds here, and was not timed"),
    ],
)  # fmt: skip
def test_a_replay_says_whether_a_run_is_as_fast_here(there, here, text):
    outcome = Outcome(Result("ok", figures=PASSED | here), DONE)
    found, code = judged(headline(there), outcome)
    assert (found.startswith(text), code) == (True, 0)


def test_a_replay_says_that_results_differ_or_are_unknown():
    wrong = Outcome(
        Result("verification_failed", "wrong", "outputs: 0.7 of the scale"), NOT_VERIFIED
    )
    assert judged(headline(None), wrong) == ("differs: outputs: 0.7 of the scale", 3)
    unknown = Outcome(
        Result("ok", figures={"verified": "unclear", "verified_reason": "no time"}), DONE
    )
    assert judged(headline(None), unknown) == ("cannot tell whether it is right here: no time", 1)
    failed = Outcome(Result("failed", "model", "no such class"), 1)
    assert judged(headline(None), failed) == ("cannot be replayed here: no such class", 1)
