"""The doctor finds faults that are planted into kernels, and none where nothing is planted."""

import pytest

from planted_faults import SLOW, WRONG
from prepare.stages.doctor.examination import run_probe


@pytest.mark.parametrize("fault", WRONG, ids=str)
def test_a_wrong_kernel_is_found(fault, monkeypatch):
    fault.plant(monkeypatch)
    assert run_probe(fault.probe, "cpu").bad == "wrong here"


@pytest.mark.slow
@pytest.mark.parametrize("fault", SLOW, ids=str)
def test_a_slow_kernel_is_found(fault, monkeypatch):
    fault.plant(monkeypatch)
    assert run_probe(fault.probe, "cpu").bad == "slow here"


@pytest.mark.parametrize("name", sorted({fault.probe for fault in WRONG}))
def test_nothing_is_found_where_nothing_is_planted(name):
    assert run_probe(name, "cpu").bad == ""
