"""A patch of an installed package applies to its files, and the patched model keeps outputs and layout."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import hydra.utils
import pytest
import torch
from omegaconf import OmegaConf

from paths import CONF
from prepare.pipeline import Pipeline
from prepare.stages.flow import observe
from prepare.stages.patch.make_patch import write_diff
from prepare.steps.keeping.choose_calls import choose_calls

pytestmark = pytest.mark.slow
FORMATS = {"conv2d_memory_format": {}, "conv3d_memory_format": {}, "input_format": {}}
PIPELINE = Pipeline.from_config({"repair_layout": {}, **FORMATS})


@pytest.fixture(autouse=True)
def two_threads():
    """On one thread torch runs small 3-d convolutions in its reference kernel, which is contiguous."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def loaded(module, file):
    """Return the module of a patched file, of the package and name of the original."""
    spec = importlib.util.spec_from_file_location(module.__name__, file)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("name", ["wan", "hunyuan"])
def test_a_patched_file_of_diffusers_keeps_outputs_and_layout(name, tmp_path):
    pytest.importorskip("diffusers")
    config = OmegaConf.load(CONF / "model" / f"diffusers_autoencoder_{name}.yaml")
    torch.manual_seed(0)
    reference = hydra.utils.instantiate(config.model, _convert_="all").eval()
    model = PIPELINE.apply(reference, known_issues="ignore")
    batch = PIPELINE.format(torch.randn(*config.input.shape))
    chosen = choose_calls(model, batch, backward=False)
    module = sys.modules[type(model).__module__]
    original = Path(module.__file__)
    root = original.parents[len(module.__name__.split(".")) - 1]
    copied = tmp_path / original.relative_to(root)
    copied.parent.mkdir(parents=True)
    shutil.copy(original, copied)
    (tmp_path / "patch.diff").write_text(write_diff(chosen.calls))
    subprocess.run(["git", "apply", "--check", "patch.diff"], check=True, cwd=tmp_path)
    subprocess.run(["git", "apply", "patch.diff"], check=True, cwd=tmp_path)
    cls = getattr(loaded(module, copied), type(model).__name__)
    patched = PIPELINE.apply(cls.from_config(model.config).eval(), known_issues="ignore")
    patched.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected, output = model(batch, return_dict=False)[0], patched(batch, return_dict=False)[0]
    # Convolutions round otherwise in another layout.
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    assert observe(model, batch).summary["breaks"] == chosen.before.summary["breaks"] > 0
    assert observe(patched, batch).summary["breaks"] == chosen.after.summary["breaks"] == 0
