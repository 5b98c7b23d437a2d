"""Work in one thread leaves the thread counts as they were."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from prepare.core.model.devices import with_threads


@pytest.fixture(autouse=True, params=["of this thread", "of the process"])
def three_threads(request, monkeypatch):
    if request.param == "of the process":
        place = "prepare.core.model.devices._set_threads"
        monkeypatch.setattr(place, lambda: torch.set_num_threads)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def count_of_a_new_thread():
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


def counts():
    return torch.get_num_threads(), count_of_a_new_thread()


def test_one_thread_gives_the_count_back_after_an_error():
    before = counts()
    with pytest.raises(ValueError, match="no"), with_threads(1):
        assert torch.get_num_threads() == 1
        raise ValueError("no")
    assert counts() == before
