"""A default dtype of one thread gives the same numbers as torch's, which is that of all threads."""

import threading

import pytest
import torch
from torch.nn import functional

from prepare.verify.execution.determinism import Float64Default

INTS = torch.arange(1, 6)
MASK = INTS > 2
HALF = torch.ones(3, dtype=torch.bfloat16)
CALLS = {
    "zeros": lambda: torch.zeros(2, 3),
    "empty and fill": lambda: torch.empty(2).fill_(0.1),
    "zeros of a dtype": lambda: torch.zeros(2, dtype=torch.float32),
    "tensor of floats": lambda: torch.tensor([0.1, 0.2]),
    "tensor of integers": lambda: torch.tensor([1, 2]),
    "tensor of complex": lambda: torch.tensor([0.1 + 1j]),
    "tensor of a dtype": lambda: torch.tensor([0.1], dtype=torch.float32),
    "full of floats": lambda: torch.full((2,), 0.1),
    "full of integers": lambda: torch.full((2,), 3),
    "arange of floats": lambda: torch.arange(0, 1, 0.1),
    "arange of integers": lambda: torch.arange(5),
    "linspace": lambda: torch.linspace(0, 1, 7),
    "hann_window": lambda: torch.hann_window(8),
    "eye": lambda: torch.eye(3) / 3,
    "scalar_tensor": lambda: torch.scalar_tensor(0.1),
    "quotient": lambda: INTS / 3,
    "quotient by integers": lambda: INTS / INTS.flip(0),
    "reciprocal": lambda: 1 / INTS,
    "product with a float": lambda: INTS * 0.1,
    "power": lambda: 10000 ** (INTS / 7),
    "square root": lambda: INTS.sqrt(),
    "sine of positions": lambda: torch.sin(torch.arange(50)[:, None] * 0.37),
    "where": lambda: torch.where(MASK, 0.1, 0.2),
    "mask times a float": lambda: MASK * 0.1,
    "cast by name": lambda: INTS.float(),
    "cast by dtype": lambda: INTS.to(torch.float32),
    "cast like a tensor": lambda: INTS.to(HALF),
    "cast to half": lambda: INTS.half(),
    "like of a half": lambda: torch.zeros_like(HALF),
    "one_hot": lambda: functional.one_hot(INTS),
    "softmax of a dtype": lambda: INTS.softmax(0, dtype=torch.float32),
    "mean of a dtype": lambda: INTS.mean(dtype=torch.float32),
    "sum of a mask": lambda: MASK.sum(),
    "random": lambda: torch.randn(3, generator=torch.Generator().manual_seed(3)),
    "uniform": lambda: torch.rand(3, generator=torch.Generator().manual_seed(3)),
    "embedding": lambda: functional.embedding(INTS, torch.ones(9, 2)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_numbers_are_those_of_torchs_own_default_dtype(call):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        expected = call()
    finally:
        torch.set_default_dtype(before)
    with Float64Default():
        found = call()
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_another_thread_keeps_its_default_dtype():
    found = []
    with Float64Default():
        thread = threading.Thread(target=lambda: found.append(torch.ones(1).dtype))
        thread.start()
        thread.join()
    assert found == [torch.float32] == [torch.ones(1).dtype]
