"""Work in one thread leaves the thread counts as they were."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from prepare.core.model.devices import with_threads


def counts():
    with ThreadPoolExecutor(1) as pool:
        return torch.get_num_threads(), pool.submit(torch.get_num_threads).result()


def test_one_thread_gives_the_count_back_after_an_error():
    at_first = torch.get_num_threads()
    torch.set_num_threads(3)
    with pytest.raises(ValueError, match="no"), with_threads(1):
        assert torch.get_num_threads() == 1
        raise ValueError("no")
    after = counts()
    torch.set_num_threads(at_first)
    assert after == (3, 3)
