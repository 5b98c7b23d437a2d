"""Test that a guard finds the faults of a verification, planted into a running model."""

import pytest

from guard_faults import (
    NOT_OF_A_CALL,
    PLANTED,
    SERVED,
    TRAINED,
    calls_until_caught_in_serving,
    steps_until_caught_in_training,
)
from verify_faults import FAULTS

EVERY = 40


@pytest.mark.parametrize("name", SERVED[::12])
def test_a_fault_of_one_shape_is_found_at_its_first_call(name):
    assert calls_until_caught_in_serving(name) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_every_fault_of_one_shape_is_found_at_its_first_call(name):
    assert calls_until_caught_in_serving(name) == 1


@pytest.mark.parametrize("name", TRAINED[::36])
def test_a_fault_of_one_shape_is_found_within_n_steps(name):
    assert steps_until_caught_in_training(name, EVERY) <= EVERY


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_every_fault_of_one_shape_is_found_within_n_steps(name):
    assert steps_until_caught_in_training(name, EVERY) <= EVERY


def test_the_faults_are_those_of_a_verification():
    left_out = {*NOT_OF_A_CALL, "another bn.num_batches_tracked"}
    assert set(FAULTS) == set(PLANTED) | left_out
    assert len({*SERVED, *TRAINED}) >= 60
