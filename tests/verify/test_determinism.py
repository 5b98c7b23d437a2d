"""Both models draw the same random numbers, dropout is off, and float64 is the default of one thread."""

import random
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from prepare.stages.verify import verify
from prepare.stages.verify.execution.determinism import DeterministicMode, Float64Default
from verify_checks import FIXED, FLAT, PIPELINES, Draws, check, prepared


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("draw", FIXED)
def test_both_models_draw_the_same_random_numbers(draw, mode):
    result = check(Draws(FIXED[draw]), FLAT, torch.randn(2, 3, 8, 8), mode=mode)
    assert (result.status, result.reference) == ("pass", "float64"), result.reason


@pytest.mark.parametrize("precision", PIPELINES)
def test_random_numbers_are_the_same_in_every_precision(precision):
    model = Draws(lambda x: x * torch.rand_like(x))
    result = check(model, PIPELINES[precision], torch.randn(2, 3, 8, 8), mode="train")
    assert result.status == "pass", result.reason


class Checkpointed(Draws):
    """Draws again in backward, in a checkpointed segment; in a segment of a segment if `nested`."""

    def __init__(self, draw, *, reentrant, nested=False):
        super().__init__(draw)
        self.options, self.nested = {"use_reentrant": reentrant}, nested

    def forward(self, x):
        def inner(x):
            return self.draw(self.first(x))

        def outer(x):
            return self.draw(checkpoint(inner, x, **self.options)) * self.draw(x).mean()

        return self.last(checkpoint(outer if self.nested else inner, x, **self.options))


@pytest.mark.parametrize("precision", PIPELINES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "draw", [lambda x: x * torch.rand_like(x), functional.dropout], ids=["numbers", "dropout"]
)
def test_a_recomputed_checkpoint_draws_the_same_numbers(draw, reentrant, nested, precision):
    model = Checkpointed(draw, reentrant=reentrant, nested=nested)
    result = check(model, PIPELINES[precision], torch.randn(2, 3, 8, 8), mode="train")
    assert result.status == "pass", result.reason


class Reversed(torch.autograd.Function):
    """Runs its forward again in backward, and calls `backward(y, dy)`, as reversible networks do."""

    @staticmethod
    def forward(ctx, x, weight, keeps):
        ctx.save_for_backward(x, weight)
        ctx.keeps = keeps
        return functional.conv2d(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            y = functional.conv2d(x, weight)
        torch.autograd.backward(y, gradient, retain_graph=ctx.keeps)
        return x.grad, weight.grad, None


@pytest.mark.parametrize("keeps", [False, True])
def test_a_backward_inside_a_backward_works(keeps):
    class Reversible(nn.Conv2d):
        def forward(self, x):
            return Reversed.apply(x, self.weight, keeps)

    result = check(Reversible(3, 4, 3, bias=False), FLAT, torch.randn(2, 3, 8, 8), mode="train")
    assert result.status == "pass", result.reason


def test_numbers_repeat_if_torchs_generator_is_reset():
    with DeterministicMode():
        state = torch.get_rng_state()
        once, other = torch.rand(8), torch.rand(8)
        torch.set_rng_state(state)
        assert torch.equal(torch.rand(8), once)
        assert not torch.equal(once, other)


def test_a_fault_is_found_despite_random_numbers():
    model, batch = Draws(FIXED["randn_like"]), torch.randn(2, 3, 8, 8)
    pipeline, changed = prepared(model, FLAT)
    with torch.no_grad():
        changed.last.weight[0, 0, 0, 0] += 0.1
    assert verify(model, changed, batch, pipeline=pipeline).status == "fail"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_fixed_numbers_keep_their_distribution_in_dtype_and_format(dtype, memory_format):
    like = torch.zeros((4, 16, 32, 32), dtype=dtype).to(memory_format=memory_format)
    with DeterministicMode():
        uniform, normal = torch.rand_like(like), torch.randn_like(like)
        ones = torch.empty_like(like).bernoulli_(0.25)
        spread = torch.empty_like(like).uniform_(2.0, 4.0)
    with DeterministicMode():
        flat = torch.rand(like.shape, dtype=torch.float64)
    assert uniform.is_contiguous(memory_format=memory_format)
    assert torch.equal(uniform, flat.clamp(max=1 - torch.finfo(dtype).eps / 2).to(dtype))
    assert uniform.max() < 1
    assert (uniform.double().mean(), spread.double().mean()) == (
        pytest.approx(0.5, abs=0.01),
        pytest.approx(3.0, abs=0.02),
    )
    assert (normal.double().mean(), normal.double().std(), ones.double().mean()) == (
        pytest.approx(0.0, abs=0.02),
        pytest.approx(1.0, abs=0.02),
        pytest.approx(0.25, abs=0.01),
    )


OWN = torch.Generator()
NOT_FIXED = {
    "a generator of its own": lambda x: x + torch.randn(x.shape, generator=OWN, dtype=x.dtype),
    "Python's numbers": lambda x: x * random.random(),
    "multinomial": lambda x: x * (1 + torch.multinomial(torch.ones(1000), 1)),
}


@pytest.mark.parametrize("draw", NOT_FIXED)
def test_random_numbers_that_cannot_be_fixed_are_cannot_tell(draw):
    result = check(Draws(NOT_FIXED[draw]), FLAT, torch.randn(2, 3, 8, 8))
    assert result.status == "cannot tell"
    assert "random numbers that cannot be fixed" in result.reason


def test_dropout_is_off_in_modules_functions_and_attention():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.drop = nn.Conv2d(3, 4, 3), nn.Dropout2d(0.5)
            self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

        def forward(self, x):
            x = nn.functional.dropout(self.drop(self.conv(x)), 0.5, self.training)
            x = x.flatten(2).transpose(1, 2)
            return self.attention(x, x, x)[0]

    assert check(Drops(), FLAT, torch.randn(2, 3, 8, 8), mode="train").status == "pass"


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
