"""Runs that fail or are interrupted: exit code, the line of the user's code, the record."""

import inspect
from pathlib import Path

import pytest
import torch

import sample_nets
from prepare.app.cli import main as cli
from prepare.app.job.execute import failure
from words import NET, SMALL


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


@pytest.mark.parametrize(
    ("argv", "reason", "line"),
    [
        (
            ["model._target_=sample_nets.raises"],
            "model",
            f"model: building sample_nets.raises: {AT['raises']}: ValueError: no such depth and more",
        ),
        (
            ["model._target_=sample_nets.exits"],
            "exit",
            f"{AT['exits']}: the run called sys.exit(0)",
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
                "the steps say, but a tensor that the model makes itself stays as it is, and so does the weight of "
                "a kept module that is not called itself"
            ),
        ),
        (
            ["model._target_=sample_nets.TakesTwo", SMALL],
            "model",
            (
                "forward of TakesTwo: TypeError: TakesTwo.forward() missing 1 required positional argument: "
                "'ids'; forward takes other arguments: give them as input.args=[{shape:[...]},...] and input.kwargs={NAME:{shape:[...]}}, one dict as input.args=[{NAME:{shape:[...]}}]"
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


def test_no_stage_is_shown_for_an_analysis_that_is_off(tmp_path, monkeypatch):
    from contextlib import contextmanager

    from prepare.app.cli import hydra_app

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
@pytest.mark.parametrize(
    ("words", "device"),
    [
        (["device=cuda"], "cuda"),
        (["device=cuda", "task=tune"], "cuda"),
        (["steps.device.device=cuda:7"], "cuda:7"),
        (["steps.device.device=xpu", "+steps.keep_layout={}"], "xpu"),
    ],
    ids=" ".join,
)
def test_a_device_that_is_not_there_is_named_with_those_that_are(words, device, go):
    ran = go(NET, SMALL, *words)
    assert ran.code == 2
    assert ran.err.startswith(f"steps.device.device: {device} is not available here; available: ")
    assert len(ran.err.splitlines()) == 1
    assert ran.result["reason"] == "refused"
    assert not (ran.folder / "traceback.txt").exists()


def test_a_plan_may_be_for_another_machine(go):
    ran = go(NET, SMALL, "steps.device.device=cuda:7", "task=plan")
    assert (ran.code, ran.err) == (0, "")
    assert "cpu -> cuda:7" in ran.page


def test_the_size_that_no_memory_holds_is_said_in_words():
    said = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 40265318400000 bytes"
    found = failure(RuntimeError(said)).result
    assert (found.reason, found.error.endswith("to allocate 36.6 TiB")) == ("oom", True)
