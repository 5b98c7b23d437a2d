"""The operators of keep_layout: torch's values, and channels-last for channels-last operands."""

import itertools
import operator as arithmetic
from types import SimpleNamespace

import einops
import pytest
import torch
from torch.nn import functional as F

from prepare.steps.keeping import operators as served
from prepare.steps.keeping.operators import channels_last_of

# What a model calls; methods of tensors are not in it.
CALLED = {
    "cat": torch.cat,
    "pad": F.pad,
    "add": arithmetic.add,
    "rearrange": einops.rearrange,
}
METHODS = ("clone", "contiguous", "repeat", "repeat_interleave", "view", "reshape", "flatten")
# The operators as a replaced call has them: with what is called where they serve nothing.
operators = SimpleNamespace(
    **{name: served.otherwise(getattr(served, name), called) for name, called in CALLED.items()},
    **{name: served.otherwise(getattr(served, name), served.method(name)) for name in METHODS},
)
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
SIZES = {4: (2, 8, 5, 6), 5: (2, 8, 3, 5, 6)}


def tensor(rank, how):
    """Return a tensor in channels-last: dense, a slice, or a slice of one element with odd strides."""
    torch.manual_seed(0)
    x = torch.randn(SIZES[rank]).contiguous(memory_format=FORMATS[rank])
    if how == "slice":
        return x[:, :, 1:]
    if how == "odd":
        return x[:, :, -1].unsqueeze(2)
    return x.contiguous() if how == "contiguous" else x


theirs = SimpleNamespace(**CALLED, **{name: served.method(name) for name in METHODS})
theirs.view = served.method("reshape")  # as where a tensor is no longer contiguous


def calls(x):
    """Return, for each operator, a call of it in either namespace."""
    pad = (1, 1, 1, 1, 2, 0)[: 2 * (x.dim() - 2)]
    flat, ring = torch.ones(x.shape), (1,) * len(pad)
    axes = "b c h w" if x.dim() == 4 else "b c t h w"
    fold = f"{axes[:-1]}(w p) -> b (c p) {axes[4:]}"
    unfold = f"b (c p) {axes[4:]} -> {axes[:-1]}(w p)"
    folded = x.unflatten(-1, (-1, 2)).movedim(-1, 2)
    unfolded = x.unflatten(1, (-1, 2)).movedim(2, -1)
    frames, rest = x.movedim(2, 1), [1] * (x.dim() - 3)
    return {
        "pad": lambda of: of.pad(x, pad),
        "pad circular": lambda of: of.pad(x, ring, mode="circular"),
        "pad replicate": lambda of: of.pad(x, pad, "replicate"),
        "cat": lambda of: of.cat([x, flat], 2),
        "cat one": lambda of: of.cat((x,), -1),
        "cat empty": lambda of: of.cat([x[:, :, :0], x], 2),
        "clone": lambda of: of.clone(x),
        "contiguous": lambda of: of.contiguous(x),
        "repeat": lambda of: of.repeat(x, (1, 1, 2, *rest)),
        "repeat more": lambda of: of.repeat(x, 2, *([1] * x.dim())),
        "repeat_interleave": lambda of: of.repeat_interleave(x, 2, dim=1),
        "repeat_interleave -1": lambda of: of.repeat_interleave(x, 3, -1),
        "repeat_interleave tensor": lambda of: of.repeat_interleave(x, torch.tensor([1, 2]), 0),
        "view": lambda of: of.view(x, x.shape[0], -1),
        "view more": lambda of: of.view(x, 2, 4, 2, *x.shape[2:]),
        "reshape": lambda of: of.reshape(folded, (2, -1, *folded.shape[3:])),
        "reshape to space": lambda of: of.reshape(unfolded, 2, 4, *x.shape[2:-1], -1),
        "reshape frames": lambda of: of.reshape(frames, -1, *frames.shape[2:]),
        "flatten": lambda of: of.flatten(folded, 1, 2),
        "flatten all": lambda of: of.flatten(x),
        "rearrange": lambda of: of.rearrange(x, fold, p=2),
        "rearrange to space": lambda of: of.rearrange(x, unfold, p=2),
        "add": lambda of: of.add(flat, x),
        "add a number": lambda of: of.add(1, x),
    }


def pairs(x):
    """Return, for each operator, the call of torch and ours."""
    return {
        name: (lambda call=call: call(theirs), lambda call=call: call(operators))
        for name, call in calls(x).items()
    }


CASES = list(itertools.product((4, 5), ("dense", "slice", "odd", "contiguous")))


@pytest.mark.parametrize(("rank", "how"), CASES)
def test_operators_have_the_values_of_torch_and_leave_it_contiguous_tensors(rank, how):
    for name, (theirs, ours) in pairs(tensor(rank, how)).items():
        assert torch.equal(ours(), theirs()), name
        if how == "contiguous":
            assert ours().stride() == theirs().stride(), name


@pytest.mark.parametrize(("rank", "how"), [case for case in CASES if case[1] != "contiguous"])
def test_operators_return_the_canonical_strides(rank, how):
    x = tensor(rank, how)
    assert channels_last_of(x) is FORMATS[rank]
    for name, (_, ours) in pairs(x).items():
        found = ours()
        if found.dim() == rank and not name.startswith(
            ("repeat_interleave tensor", "reshape frames")
        ):
            expected = torch.empty(found.shape, memory_format=FORMATS[rank])
            assert found.stride() == expected.stride(), name


def test_operators_have_the_gradients_of_torch():
    for how in ("dense", "slice", "odd"):
        for name in pairs(tensor(5, "dense")):
            grads = []
            for index in (0, 1):
                x = tensor(5, how).double().requires_grad_()
                result = pairs(x)[name][index]()
                if result.requires_grad:
                    weight = torch.arange(result.numel(), dtype=result.dtype).view(result.shape)
                    grads.append(torch.autograd.grad((result * weight).sum(), x)[0])
            if grads:
                torch.testing.assert_close(*grads, msg=f"{name}, {how}")


def test_operators_pass_on_what_is_not_for_them():
    assert operators.cat((torch.ones(2), torch.ones(3))).shape == (5,)
    assert operators.view(torch.ones(2, dtype=torch.int32), torch.float32).dtype == torch.float32
    x = tensor(5, "dense")
    assert operators.rearrange(x, "b c ... -> b ... c").shape == (2, 3, 5, 6, 8)
    assert operators.rearrange([x, x], "n b c t h w -> b (n c) t h w").shape[1] == 16
    assert operators.add("ab", "c") == "abc"
    with pytest.raises(RuntimeError, match="Sizes of tensors"):
        operators.cat([x, x[:, 1:]], 2)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 1, 3, 4, 5),
        torch.randn(2, 3, 1, 1, 1),
        torch.randn(2, 3, 4),
        torch.randn(2, 3, 4, 5, 6),
        torch.randn(2, 3, 1, 1).expand(2, 3, 4, 5),
        torch.eye(3).to_sparse(),
        "text",
    ],
    ids=["one channel", "one element", "rank 3", "contiguous", "expanded", "sparse", "text"],
)
def test_other_layouts_are_not_taken_for_channels_last(x):
    assert channels_last_of(x) is None
