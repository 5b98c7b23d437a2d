"""Steps of third parties: found by entry point, imported when used, and never in another's way."""

import json
import subprocess
import sys

import pytest
from torch import nn

import example_packages
from paths import ROOT
from prepare.errors import ConfigError, StepError
from prepare.registry import STEPS, owner, register
from prepare.step import Step, TensorStep


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return example_packages.installed("example_plugin", tmp_path_factory.mktemp("plugin"))


def run(code, installed, *, check=True):
    env = {"PYTHONPATH": f"{installed}:{ROOT}", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=check, env=env)


def test_an_installed_step_is_listed_without_being_imported(installed):
    code = """
import json, sys
from prepare.registry import STEPS
names = list(STEPS)
imported = "example_prepare_steps" in sys.modules
from torch import nn
from prepare.pipeline import Pipeline
model = nn.Sequential(nn.Embedding(4, 4), nn.Embedding(4, 4), nn.Linear(4, 4))
pipeline = Pipeline.from_config({"embeddings_in_bfloat16": {"exclude": ["1"]}})
pipeline.apply(model)
print(json.dumps([names, imported, [str(m.weight.dtype) for m in model], pipeline.to_config()]))
"""
    names, imported, dtypes, config = json.loads(run(code, installed).stdout)
    assert {"embeddings_in_bfloat16", "broken_step", "half"} <= set(names)
    assert names == sorted(names)
    assert not imported
    assert dtypes == ["torch.bfloat16", "torch.float32", "torch.float32"]
    assert config == {"embeddings_in_bfloat16": {"exclude": ["1"]}}


def test_a_plugin_that_fails_to_import_hurts_only_those_who_use_it(installed):
    code = """
from prepare.registry import STEPS
STEPS["embeddings_in_bfloat16"]
print("fine")
STEPS["broken_step"]
"""
    done = run(code, installed, check=False)
    assert done.stdout == "fine\n"
    assert "a_package_that_is_not_installed" in done.stderr.splitlines()[-1]
    assert "example_prepare_broken:Broken failed" in done.stderr
    assert "import a_package_that_is_not_installed" in done.stderr, (
        "the plugin's own traceback is kept"
    )


def test_a_taken_name_is_an_error_naming_both_owners(plugin):
    class Other(TensorStep):
        """Another one."""

    with pytest.raises(ConfigError) as caught:
        plugin("half")(Other)
    said = str(caught.value)
    assert "prepare.steps.half.Half" in said
    assert owner(Other) in said
    assert STEPS["half"].__name__ == "Half"


def test_only_a_subclass_of_a_step_kind_can_be_registered():
    for wrong in (nn.Linear, Step, 3):
        with pytest.raises(
            StepError, match="is not a step; subclass one of TensorStep, ModuleStep"
        ):
            register("wrong")(wrong)
    assert "wrong" not in STEPS
