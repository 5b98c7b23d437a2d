"""The operators of keep_layout: torch's values, and channels-last for channels-last operands."""

import itertools
import operator as arithmetic
from types import SimpleNamespace

import einops
import pytest
import torch
from torch.nn import functional as F

from prepare.steps.keeping import operators as served
from prepare.steps.keeping.operators import channels_last_of, nearly_channels_last

# What a model calls; methods of tensors are not in it.
CALLED = {
    **{name: getattr(torch, name) for name in ("cat", "stack", "where", "zeros_like", "ones_like")},
    **{name: getattr(F, name) for name in ("pad", "interpolate", "avg_pool3d")},
    **{name: getattr(arithmetic, name) for name in ("add", "mul")},
    "rearrange": einops.rearrange,
}
METHODS = (
    *("softmax", "clone", "contiguous", "repeat", "repeat_interleave", "view", "reshape"),
    *("flatten", "sum"),
)
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


def pairs(x):
    """Return, for each operator, the call of torch and ours."""
    pad = (1, 1, 1, 1, 2, 0)[: 2 * (x.dim() - 2)]
    ones, shape = torch.ones_like(x), (x.shape[0], -1)
    flat = torch.ones(x.shape)
    axes = "b c h w" if x.dim() == 4 else "b c t h w"
    fold = f"{axes[:-1]}(w p) -> b (c p) {axes[4:]}"
    unfold = f"b (c p) {axes[4:]} -> {axes[:-1]}(w p)"
    folded = x.unflatten(-1, (-1, 2)).movedim(-1, 2)
    unfolded = x.unflatten(1, (-1, 2)).movedim(2, -1)
    frames = x.movedim(2, 1)
    return {
        "pad": (lambda: F.pad(x, pad), lambda: operators.pad(x, pad)),
        "pad circular": (
            lambda: F.pad(x, (1,) * len(pad), mode="circular"),
            lambda: operators.pad(x, (1,) * len(pad), mode="circular"),
        ),
        "pad replicate": (
            lambda: F.pad(x, pad, "replicate"),
            lambda: operators.pad(x, pad, "replicate"),
        ),
        "cat": (lambda: torch.cat([x, flat], 2), lambda: operators.cat([x, flat], 2)),
        "cat one": (lambda: torch.cat((x,), -1), lambda: operators.cat((x,), -1)),
        "stack": (lambda: torch.stack((x, ones), 3), lambda: operators.stack((x, ones), 3)),
        "stack -1": (lambda: torch.stack([x, ones], -1), lambda: operators.stack([x, ones], -1)),
        "stack 0": (lambda: torch.stack([x, ones]), lambda: operators.stack([x, ones])),
        "stack 1": (lambda: torch.stack([x, ones], 1), lambda: operators.stack([x, ones], 1)),
        "interpolate": (
            lambda: F.interpolate(x, scale_factor=2, mode="nearest"),
            lambda: operators.interpolate(x, scale_factor=2, mode="nearest"),
        ),
        "where": (lambda: torch.where(x > 0, flat, x), lambda: operators.where(x > 0, flat, x)),
        "softmax": (lambda: F.softmax(x, 1), lambda: operators.softmax(x, 1)),
        "softmax -1": (lambda: x.softmax(dim=-1), lambda: operators.softmax(x, dim=-1)),
        "softmax 0": (lambda: torch.softmax(x, 0), lambda: operators.softmax(x, 0)),
        "clone": (lambda: x.clone(), lambda: operators.clone(x)),
        "contiguous": (lambda: x.contiguous(), lambda: operators.contiguous(x)),
        "repeat": (
            lambda: x.repeat(1, 1, 2, *([1] * (x.dim() - 3))),
            lambda: operators.repeat(x, (1, 1, 2, *([1] * (x.dim() - 3)))),
        ),
        "repeat more": (
            lambda: x.repeat(2, *([1] * x.dim())),
            lambda: operators.repeat(x, 2, *([1] * x.dim())),
        ),
        "repeat_interleave": (
            lambda: x.repeat_interleave(2, dim=1),
            lambda: operators.repeat_interleave(x, 2, dim=1),
        ),
        "repeat_interleave -1": (
            lambda: x.repeat_interleave(3, -1),
            lambda: operators.repeat_interleave(x, 3, -1),
        ),
        "repeat_interleave tensor": (
            lambda: x.repeat_interleave(torch.tensor([1, 2]), 0),
            lambda: operators.repeat_interleave(x, torch.tensor([1, 2]), 0),
        ),
        "cat empty": (
            lambda: torch.cat([x[:, :, :0], x], 2),
            lambda: operators.cat([x[:, :, :0], x], 2),
        ),
        "view": (lambda: x.reshape(shape), lambda: operators.view(x, *shape)),
        "view more": (
            lambda: x.unflatten(1, (4, 2)),
            lambda: operators.view(x, 2, 4, 2, *x.shape[2:]),
        ),
        "reshape": (
            lambda: folded.reshape(2, -1, *folded.shape[3:]),
            lambda: operators.reshape(folded, (2, -1, *folded.shape[3:])),
        ),
        "reshape to space": (
            lambda: unfolded.reshape(2, 4, *x.shape[2:-1], -1),
            lambda: operators.reshape(unfolded, 2, 4, *x.shape[2:-1], -1),
        ),
        "reshape frames": (
            lambda: frames.reshape(-1, *frames.shape[2:]),
            lambda: operators.reshape(frames, -1, *frames.shape[2:]),
        ),
        "flatten": (lambda: folded.flatten(1, 2), lambda: operators.flatten(folded, 1, 2)),
        "flatten all": (lambda: x.flatten(), lambda: operators.flatten(x)),
        "rearrange": (
            lambda: einops.rearrange(x, fold, p=2),
            lambda: operators.rearrange(x, fold, p=2),
        ),
        "rearrange to space": (
            lambda: einops.rearrange(x, unfold, p=2),
            lambda: operators.rearrange(x, unfold, p=2),
        ),
        "sum": (lambda: x.sum(-1, keepdim=True), lambda: operators.sum(x, -1, keepdim=True)),
        "sum 2": (lambda: torch.sum(x, 2, True), lambda: operators.sum(x, 2, True)),
        "sum of channels": (lambda: x.sum(dim=1), lambda: operators.sum(x, dim=1)),
        "sum of some": (lambda: x.sum((0, 2)), lambda: operators.sum(x, (0, 2))),
        "zeros_like": (lambda: torch.zeros_like(x), lambda: operators.zeros_like(x)),
        "ones_like": (lambda: torch.ones_like(x), lambda: operators.ones_like(x)),
        "add": (lambda: flat + x, lambda: operators.add(flat, x)),
        "mul": (lambda: flat * x, lambda: operators.mul(flat, x)),
        "add a number": (lambda: 1 + x, lambda: operators.add(1, x)),
    }


CASES = list(itertools.product((4, 5), ("dense", "slice", "odd", "contiguous")))
# Their results have another rank.
OTHERS = (
    "repeat_interleave tensor",
    "sum of channels",
    "sum of some",
    "view",
    "view more",
    "flatten all",
    "reshape frames",
    "repeat more",
    "stack",
    "stack -1",
    "stack 0",
    "stack 1",
)


@pytest.mark.parametrize(("rank", "how"), CASES)
def test_operators_have_the_values_of_torch(rank, how):
    for name, (theirs, ours) in pairs(tensor(rank, how)).items():
        if name.startswith("softmax"):
            torch.testing.assert_close(ours(), theirs(), msg=name)
        else:
            assert torch.equal(ours(), theirs()), name


@pytest.mark.parametrize(("rank", "how"), [case for case in CASES if case[1] != "contiguous"])
def test_operators_return_the_canonical_strides(rank, how):
    x = tensor(rank, how)
    assert channels_last_of(x) is FORMATS[rank]
    for name, (_, ours) in pairs(x).items():
        if name not in OTHERS:
            expected = torch.empty(ours().shape, memory_format=FORMATS[rank])
            assert ours().stride() == expected.stride(), name


@pytest.mark.parametrize("rank", [4, 5])
def test_operators_leave_contiguous_tensors_to_torch(rank):
    for name, (theirs, ours) in pairs(tensor(rank, "contiguous")).items():
        assert ours().stride() == theirs().stride(), name


@pytest.mark.parametrize("rank", [4, 5])
def test_stacked_frames_merge_without_a_copy(rank):
    x = tensor(rank, "dense")
    stacked = operators.stack([x, x], 3)
    merged = stacked.reshape(*x.shape[:2], -1, *x.shape[3:])
    assert merged.data_ptr() == stacked.data_ptr()
    assert channels_last_of(merged) is FORMATS[rank]


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


@pytest.mark.parametrize("how", ["dense", "slice", "odd", "contiguous"])
def test_pooled_volumes_keep_the_layout(how):
    x = tensor(5, how)
    theirs, ours = F.avg_pool3d(x, (1, 2, 2)), operators.avg_pool3d(x, (1, 2, 2))
    assert torch.equal(ours, theirs)
    assert (channels_last_of(ours) is None) == (how == "contiguous")


@pytest.mark.parametrize("rank", [4, 5])
def test_parts_of_the_channels_are_summed_into_channels_last(rank):
    parts = tensor(rank, "dense").unflatten(1, (2, 4))  # as split attention has them
    for dim in (1, 1 - parts.dim()):
        found = operators.sum(parts, dim)
        torch.testing.assert_close(found, parts.sum(dim))
        assert channels_last_of(found) is FORMATS[rank]
    contiguous = parts.contiguous()
    assert operators.sum(contiguous, 1).is_contiguous()


def test_heads_are_merged_into_channels_last():
    heads = torch.randn(2, 3, 20, 8).transpose(
        -1, -2
    )  # what attention returns: heads, numbers, places
    found = operators.reshape(heads, 2, -1, 4, 5)
    assert torch.equal(found, heads.reshape(2, -1, 4, 5))
    assert channels_last_of(found) is torch.channels_last
    assert operators.reshape(heads.contiguous(), 2, -1, 4, 5).is_contiguous()


def test_a_permuted_tensor_is_padded_into_channels_last():
    x = torch.randn(2, 5, 6, 8, 3).permute(0, 3, 4, 1, 2)
    for pad in ((0, 1, 0, 1), (1, 1, 0, 0, 2, 0)):
        assert torch.equal(operators.pad(x, pad), F.pad(x, pad))
        assert channels_last_of(operators.pad(x, pad)) is torch.channels_last_3d


def test_operators_pass_on_what_is_not_for_them():
    assert operators.cat((torch.ones(2), torch.ones(3))).shape == (5,)
    assert operators.view(torch.ones(2, dtype=torch.int32), torch.float32).dtype == torch.float32
    x = tensor(5, "dense")
    assert operators.rearrange(x, "b c ... -> b ... c").shape == (2, 3, 5, 6, 8)
    assert operators.rearrange([x, x], "n b c t h w -> b (n c) t h w").shape[1] == 16
    assert operators.zeros_like(x, memory_format=torch.contiguous_format).is_contiguous()
    assert operators.mul("ab", 2) == "abab"
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


@pytest.mark.parametrize("name", ["zeros_like", "ones_like"])
def test_a_like_tensor_has_its_shape_and_layout_under_vmap(name):
    x = torch.randn(2, 2, 4, 5, 3).movedim(-1, 2)
    made = torch.vmap(getattr(operators, name))(x)
    assert torch.equal(made, getattr(torch, name)(x))
    assert channels_last_of(made[0]) is torch.channels_last


def test_one_channel_is_not_nearly_channels_last():
    assert nearly_channels_last(torch.ones(2, 1, 4, 4)) is None
    assert nearly_channels_last(torch.ones(2, 1, 4, 3).movedim(-1, 1)) is torch.channels_last
