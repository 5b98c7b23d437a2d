"""The steps of a recipe by command: recipe=FILE."""

import json

import pytest
import yaml

from prepare.pipeline import Pipeline
from words import NET, SMALL

QUICK = (NET, SMALL, "+model.depth=2", "verify=none")
RECIPE = {
    "device": {"device": "cpu"},
    "half": {"dtype": "bfloat16"},
    "conv2d_memory_format": {"memory_format": "channels_last", "exclude": ["convs.0"]},
}


@pytest.fixture
def recipe(tmp_path):
    def write(steps, name="recipe.yaml"):
        content = {"format": "prepare.recipe", "version": 1, "steps": steps}
        (tmp_path / name).write_text(yaml.safe_dump(content, sort_keys=False))
        return f"recipe={name}"

    return write


def steps_of(ran):
    assert (ran.code, ran.err) == (0, "")
    return Pipeline.load(ran.folder / "recipe.yaml").to_config()


def test_a_recipe_is_applied_as_it_is(go, recipe):
    assert steps_of(go(*QUICK, recipe(RECIPE))) == Pipeline.from_config(RECIPE).to_config()


def test_the_recipe_of_a_run_gives_the_same_run(go):
    first = go(*QUICK, "memfmt=channels_last", "precision=bfloat16", "+steps.keep_layout={}")
    second = go(*QUICK, f"recipe={first.folder / 'recipe.yaml'}")
    assert steps_of(second) == steps_of(first)
    audits = [json.loads((ran.folder / "audit.json").read_text()) for ran in (first, second)]
    assert audits[0]["rows"] == audits[1]["rows"]


def test_words_add_to_a_recipe_change_it_and_drop_from_it(go, recipe):
    words = ("+steps.fuse_conv_bn={}", "steps.half.keep=[]", "steps.conv2d_memory_format=null")
    found = steps_of(go(*QUICK, recipe(RECIPE), *words))
    assert sorted(found) == ["device", "fuse_conv_bn", "half"]
    assert found["half"]["keep"] == []
    assert found["half"]["dtype"] == "bfloat16"


def test_a_group_adds_what_the_recipe_lacks(go, recipe):
    steps = {"conv2d_memory_format": RECIPE["conv2d_memory_format"]}
    found = steps_of(go(*QUICK, recipe(steps), "precision=bfloat16"))
    assert found["conv2d_memory_format"]["exclude"] == ["convs.0"]
    assert found["half"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("word", "step"),
    [
        ("precision=half", "half"),
        ("precision=float32", "half"),
        ("memfmt=contiguous", "conv2d_memory_format"),
    ],
)
def test_a_group_that_contradicts_a_recipe_is_refused(word, step, go, recipe):
    ran = go(*QUICK, recipe(RECIPE), word)
    assert (ran.code, ran.folders) == (2, [])
    (line,) = ran.err.splitlines()
    assert line.startswith(f"{word}: ")
    assert f"steps.{step}." in line


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (
            {"compile": {"options": {"cpp.cxx": "/bin/evil"}}},
            "steps.compile.options.cpp.cxx: a recipe may set only what is known to be harmless",
        ),
        (
            {"conv2d_memory_format": {"exclude": ["${oc.env:HOME}"]}},
            "recipe.yaml:6: holds '${' in '${oc.env:HOME}'; write the value itself",
        ),
        ({"halff": {}}, "steps.halff: no such step; did you mean 'half'?"),
        ({"half": {"dtyp": "float16"}}, "steps.half.dtyp: no such option; did you mean 'dtype'?"),
    ],
)
def test_a_recipe_is_checked_before_a_run(steps, said, go, recipe):
    ran = go(*QUICK, recipe(steps))
    assert (ran.code, ran.folders) == (2, [])
    assert said in ran.err
