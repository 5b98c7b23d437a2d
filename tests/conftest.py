"""What every test shares: one thread, so that parallel test processes do not fight over cores."""

import pytest
import torch

from prepare.registry import STEPS, register

torch.set_num_threads(1)
# A package with tests of its own, which test_testing.py runs where it is installed.
collect_ignore = ["example_plugin"]


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture
def plugin():
    """`register`, for steps of one test only."""
    before = {name: STEPS[name] for name in STEPS}
    yield register
    STEPS._classes.clear()
    STEPS._classes.update(before)
