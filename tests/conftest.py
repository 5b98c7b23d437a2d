"""What every test shares: one thread, so that parallel test processes do not fight over cores."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)
