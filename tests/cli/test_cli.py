"""The command line: one job from words to files, the bare words, and every way to get it wrong."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

import sample_nets
from paths import RUN
from prepare.audit import audit
from prepare.cli import main as cli
from prepare.pipeline import Pipeline
from prepare.registry import STEPS
from sample_nets import Net

CONF = RUN.parent / "conf"
FILES = {
    "recipe.yaml",
    "plan.json",
    "audit.json",
    "audit.csv",
    "flow.json",
    "flow.svg",
    "verify.json",
    "report.html",
    "environment.json",
    "job.json",
    "result.json",
    "prepare.log",
    ".hydra",
}
GROUPS = ("model", "device", "precision", "amp", "memfmt", "input", "export")
NET = "model._target_=sample_nets.Net"
SMALL = "input.shape=[2,3,16,16]"
UNET3D = ("model=unet3d", "model.width=2", "model.depth=2", "input.shape=[2,1,8,8,8]")


def at(function, part):
    """The line of sample_nets.py that holds `part` in this function, as messages name it."""
    lines, first = inspect.getsourcelines(function)
    number = next(index for index, line in enumerate(lines) if part in line)
    return f"sample_nets.py:{first + number}, in {function.__name__}"


AT = {
    "raises": at(sample_nets.raises, "raise ValueError"),
    "exits": at(sample_nets.exits, "sys.exit"),
    "runs_out_of_memory": at(sample_nets.runs_out_of_memory, "raise MemoryError"),
    "Views.forward": at(sample_nets.Views.forward, ".view("),
    "Net.forward": at(sample_nets.Net.forward, "x = conv(x)"),
}
NO_CONV2D = (
    "steps.conv2d_memory_format: UNet3d has no Conv2d and 8 Conv3d; "
    "did you mean memfmt=channels_last_3d (the step conv3d_memory_format)?"
)


class Ran(NamedTuple):
    code: int
    out: str
    err: str
    folders: list[Path]

    @property
    def folder(self):
        (folder,) = self.folders
        return folder

    @property
    def result(self):
        return json.loads((self.folder / "result.json").read_text())


@pytest.fixture
def go(tmp_path, monkeypatch, capsys):
    """Runs the command line in an empty folder, in this process."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        before = {path.parent for path in tmp_path.glob("outputs/*/*/result.json")}
        with pytest.raises(SystemExit) as stop:
            cli.main(untimed(argv))
        out, err = capsys.readouterr()
        # What takes over a second on a busy machine is announced, which is not an error.
        err = "".join(row for row in err.splitlines(keepends=True) if not row.endswith(" ...\n"))
        assert not GlobalHydra.instance().is_initialized()
        after = {path.parent for path in tmp_path.glob("outputs/*/*/result.json")}
        return Ran(stop.value.code, out, err, sorted(after - before))

    return run


def untimed(argv):
    """The words of a job, with `bench=none` where they do not say what is to be timed."""
    is_job = any(word.startswith("model") for word in argv)
    is_asked = any(word.startswith("bench=") for word in argv)
    return [*argv, "bench=none"] if is_job and not is_asked else list(argv)


def run_py(*argv, cwd, **environment):
    return subprocess.run(
        [sys.executable, str(RUN), *argv],
        capture_output=True,
        cwd=cwd,
        check=False,
        env=environment or None,
    )


def composed(go, *argv):
    ran = go(*argv, "--cfg", "job")
    assert ran.code == 0, ran.err
    return yaml.safe_load(ran.out)


# ---------------------------------------------------------------------------------------- one job


def test_the_main_job_prepares_audits_and_leaves_its_record(go):
    ran = go(*UNET3D, "memfmt=channels_last_3d", "device=cpu")
    assert ran.code == 0, ran.err
    assert {path.name for path in ran.folder.iterdir()} == FILES
    assert ran.result["status"] == "ok"
    assert ran.result["error"] is None
    audited = json.loads((ran.folder / "audit.json").read_text())
    assert audited["summary"]["convolutions"]["converted"] == 8
    assert "UNet3d is prepared: device cpu, conv3d_memory_format channels_last_3d" in ran.out
    assert "8 converted, 0 already, 0 skipped, 0 ineffective" in ran.out
    assert "[2, 1, 8, 8, 8] float32 -> [2, 2, 8, 8, 8] float32" in ran.out
    # How many depends on the kernels that this machine chooses; that they were watched does not.
    assert re.search(r"\d of 8 convolutions returned channels_last_3d", ran.out)
    assert str(ran.folder.relative_to(Path.cwd())) in ran.out


def test_two_runs_write_the_same_bytes(go):
    first, second = (
        go(*UNET3D, "memfmt=channels_last_3d", "precision=bfloat16").folder for _ in "ab"
    )
    assert first != second
    for name in ("recipe.yaml", "plan.json", "audit.json", "audit.csv"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_the_recipe_gives_the_same_audit_without_hydra(go):
    folder = go(NET, SMALL, "memfmt=channels_last", "precision=half", "device=cpu").folder
    pipeline = Pipeline.load(folder / "recipe.yaml")
    model = Net().eval()
    plan = pipeline.plan(model)
    audited = audit(pipeline.apply(model), plan=plan)
    assert audited.to_json() == (folder / "audit.json").read_text()


def test_a_plan_touches_nothing_and_says_what_would_change(go):
    ran = go(*UNET3D, "memfmt=channels_last_3d", "precision=half", "task=plan")
    assert ran.code == 0, ran.err
    assert {path.name for path in ran.folder.iterdir()} == FILES - {
        "recipe.yaml",
        "audit.json",
        "audit.csv",
        "flow.json",
        "flow.svg",
        "verify.json",
    }
    assert "would be prepared" in ran.out
    assert re.search(
        r"upsample\.0\.weight +\[8, 8, 2, 2, 2\] +contiguous -> channels_last_3d ", ran.out
    )
    assert "float32 -> float16" in ran.out
    assert "plan.json has them all" in go("model=unet3d", "precision=half", "task=plan").out


WRONG = ("model._target_=sample_nets.wrong_in_training", "memfmt=channels_last", "mode=train")


def test_wrong_gradients_are_refused_before_and_found_after(go):
    ran = go(*WRONG, "input.shape=[1,3,16,16]")
    assert ran.code == 2
    assert "wrong gradients" in ran.err
    ran = go(*WRONG, "input.shape=[1,3,16,16]", "known_issues=ignore")
    assert ran.code == 3, ran.out + ran.err
    result = json.loads((ran.folder / "result.json").read_text())
    assert (result["status"], result["traceback"]) == ("verification_failed", None)
    assert "gradients (train mode, batch 1)" in result["error"]
    assert json.loads((ran.folder / "verify.json").read_text())["status"] == "fail"
    assert "repair_layout" in ran.out
    for words in (["+steps.repair_layout={}"], ["known_issues=ignore", "verify=none"]):
        assert go(*WRONG, "input.shape=[1,3,16,16]", *words).code == 0


def test_a_full_verification_compares_both_modes(go):
    ran = go(NET, SMALL, "memfmt=channels_last", "verify=full")
    assert ran.code == 0, ran.out + ran.err
    checks = json.loads((ran.folder / "verify.json").read_text())["checks"]
    assert {"eval", "train"} <= {check["mode"] for check in checks}


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
    assert "3 converted" in ran.out
    assert str(tmp_path) not in sys.path


def test_a_model_that_takes_several_inputs_gets_them(go):
    ran = go(
        "model._target_=sample_nets.TakesTwo", SMALL,
        "input.kwargs={ids: {shape: [4], dtype: int64, high: 9}, scale: 2.0}",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "[2, 3, 16, 16] float32, [4] int64 -> [2, 4, 14, 14] float32" in ran.out


def test_without_an_example_the_job_says_that_none_was_run(go):
    ran = go(NET)
    assert ran.code == 0
    assert "not run; give one with input.shape=[...]" in ran.out


def test_the_example_follows_the_precision_of_the_weights(go):
    ran = go(NET, SMALL, "precision=bfloat16")
    assert "[2, 3, 16, 16] bfloat16 -> [2, 4, 14, 14] bfloat16" in ran.out


def test_train_mode_is_asked_for_by_the_key_mode(go):
    ran = go("model._target_=torch.nn.Dropout", "input.shape=[1000]", "mode=train", "+model.p=1.0")
    assert ran.code == 0, ran.err


def test_the_example_forward_does_not_count_in_running_statistics(go):
    net = ("model=unet2d", "model.width=4", "model.depth=2", "input.shape=[2,1,16,16]")
    ran = go(*net, "memfmt=channels_last", "mode=train", "verify=short")
    assert ran.code == 0, ran.err
    assert "verified      pass" in ran.out


def test_networks_with_both_kinds_of_convolution_take_by_rank(go):
    ran = go("model._target_=sample_nets.Mixed", "input.shape=[2,3,5,8,8]", "memfmt=by_rank")
    assert ran.code == 0, ran.err
    assert "1 of 1 convolution returned channels_last\n" in ran.out
    assert "1 of 1 convolution returned channels_last_3d\n" in ran.out


def test_names_that_hold_anything_are_shown_and_written(go):
    ran = go("model._target_=sample_nets.oddly_named", SMALL, "memfmt=channels_last", "task=plan")
    assert ran.code == 0, ran.err
    assert r"[red]\n=1+1.weight" in ran.out
    assert r"\udc80<b>|.weight" in ran.out


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
        assert "2 float64" in ran.out
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
    done = run_py(*UNET3D, "memfmt=channels_last_3d", "bench=none", cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr.decode()
    assert b"8 converted" in done.stdout
    assert done.stdout.isascii()
    assert max(map(len, done.stdout.splitlines()[1:-1])) <= 40
    assert b"Traceback" not in done.stderr


def test_a_network_of_transformers_is_prepared_from_its_configuration(go):
    pytest.importorskip("transformers")
    small = (
        "model.config.embedding_size=4",
        "model.config.hidden_sizes=[8]",
        "model.config.depths=[1]",
    )
    ran = go("model=transformers_resnet", *small, "input.shape=[1,3,32,32]", "memfmt=channels_last")
    assert ran.code == 0, ran.err
    assert {path.name for path in ran.folder.iterdir()} == FILES
    assert "ResNetForImageClassification is prepared" in ran.out
    converted = json.loads((ran.folder / "audit.json").read_text())["summary"]["convolutions"]
    assert converted["converted"] > 0
    assert converted["ineffective"] == 0


# ------------------------------------------------------------------------------- the configuration


def test_an_interpolation_may_be_a_value_of_a_sweep(go, monkeypatch, tmp_path):
    monkeypatch.setenv("NORM", "group")
    words = ("model.width=1,${model.depth}", "model.norm=${oc.env:NORM}", "hydra.sweep.dir=sweep")
    ran = go("-m", "model=unet3d", "model.depth=2", "seed=${hydra:job.num}", *words, "task=plan")
    assert ran.code == 0, ran.err
    rows = json.loads((tmp_path / "sweep" / "summary.json").read_text())["rows"]
    assert [row["choices"]["model.width"] for row in rows] == ["1", "${model.depth}"]


def test_a_job_under_autocast_says_so_and_keeps_the_recipe(go):
    words = (NET, SMALL, "memfmt=channels_last", "device=cpu", "flow=none")
    plain, cast = go(*words), go(*words, "amp=bfloat16")
    assert cast.code == 0, cast.err
    assert "conv2d_memory_format channels_last, under autocast to bfloat16\n" in cast.out
    assert (plain.result["amp"], cast.result["amp"]) == ("none", "bfloat16")
    recipes = [(ran.folder / "recipe.yaml").read_text() for ran in (plain, cast)]
    assert recipes[0] == recipes[1]
    verified = json.loads((cast.folder / "verify.json").read_text())
    assert (verified["amp"], verified["status"]) == ("bfloat16", "pass")
    page = (cast.folder / "report.html").read_text()
    assert "every forward in bfloat16" in page
    assert "torch.autocast(&#34;cpu&#34;, torch.bfloat16)" in page


def test_a_plan_names_the_autocast(go):
    assert ", under autocast to float16; nothing" in go(NET, "amp=float16", "task=plan").out


def test_a_metric_of_the_command_line_decides_the_exit_code(go):
    words = (NET, SMALL, "memfmt=channels_last", "flow=none", "verify.max_drop=0.1")
    assert go(*words, "verify.metric=sample_nets.constant_metric").code == 0
    ran = go(*words, "verify.metric=sample_nets.format_metric")
    assert ran.code == 3
    assert (
        "metric: format_metric 1 on the unprepared model, 0 on the prepared one"
        in ran.err + ran.out
    )
    missing = go(*words, "verify.metric=sample_nets.constant_metrik")
    assert missing.code == 2
    assert "verify.metric: sample_nets has no 'constant_metrik'" in missing.err


def test_training_in_half_points_at_amp(go):
    ran = go(NET, "precision=half", "mode=train")
    assert ran.code == 2
    assert "choose precision=float32 with amp=float16" in ran.err


def test_text_from_the_environment_is_not_a_number(go, monkeypatch):
    monkeypatch.setenv("SEED", "5")
    ran = go(NET, "seed=${oc.env:SEED}")
    assert (ran.code, ran.err) == (
        2,
        "seed: '5' is not allowed; give a whole number, and not a text, as in "
        "'seed=\"${oc.decode:${oc.env:SEED}}\"'\n",
    )
    assert go(NET, 'seed="${oc.decode:${oc.env:SEED}}"', "task=plan").code == 0


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


def test_a_dropped_step_does_nothing(go):
    ran = go(
        NET,
        SMALL,
        "precision=half",
        "steps.half=null",
        "~steps.device",
        "+steps.device={device: cpu}",
    )
    assert ran.code == 0, ran.err
    assert "2 float32" in ran.out


def test_the_precision_float32_refuses_a_model_that_is_something_else(go):
    ran = go(NET, "+model.dtype=bfloat16", "+model.depth=2")
    assert ran.code == 2
    assert ran.err == (
        "precision: float32 adds no step, and the model holds 4 tensors that are not: "
        "convs.0.weight (bfloat16), convs.0.bias (bfloat16), convs.1.weight (bfloat16), ...; build it in "
        "float32, or choose precision=bfloat16 or half; ~precision drops this check\n"
    )
    assert go(NET, "+model.dtype=bfloat16", "~precision").code == 0


# ------------------------------------------------------------- mistakes that the configuration shows


@pytest.mark.parametrize(
    "argv",
    [
        ["modle=unet3d"],
        ["model=unet3d", "memfmt=[a,b]"],
        ["model=unet3d", "memfmt=null"],
        ["model=unet3d", "+typo=1"],
        ["model=unet3d", "precision=half", "steps.half.dtype=float15"],
        ["model=unet3d", "seed=${oc.env:NOT_SET_ANYWHERE}"],
        ["unet3d"],
        ["model=unet3d", "--mutlirun"],
        ["model=unet3d", "--cfg", "jobb"],
        ["model=unet3d", "--config-name", "nope"],
        ["model=unet3d", "hydra.rn.dir=x"],
        ["model=unet3d", "hydra.job.chdir=maybe"],
        ["model=unet3d", "--config-dir", "nope"],
    ],
    ids=" ".join,
)
def test_a_configuration_error_is_one_line_and_leaves_no_folder(go, tmp_path, argv):
    ran = go(*argv)
    assert ran.code == 2
    assert ran.out == ""
    assert len(ran.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_the_configuration_shows_is_found_without_torch(tmp_path):
    code = """
import sys
from prepare.cli import main as cli
for argv in (
    ["--help"], ["steps"], ["--version"], ["model=unet3dd"], ["memfmt=x", "+typo=1"],
    ["model=unet3d", "precision=half", "steps.half.dtype=x"], ["--cfg", "job"], ["diff", "a", "b"],
    ["--multirun", "model=unet3d", "memfmt=contiguous,chanels_last"],
):
    print("CODE", argv[0], cli.run(argv))
    assert "torch" not in sys.modules, argv
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False,
        env={"PYTHONPATH": str(RUN.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    codes = re.findall(r"^CODE (\S+) (\d)$", done.stdout, re.MULTILINE)
    assert [code for _, code in codes] == ["0", "0", "0", "2", "2", "2", "0", "2", "2"]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ mistakes that only the model shows


@pytest.mark.parametrize(
    ("argv", "status", "line"),
    [
        ([*UNET3D, "memfmt=channels_last"], "no_effect", NO_CONV2D),
        (
            [*UNET3D, "memfmt=channels_last_3d", "steps.conv3d_memory_format.exclude=[encodr.*]"],
            "failed",
            (
                "steps.conv3d_memory_format.exclude: 'encodr.*' matches no module that "
                "conv3d_memory_format prepares; did you mean 'encoder.*'?"
            ),
        ),
        (
            ["model._target_=sample_nets.NeedsDepth"],
            "failed",
            "model.depth: is missing, and sample_nets.NeedsDepth needs it; give +model.depth=value",
        ),
        (
            [NET, "+model.dept=2"],
            "failed",
            (
                "model.dept: not a keyword of sample_nets.Net; did you mean 'depth'? "
                "keywords: depth, width, dtype"
            ),
        ),
        (
            ["model._target_=sample_nets.Nett"],
            "failed",
            "model._target_: sample_nets has no 'Nett'; did you mean 'sample_nets.Net'?",
        ),
        (
            ["model._target_=sample_netz.Net"],
            "failed",
            "model._target_: module 'sample_netz' does not exist; install it, or start in the folder that holds it",
        ),
        (
            ["model._target_=sample_nets.gives_no_model"],
            "failed",
            (
                "model._target_: sample_nets.gives_no_model returned an object of type int, "
                "not a torch.nn.Module; name a class or function that returns a model"
            ),
        ),
        (
            [NET, "plugins=[no_such_plugin]"],
            "failed",
            "plugins[0]: module 'no_such_plugin' does not exist; install it, or start in the folder that holds it",
        ),
    ],
)
def test_an_error_that_the_model_shows_exits_2_and_has_a_page(go, argv, status, line):
    ran = go(*argv)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.splitlines() == [line]
    left = {"job.json", "environment.json", "report.html", "result.json", "prepare.log", ".hydra"}
    assert {path.name for path in ran.folder.iterdir()} == left
    assert ran.result["status"] == status
    assert ran.result["error"] == line


def test_a_request_without_effect_is_reported(go):
    ran = go(*UNET3D, "memfmt=channels_last", "strict=false")
    assert ran.code == 0
    assert NO_CONV2D in " ".join(ran.out.split())


def test_a_package_that_is_not_there_names_the_extra_that_brings_it(go):
    ran = go("model=timm_resnet50")
    if "no module" not in ran.err:
        pytest.skip("timm is installed")
    assert (
        "module 'timm' does not exist; install the extra: pip install 'torch-prepare[timm]'"
        in ran.err
    )


# --------------------------------------------------------------------------------- jobs that fail


@pytest.mark.parametrize(
    ("argv", "reason", "line"),
    [
        (
            ["model._target_=sample_nets.raises"],
            "model",
            f"model: building sample_nets.raises: {AT['raises']}: ValueError: no such depth",
        ),
        (
            ["model._target_=sample_nets.exits"],
            "exit",
            f"{AT['exits']}: the job called sys.exit(0)",
        ),
        (
            ["model._target_=sample_nets.runs_out_of_memory"],
            "oom",
            f"out of memory: {AT['runs_out_of_memory']}: MemoryError: 2 TiB",
        ),
        (
            ["model._target_=sample_nets.Views", SMALL, "memfmt=channels_last"],
            "model",
            (
                f"forward of Views: {AT['Views.forward']}: RuntimeError: view size is not compatible with input tensor's size and stride "
                "(at least one dimension spans across two contiguous subspaces). Use .reshape(...) instead; "
                "this module calls .view on a tensor that is no longer contiguous: use .reshape or .flatten "
                "there, or exclude the convolutions before it"
            ),
        ),
        (
            ["model._target_=sample_nets.MakesItsOwn", SMALL, "precision=bfloat16"],
            "model",
            (
                f"forward of convs.0 (Conv2d): {AT['Net.forward']}: RuntimeError: Input type (float) and bias type (c10::BFloat16) "
                "should be the same; the input and the weights differ in precision: the example was formatted as "
                "the steps say, but a tensor that the model makes itself stays as it is, and so does a module "
                "that keep names"
            ),
        ),
        (
            ["model._target_=sample_nets.TakesTwo", SMALL],
            "model",
            (
                "forward of TakesTwo: TypeError: TakesTwo.forward() missing 1 required positional argument: "
                "'ids'; forward takes other arguments: give them in input.args and input.kwargs"
            ),
        ),
        (
            [NET, "input.shape=[2,1,8,8]"],
            "model",
            (
                f"forward of convs.0 (Conv2d): {AT['Net.forward']}: RuntimeError: Given groups=1, weight of size [4, 3, 3, 3], expected "
                "input[2, 1, 8, 8] to have 3 channels, but got 1 channels instead; the example input may not fit "
                "this model: change input.shape"
            ),
        ),
    ],
)
def test_a_failure_names_the_users_line_and_leaves_its_traceback(go, argv, reason, line):
    ran = go(*argv)
    assert ran.code == 1
    said, where = ran.err.splitlines()
    assert said == line
    assert where == f"the traceback is in {ran.folder.relative_to(Path.cwd())}/traceback.txt"
    assert (ran.result["status"], ran.result["reason"]) == ("failed", reason)
    assert ran.result["traceback"].startswith("Traceback")
    assert (ran.folder / "traceback.txt").read_text() == ran.result["traceback"]


def test_an_interrupted_run_exits_130_and_says_so_in_its_record(go):
    ran = go("model._target_=sample_nets.interrupts")
    assert ran.code == 130
    assert ran.result["status"] == "interrupted"


def test_a_folder_that_cannot_be_made_is_one_line(go, tmp_path):
    (tmp_path / "file").write_text("")
    ran = go(NET, "hydra.run.dir=file/below")
    assert ran.code == 1
    assert len(ran.err.splitlines()) == 1
    assert "file/below" in ran.err


# ---------------------------------------------------------------------------------- the bare words


def test_diff_says_what_differs_between_two_runs(go):
    one = go(NET, SMALL, "memfmt=contiguous").folder
    other = go(NET, SMALL, "memfmt=channels_last").folder
    assert go("diff", str(one), str(one))[:2] == (0, "no difference\n")
    audits = go("diff", str(one / "audit.json"), str(other / "audit.json"))
    assert audits.code == 0
    assert "convs.0.weight: stride [27,9,3,1] -> [27,1,9,3]" in audits.out
    assert audits.out.endswith("1 difference\n")
    runs = go("diff", str(one), str(other))
    assert runs.code == 0
    assert "  convs.0.weight: stride [27,9,3,1] -> [27,1,9,3]" in runs.out
    assert "  memfmt: contiguous -> channels_last" in runs.out


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["diff", "a"], "diff: takes 2 arguments, got 1; diff A B [--all] [--page FILE.html]: two runs' folders, audits or recipes"),
        (["diff", "a", "b", "--page"], "diff: --page names no file; give one: --page FILE.html"),
        (["diff", "broken.json", "b"], "broken.json: this is not an audit: "),
        (["diff", "missing.json", "b"], "missing.json: cannot be read: No such file or directory"),
        (["diff", ".", "."], ".: is not the record of a job; give the folder that a job has written"),
        (["summary"], "summary: takes 1 argument, got 0; summary FOLDER: the folder of a sweep"),
        (["summary", "."], ".: is not the folder of a sweep; give a folder under multirun/"),
        (["steps", "x"], "steps: takes no argument, got 1"),
        (["stps"], "stps: is neither key=value nor a command; did you mean steps? see --help"),
    ],
)  # fmt: skip
def test_a_bare_word_used_wrongly_is_one_line(go, tmp_path, argv, line):
    (tmp_path / "broken.json").write_text("{]")
    ran = go(*argv)
    assert ran.code == 2
    assert ran.err.startswith(line)
    assert len(ran.err.splitlines()) == 1


def test_steps_lists_every_step_with_its_options_and_its_card(go):
    ran = go("steps")
    assert ran.code == 0
    for name in STEPS:
        assert re.search(rf"^{name}  \(", ran.out, re.MULTILINE)
        for option in STEPS[name].from_options({}).to_options():
            assert f"steps.{name}.{option}=" in ran.out
    assert "Helps: half the memory" in ran.out


def test_the_help_names_every_group_every_key_and_every_bare_word(go):
    ran = go("--help")
    assert ran.code == 0
    for word in (
        *GROUPS,
        "task=",
        "mode=",
        "strict=",
        "seed=",
        "plugins=",
        *cli.COMMANDS,
        "unet3d",
        "--multirun",
    ):
        assert word in ran.out
    assert max(map(len, ran.out.splitlines())) <= 110


def test_flags_may_stand_after_the_words(go):
    assert go("model=unet3d", "--cfg", "job", "seed=3").out.count("seed: 3") == 1


def test_the_help_of_one_group_lists_its_options(go):
    ran = go("--help", "memfmt")
    assert ran.code == 0
    assert ran.out.startswith("memfmt: choose one with memfmt=OPTION\n  by_rank ")
    assert "Examples" not in ran.out
    wrong = go("--help", "modle")
    assert wrong.code == 2
    assert "modle: no such group; did you mean 'model'? groups: model, device" in wrong.err


@pytest.mark.parametrize(
    ("called", "command"), [("/usr/bin/prepare", "prepare"), ("run.py", "python run.py")]
)
def test_the_help_names_the_command_as_it_was_called(called, command, go, monkeypatch):
    monkeypatch.setattr(sys, "argv", [called])
    out = go("--help").out
    assert f"\n  {command} model=unet3d memfmt=channels_last_3d\n" in out
    commands = [
        row for row in out.splitlines() if row.lstrip().startswith((f"{command} s", f"{command} d"))
    ]
    # Beside the commands stands what each does, in one column.
    assert len({len(row[: row.rindex("  ")]) for row in commands}) == 1, commands


def test_no_stage_is_shown_for_an_analysis_that_is_off(tmp_path, monkeypatch):
    from contextlib import contextmanager

    from prepare.cli import hydra_app

    shown = []

    @contextmanager
    def stage(what):
        shown.append(what)
        yield lambda _: None

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hydra_app, "stage", stage)
    off = ("verify=none", "bench=none", "flow=none")
    assert cli.run([NET, SMALL, "memfmt=channels_last", *off]) == 0
    assert not [what for what in shown if what.startswith(("verifying", "timing", "following"))]
    assert "auditing" in shown
