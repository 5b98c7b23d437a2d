"""Processes of the command line limit how long threads spin, unless the user has chosen."""

import os
import subprocess
import sys

import pytest

from prepare.core.utils.environment import environment
from prepare.core.utils.waiting import limit_spinning


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


SET = "from prepare.core.utils.waiting import limit_spinning; limit_spinning(); "


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
