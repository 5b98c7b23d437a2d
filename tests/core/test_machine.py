"""What disturbs timings is measured and described in a line; idle threads of the command line spin briefly."""

import sys

import pytest

from prepare.core.utils import machine
from prepare.core.utils.machine import MachineWatch, disturbance, environment


@pytest.mark.parametrize(
    ("conditions", "said"),
    [
        ({"others": 1.6, "threads": 2}, "this machine is busy (other programs use 1.6 of 2 cores)"),
        ({"others": 1.0, "threads": 1}, ""),
        ({"others": 0.3, "threads": 2}, ""),
        ({"cores_available": None, "threads": 2}, ""),  # of an older record
    ],
)  # fmt: skip
def test_a_disturbance_is_described_with_its_figure(conditions, said):
    assert disturbance({"cores_available": 2} | conditions) == said


def test_what_the_system_does_not_tell_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_STAT", tmp_path / "missing")
    found = MachineWatch().conditions()
    assert found["others"] is None


# ------------------------------------------------------------------------------ threads that spin

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.fixture
def no_choice(monkeypatch):
    """Leave out what the user has chosen for the threads of OpenMP."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_choice")
@pytest.mark.parametrize("name", VARIABLES)
def test_a_choice_of_the_user_is_kept_and_recorded(name, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv(name, "7")
    machine.limit_spinning()
    assert machine.how_threads_wait() == f"{name}=7"
    monkeypatch.undo()
    assert environment()["waiting"] == machine.how_threads_wait()
