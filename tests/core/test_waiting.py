"""Processes of the command line limit how long threads spin, unless the user has chosen."""

import os
import subprocess
import sys

import pytest
from torch import nn

from prepare.core.utils import machine
from prepare.core.utils.environment import environment
from prepare.core.utils.machine import limit_spinning
from prepare.pipeline import Pipeline


def seen_by_openmp(code: str, **variables: str) -> str:
    """Return the spin count that OpenMP shows when torch is loaded in a new process after `code`."""
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env | {"OMP_DISPLAY_ENV": "VERBOSE"} | variables,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = (line.strip() for line in done.stderr.splitlines())
    return next((line for line in lines if line.startswith("GOMP_SPINCOUNT")), "")


SET = "from prepare.core.utils.machine import limit_spinning; limit_spinning(); "


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings another OpenMP")
def test_openmp_reads_the_limit_when_torch_is_loaded():
    assert seen_by_openmp(SET + "import torch") == "GOMP_SPINCOUNT = '1000'"


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_a_choice_of_the_user_is_kept_and_recorded(name, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    for each in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "PASSIVE")
    limit_spinning()
    monkeypatch.undo()
    monkeypatch.setenv(name, "7")
    assert f"{name}=7" in environment()["waiting"]


def test_nothing_is_set_once_torch_is_loaded(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    limit_spinning()
    assert environment()["waiting"] == ""


@pytest.fixture
def crowded(monkeypatch, tmp_path):
    """Let the machine have 999 threads that want to run, and this process GNU OpenMP without a limit."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, text in (("_LOADAVG", "9 9 9 999/1200 1"), ("_MAPS", "/lib/libgomp.so.1")):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(machine, name, tmp_path / name)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    return tmp_path


def warned(**how):
    pipeline = Pipeline.from_config({"conv2d_memory_format": {}})
    return [str(warning) for warning in pipeline.plan(nn.Conv2d(8, 8, 3), **how).warnings]


def test_a_plan_warns_of_spinning_threads_on_a_crowded_machine(crowded):
    (warning,) = warned()
    assert "999 threads want to run on" in warning
    assert warning.endswith("set GOMP_SPINCOUNT=1000 in the environment of Python")
    assert not warned(known_issues="ignore")


@pytest.mark.parametrize(
    "reason", ["limited", "not crowded", "other OpenMP", "one thread", "unknown"]
)
def test_no_plan_warns_of_threads_that_do_not_spin(reason, crowded, monkeypatch):
    if reason == "limited":
        monkeypatch.setenv("GOMP_SPINCOUNT", "100")
    elif reason == "one thread":
        monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    elif reason == "unknown":
        (crowded / "_LOADAVG").unlink()
    else:
        name, text = ("_MAPS", "") if reason == "other OpenMP" else ("_LOADAVG", "0 0 0 1/9 1")
        (crowded / name).write_text(text)
    assert not warned()
