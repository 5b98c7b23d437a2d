"""Large fresh memory is given huge pages where the system has them."""

from pathlib import Path

import pytest
import torch
from torch import nn

from prepare.core.model import huge_pages as module
from prepare.core.model.huge_pages import drop_pages, huge_pages, is_mapped_file
from prepare.pipeline import Pipeline

SMAPS = Path("/proc/self/smaps")
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_huge_pages = pytest.mark.skipif(
    not (SMAPS.is_file() and HUGE.is_file() and "[never]" not in HUGE.read_text()),
    reason="this system has no huge pages to ask for",
)


def advised(tensor: torch.Tensor) -> bool:
    """Return whether the middle of the tensor's memory is marked `hg`: huge pages were asked for."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    inside = False
    for line in SMAPS.read_text().splitlines():
        first = line.split()[0]
        if "-" in first and ":" not in first:
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= middle < end
        elif inside and first == "VmFlags:":
            return "hg" in line.split()
    return False


@pytest.fixture
def pays(monkeypatch):
    monkeypatch.setattr(module, "_pays", lambda: True)


@pytest.mark.parametrize("setting", ["madvise", "always", "never"])
@pytest.mark.parametrize("faster", [True, False])
def test_huge_pages_are_requested_only_where_they_are_faster(
    setting, faster, monkeypatch, tmp_path
):
    (tmp_path / "enabled").write_text(f"[{setting}]")
    monkeypatch.setattr(module, "_SETTING", tmp_path / "enabled")
    monkeypatch.setattr(module, "_ADVICE", 14)
    monkeypatch.setattr(module, "_seconds_to_write", lambda advice: bool(advice) != faster)
    assert module._pays.__wrapped__() == (faster and setting == "madvise")


@needs_huge_pages
def test_the_first_write_to_both_kinds_of_pages_is_timed():
    assert module._seconds_to_write(None) > 0
    assert module._seconds_to_write(module._ADVICE) > 0


@needs_huge_pages
@pytest.mark.usefixtures("pays")
def test_a_large_tensor_is_given_huge_pages():
    assert not advised(torch.empty(16 << 20))
    assert advised(huge_pages(torch.empty(16 << 20)))


@needs_huge_pages
@pytest.mark.usefixtures("pays")
def test_a_large_convolution_is_written_into_huge_pages():
    model = nn.Conv2d(1024, 512, 3, bias=False)
    Pipeline.from_config({"half": {"dtype": "bfloat16"}, "conv2d_memory_format": {}}).apply(model)
    assert advised(model.weight)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_small_tensors_and_those_without_memory_are_left_alone(device):
    tensor = torch.empty(3, device=device)
    assert huge_pages(tensor) is tensor
    huge_pages(torch.empty(1 << 30, device="meta"))


@pytest.mark.skipif(not SMAPS.is_file(), reason="Linux tells what is mapped")
def test_only_a_tensor_of_a_file_is_mapped_from_one(tmp_path):
    path = tmp_path / "values"
    path.write_bytes(bytes(range(256)) * 64)
    storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=1 << 14)
    tensor = torch.asarray(storage, dtype=torch.uint8)
    assert is_mapped_file(tensor)
    assert not is_mapped_file(tensor.clone())
    before = tensor.clone()
    drop_pages(tensor)
    assert torch.equal(tensor, before)
