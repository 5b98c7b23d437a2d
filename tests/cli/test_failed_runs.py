"""Runs that fail or are interrupted: exit code, the line of the user's code, the record."""

import inspect
from pathlib import Path

import pytest
import torch

import sample_nets
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
    ("argv", "reason", "parts"),
    [
        (
            ["model._target_=sample_nets.raises"],
            "model",
            [AT["raises"], "ValueError: no such depth"],
        ),
        (["model._target_=sample_nets.exits"], "exit", [AT["exits"], "sys.exit(0)"]),
        (
            ["model._target_=sample_nets.runs_out_of_memory"],
            "oom",
            ["out of memory", AT["runs_out_of_memory"], "2 TiB"],
        ),
        (
            ["model._target_=sample_nets.Views", SMALL, "memfmt=channels_last"],
            "model",
            ["forward of Views", AT["Views.forward"], "use .reshape or .flatten"],
        ),
        (
            ["model._target_=sample_nets.MakesItsOwn", SMALL, "precision=bfloat16"],
            "model",
            ["forward of convs.0 (Conv2d)", AT["Net.forward"], "steps.half.keep=[norms,convs.0]"],
        ),
        (
            ["model._target_=sample_nets.TakesTwo", SMALL],
            "model",
            ["forward of TakesTwo", "input.kwargs={NAME:{shape:[...]}}"],
        ),
        (
            [NET, "input.shape=[2,1,8,8]"],
            "model",
            ["forward of convs.0 (Conv2d)", AT["Net.forward"], "change input.shape"],
        ),
    ],
)
def test_a_failure_names_the_users_line_and_leaves_its_traceback(go, argv, reason, parts):
    ran = go(*argv)
    assert ran.code == 1
    said, where = ran.err.splitlines()
    assert [part for part in parts if part not in said] == []
    assert where == f"the traceback is in {ran.folder.relative_to(Path.cwd())}/traceback.txt"
    assert (ran.result["status"], ran.result["reason"]) == ("failed", reason)
    assert ran.result["traceback"].startswith("Traceback")
    assert (ran.folder / "traceback.txt").read_text() == ran.result["traceback"]


def test_an_interrupted_run_exits_130_and_says_so_in_its_record(go):
    ran = go("model._target_=sample_nets.interrupts")
    assert ran.code == 130
    assert ran.result["status"] == "interrupted"


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
