"""The shipped experiments: `+experiment=NAME` chooses a model, steps and the mode at once."""

import pytest

from paths import CONF
from prepare.app.cli import main as cli
from prepare.pipeline import Pipeline

NAMES = sorted(path.stem for path in CONF.glob("experiment/*.yaml"))
# A small network in place of that of the experiment.
SMALL = {
    "nnunet_training": ("model=unet3d", "model.norm=instance", "model.width=4", "model.depth=2"),
    "wan_decoder": ("model=custom", "model._target_=coder_nets.Coder", "input.shape=[1,8,3,6,7]"),
}
MORE = {"nnunet_training": ("input.shape=[2,1,8,8,8]",), "wan_decoder": ("model.method=decode",)}
STEPS = {
    "nnunet_training": {"repair_layout", "conv3d_memory_format"},
    "wan_decoder": {"repair_layout", "keep_layout", "conv3d_memory_format"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_runs_and_leaves_its_recipe(name, tmp_path, capsys):
    words = [f"+experiment={name}", *SMALL[name], *MORE[name], "memfmt=channels_last_3d"]
    assert cli.run([*words, "verify=none", "bench=none", f"hydra.run.dir={tmp_path}"]) == 0
    recipe = Pipeline.load(tmp_path / "recipe.yaml")
    assert set(recipe.steps) >= STEPS[name]
    out = " ".join(capsys.readouterr().out.split())
    assert ("bfloat16" in out) == (name == "nnunet_training")
