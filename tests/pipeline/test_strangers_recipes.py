"""Recipes that somebody else wrote: no option of any step runs, reads, writes or fetches anything."""

import dataclasses
import json
import sys
from typing import Annotated, Any, Literal

import pytest
import safetensors.torch
import torch
from torch import nn

from paths import ROOT
from prepare import checkpoint, recipe
from prepare.app.job.settings import read_settings
from prepare.errors import ConfigError, PrepareError, RecipeError, RecipeWarning
from prepare.patterns import Patterns
from prepare.pipeline import Pipeline
from prepare.registry import STEPS
from prepare.step import ForRecipes, TensorStep
from prepare.steps.repairs import all_rewrites
from prepare.testing.networks import mixed
from recipe_checks import Watch

WATCH = Watch()
REFUSED = "a recipe may set only what is known to be harmless, and this is not"


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A program that leaves the file MARKER, in the current folder with a module that does the same."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "script"
    path.write_text(f"#!/bin/sh\ntouch {tmp_path}/MARKER\n")
    path.chmod(0o755)
    (tmp_path / "hostile.py").write_text("open('MARKER', 'w').close()\ndef run(*args): pass\n")
    return path


@pytest.fixture
def compiling(script):
    """The steps of a recipe that names a compiler, and the line that refuses it."""
    steps = {"compile": {"options": {"cpp.cxx": [str(script)]}}}
    return steps, f"steps.compile.options.cpp.cxx: {REFUSED}; "


def test_a_recipe_that_names_a_compiler_is_refused(compiling, tmp_path):
    steps, line = compiling
    recipe.save("recipe.yaml", steps)
    with pytest.raises(ConfigError) as raised:
        Pipeline.load("recipe.yaml")
    assert str(raised.value).startswith(line)
    assert len(str(raised.value).splitlines()) == 1
    given = {"compile": {"backend": "eager"}}
    assert Pipeline.load("recipe.yaml", steps=given).steps == Pipeline.from_config(given).steps
    assert not Pipeline.load("recipe.yaml", steps={"compile": None}).steps
    assert not (tmp_path / "MARKER").exists()


def test_a_checkpoint_whose_recipe_names_a_compiler_is_refused(compiling, tmp_path):
    steps, line = compiling
    with_recipe("weights.safetensors", steps)
    for how in ({}, {"device": "cpu"}):
        with pytest.raises(ConfigError) as raised:
            checkpoint.load("weights.safetensors", net, **how)
        assert str(raised.value).startswith(line)
    loaded = checkpoint.load("weights.safetensors", net, pipeline=Pipeline([]))
    assert loaded.model[0].weight.shape == (4, 3, 3, 3)
    assert not (tmp_path / "MARKER").exists()


def with_recipe(path, steps):
    """Write a file of weights whose metadata names these steps, as anybody can."""
    text = "{format: prepare.recipe, version: 1, steps: " + json.dumps(steps) + "}"
    safetensors.torch.save_file(net().state_dict(), path, {"recipe": text})


# ---- every option of every step


@pytest.fixture
def third_party(monkeypatch):
    """The registry with the example plugin's step, and with one of every type of option."""
    monkeypatch.setattr(STEPS, "_classes", {name: STEPS[name] for name in STEPS})
    monkeypatch.syspath_prepend(ROOT / "tests" / "example_plugin" / "src")
    monkeypatch.delitem(sys.modules, "example_prepare_steps", raising=False)
    import example_prepare_steps

    class Everything(TensorStep):
        """Every type of option."""

        text: str = "a"
        texts: tuple[str, ...] = ()
        table: dict[str, Any] = dataclasses.field(default_factory=dict)
        anything: Any = None
        maybe: str | None = None
        either: Literal["a"] | Annotated[str, "a text"] = "a"
        number: int | str = 1
        checked: Annotated[str, "a text", lambda text: None] = "b"
        harmless: Annotated[str, ForRecipes(str.isidentifier)] = "c"
        small: Annotated[int, ForRecipes(range(8).__contains__)] = 0
        exclude: Patterns = ()

        def want(self, tensor):
            return None

    STEPS.register("everything", Everything)
    return example_prepare_steps.EmbeddingsInBfloat16.name, "everything"


def hostile(script):
    words = [
        str(script),
        *["./script", "http://127.0.0.1:9/x", "hostile", "hostile.run", "${oc.env:HOME}"],
    ]
    nested = (each for word in words for each in ([word], {word: word}))
    return [*words, *nested, {"_target_": "hostile.run"}]


def test_no_option_of_any_step_runs_or_opens_anything(script, third_party):
    names = [name for name in STEPS if name != "broken_step"]
    assert {"compile", *third_party} <= set(names)
    tried = refused = 0
    batch = torch.randn(1, 3, 8, 8)
    for name in names:
        Pipeline.from_recipe({name: {}})
        for option in (field.name for field in dataclasses.fields(STEPS[name])):
            for value in hostile(script):
                tried += 1
                with WATCH:
                    try:
                        pipeline = Pipeline.from_recipe({name: {option: value}})
                    except ConfigError as error:
                        assert str(error).startswith(f"steps.{name}.{option}"), error
                        refused += 1
                        continue
                    finally:
                        WATCH.on = False
                        assert not opened(script)
                # What is left are patterns and names of calls.
                patterns = "include", "exclude", "keep", "calls", "harmless", *all_rewrites()
                assert option in patterns, (name, option, value)
                with WATCH:
                    try:
                        pipeline.apply(mixed().eval(), strict=False, known_issues="ignore")
                        pipeline.format(batch)
                    except PrepareError:
                        pass
                assert not opened(script)
    assert tried - refused < tried / 2
    assert "hostile" not in sys.modules
    assert sorted(path.name for path in script.parent.iterdir()) == ["hostile.py", "script"]


def opened(script):
    """What the watch has seen of the hostile values."""
    words = [
        str(script),
        *["./script", "hostile", "127.0.0.1", "MARKER", "Popen", "os.system", "socket"],
    ]
    return [each for each in WATCH.seen if any(word in " ".join(each) for word in words)]


def test_no_option_of_a_compiler_is_for_recipes(script):
    keys = {*torch._inductor.list_options(), "config", "cache_dir", "device", "cpp-cxx", "_target_"}
    assert len(keys) > 250
    for value in (*hostile(script), True, 1, 0.5, None):
        step = STEPS["compile"](backend="inductor", options=dict.fromkeys(keys, value))
        assert recipe.options_of(step)["options"] == {}
        assert len(recipe.refused(step)) == len(keys)


def test_a_number_is_for_recipes_as_far_as_its_mark_allows(third_party):
    Pipeline.from_recipe({"everything": {"small": 7}})
    with pytest.raises(ConfigError, match=r"^steps\.everything\.small: a recipe may set only"):
        Pipeline.from_recipe({"everything": {"small": 8}})


def test_a_backend_of_a_plugin_is_not_for_recipes(monkeypatch):
    for backend in ("some_plugin", "relu_compile_error_TESTING_ONLY", "os.system"):
        with pytest.raises(ConfigError, match=r"^steps\.compile\.backend: a recipe may set only"):
            Pipeline.from_recipe({"compile": {"backend": backend}})
    for backend in ("inductor", "eager"):
        Pipeline.from_recipe({"compile": {"backend": backend}})


# ---- regular expressions


@pytest.mark.parametrize("pattern", ["re:(a+)+b", "re:a"])
def test_a_regular_expression_is_for_python_only(pattern, tmp_path):
    with pytest.raises(ConfigError, match=f"^steps.half.keep: {REFUSED}"):
        Pipeline.from_recipe({"half": {"keep": [pattern]}})
    pipeline = Pipeline.from_config({"half": {"keep": [pattern]}})
    assert "keep" not in pipeline.to_recipe()["half"]
    assert [problem.where for problem in pipeline.left_out()] == ["steps.half.keep"]
    with pytest.raises(RecipeError, match=r"^steps\.half\.keep: "):
        pipeline.save(tmp_path / "recipe.yaml")
    config = {"model": {"_target_": "torch.nn.Identity"}, "steps": {"half": {"keep": [pattern]}}}
    with pytest.raises(ConfigError, match=r"(?m)^steps.half.keep: .*globs"):
        read_settings(config, choices={})


# ---- what is written


def test_what_a_recipe_may_not_set_is_left_out_with_a_warning(compiling, tmp_path):
    steps, _ = compiling
    pipeline = Pipeline.from_config(steps)
    line = "steps.compile.options.cpp.cxx: is left out of recipes, .*Pipeline.load"
    with pytest.warns(RecipeWarning, match=line):
        pipeline.save("recipe.yaml")
    loaded = Pipeline.load("recipe.yaml")
    assert list(recipe.load("recipe.yaml")["compile"]) == list(pipeline.to_config()["compile"])
    assert loaded.steps["compile"].options == {}
    assert not loaded.left_out()
    with pytest.warns(RecipeWarning, match=line):
        checkpoint.save(net(), "weights.safetensors", pipeline=pipeline)
    loaded = checkpoint.load("weights.safetensors", net)
    assert loaded.pipeline.to_config() == pipeline.to_recipe()
