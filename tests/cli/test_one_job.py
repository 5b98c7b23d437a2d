"""One job from words to files: its record, its network and example, autocast and metrics."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from paths import RUN
from prepare.audit import audit
from prepare.pipeline import Pipeline
from prepare.registry import STEPS
from run_faults import WRITTEN
from sample_nets import Net
from words import NET, SMALL, UNET3D

FILES = {*WRITTEN, "prepare.log", ".hydra"}


def test_the_main_job_prepares_audits_and_leaves_its_record(go):
    ran = go(*UNET3D, "memfmt=channels_last_3d", "device=cpu")
    assert ran.code == 0, ran.err
    assert {path.name for path in ran.folder.iterdir()} == FILES
    assert ran.result["status"] == "ok"
    assert ran.result["error"] is None
    audited = json.loads((ran.folder / "audit.json").read_text())
    assert audited["summary"]["convolutions"]["converted"] == 8
    assert "8 of 8" in ran.out
    assert "8 converted, 0" in ran.page
    assert "[2, 1, 8, 8, 8] float32 -> [2, 2, 8, 8, 8] float32" in ran.page
    assert str(ran.folder.relative_to(Path.cwd())) in ran.out


def test_the_recipe_gives_the_same_audit_without_hydra(go):
    folder = go(NET, SMALL, "memfmt=channels_last", "precision=half", "device=cpu").folder
    pipeline = Pipeline.load(folder / "recipe.yaml")
    model = Net().eval()
    plan = pipeline.plan(model)
    audited = audit(pipeline.apply(model), plan=plan)
    assert audited.to_json() == (folder / "audit.json").read_text()


WRONG = ("model._target_=sample_nets.wrong_in_training", "memfmt=channels_last", "mode=train")


def test_wrong_gradients_are_refused_before_and_found_after(go):
    ran = go(*WRONG, "input.shape=[1,3,16,16]")
    assert ran.code == 2
    assert "wrong gradients" in ran.err
    ran = go(*WRONG, "input.shape=[1,3,16,16]", "known_issues=ignore")
    assert ran.code == 3, ran.out + ran.err
    result = json.loads((ran.folder / "result.json").read_text())
    assert (result["status"], result["traceback"]) == ("verification_failed", None)
    assert "gradients" in result["error"]
    assert json.loads((ran.folder / "verify.json").read_text())["status"] == "fail"
    assert "repair_layout" in ran.out
    for words in (["+steps.repair_layout={}"], ["known_issues=ignore", "verify=none"]):
        assert go(*WRONG, "input.shape=[1,3,16,16]", *words).code == 0


def test_a_network_of_the_current_folder_is_built_with_its_keywords(go, tmp_path):
    (tmp_path / "my_own_package").mkdir()
    (tmp_path / "my_own_package" / "nets.py").write_text(
        "from torch import nn\n"
        "def build(depth, *, name):\n"
        "    assert type(name) is dict and type(name['a']) is list\n"
        "    return nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(depth)))\n"
    )
    ran = go(
        "model._target_=my_own_package.nets.build", "+model.depth=3", "+model.name={a:[1]}", SMALL,
        "memfmt=channels_last",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "3 of 3" in ran.out
    assert str(tmp_path) not in sys.path


def test_a_plugin_is_imported_before_its_step_is_looked_up(go, tmp_path):
    (tmp_path / "my_plugin.py").write_text(
        "from prepare.registry import register\n"
        "from prepare.step import TensorStep, Want\n"
        "@register('my_step')\n"
        "class MyStep(TensorStep):\n"
        "    def want(self, tensor):\n"
        "        return Want(dtype='float64') if tensor.tensor.is_floating_point() else None\n"
    )
    try:
        ran = go(NET, "plugins=[my_plugin]", "+steps.my_step={}")
        assert ran.code == 0, ran.err
        assert "2 float64" in ran.page
    finally:
        STEPS._classes.pop("my_step", None)
        sys.modules.pop("my_plugin", None)


def test_the_command_works_in_any_folder_without_a_terminal(tmp_path):
    environment = {
        "LANG": "C",
        "LC_ALL": "C",
        "PYTHONIOENCODING": "ascii",
        "PYTHONCOERCECLOCALE": "0",
    }
    environment |= {"COLUMNS": "40", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, str(RUN), *UNET3D, "memfmt=channels_last_3d", "bench=none"]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, check=False, env=environment)
    assert done.returncode == 0, done.stderr.decode()
    assert b"8 of 8 convolutions converted" in done.stdout
    assert done.stdout.isascii()
    assert max(map(len, done.stdout.splitlines()[1:-1])) <= 40
    assert b"Traceback" not in done.stderr


def test_a_job_under_autocast_says_so_and_keeps_the_recipe(go):
    words = (NET, SMALL, "memfmt=channels_last", "device=cpu", "flow=none")
    plain, cast = go(*words), go(*words, "amp=bfloat16")
    assert cast.code == 0, cast.err
    assert "to bfloat16: " in cast.out
    assert (plain.result["amp"], cast.result["amp"]) == ("none", "bfloat16")
    recipes = [(ran.folder / "recipe.yaml").read_text() for ran in (plain, cast)]
    assert recipes[0] == recipes[1]
    verified = json.loads((cast.folder / "verify.json").read_text())
    assert (verified["amp"], verified["status"]) == ("bfloat16", "pass")
    page = (cast.folder / "report.html").read_text()
    assert "in bfloat16" in page
    assert "torch.autocast(&#34;cpu&#34;, torch.bfloat16)" in page


def test_training_in_half_points_at_amp(go):
    ran = go(NET, "precision=half", "mode=train")
    assert ran.code == 2
    assert "amp=float16" in ran.err


def test_text_from_the_environment_is_not_a_number(go, monkeypatch):
    monkeypatch.setenv("SEED", "5")
    ran = go(NET, "seed=${oc.env:SEED}")
    assert ran.code == 2
    assert ran.err.startswith("seed: ")
    assert go(NET, 'seed="${oc.decode:${oc.env:SEED}}"', "task=plan").code == 0


def composed(go, *argv):
    ran = go(*argv, "--cfg", "job")
    assert ran.code == 0, ran.err
    return yaml.safe_load(ran.out)


def test_the_steps_stand_in_one_order_whatever_the_order_of_the_words(go):
    words = ["memfmt=by_rank", "precision=half", "device=cpu", "model=unet3d"]
    expected = ["device", "half", "conv2d_memory_format", "conv3d_memory_format"]
    assert list(composed(go, *words)["steps"]) == expected
    assert list(composed(go, *reversed(words))["steps"]) == expected


def test_options_are_set_steps_dropped_added_and_moved(go):
    base = ("model=unet3d", "precision=half", "memfmt=channels_last_3d")
    assert composed(go, *base, "steps.half.keep=[]")["steps"]["half"]["keep"] == []
    assert composed(go, *base, "steps.half=null")["steps"]["half"] is None
    assert composed(go, *base, "+steps.input_format={}")["steps"]["input_format"] == {}
    moved = composed(go, *base, "~steps.device", "+steps.device={device: cpu}")["steps"]
    assert list(moved) == ["half", "conv3d_memory_format", "device"]
    assert "half" not in composed(go, *base, "~precision")["steps"]


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float64"])
def test_precision_float32_casts_a_model_of_another(go, stored):
    ran = go(NET, SMALL, f"+model.dtype={stored}", "verify=short")
    assert ran.code == 0
    recipe = yaml.safe_load((ran.folder / "recipe.yaml").read_text())
    assert recipe["steps"]["half"]["dtype"] == "float32"
    rows = json.loads((ran.folder / "audit.json").read_text())["rows"]
    assert {row["dtype"] for row in rows} == {"float32"}
    planned = go(NET, SMALL, f"+model.dtype={stored}", "~precision", "task=plan")
    assert planned.code == 0
    assert "half" not in planned.out
