"""The doctor finds faults that are planted into kernels, and none where nothing is planted."""

import warnings

import pytest

from planted_faults import SLOW, WRONG
from prepare.stages.doctor.examination import run_probe
from prepare.stages.doctor.probes import GENERAL

_QUICK = [WRONG[1], WRONG[2], WRONG[8], WRONG[11], WRONG[12], SLOW[9]]


@pytest.mark.parametrize("fault", _QUICK, ids=str)
def test_a_planted_fault_of_each_kind_is_found(fault, monkeypatch):
    fault.plant(monkeypatch)
    assert run_probe(fault.probe, "cpu").bad == ("slow here" if fault in SLOW else "wrong here")


@pytest.mark.slow
@pytest.mark.parametrize("fault", WRONG, ids=str)
def test_each_of_20_wrong_kernels_is_found(fault, monkeypatch):
    fault.plant(monkeypatch)
    assert run_probe(fault.probe, "cpu").bad == "wrong here"


@pytest.mark.slow
@pytest.mark.parametrize("fault", SLOW, ids=str)
def test_each_of_10_slow_kernels_is_found(fault, monkeypatch):
    fault.plant(monkeypatch)
    assert run_probe(fault.probe, "cpu").bad == "slow here"


@pytest.mark.parametrize("name", ["conv2d_kernel_1", "silu"])
def test_nothing_is_found_where_nothing_is_planted(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_probe(name, "cpu").bad in ("", "unclear")


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERAL)
def test_50_runs_without_a_fault_find_nothing(name):
    for _ in range(50):
        assert run_probe(name, "cpu").bad in ("", "unclear")
