"""Facts of tensors, and networks that the tests of checkpoints share."""

from pathlib import Path

import torch
from checkpoint_nets import small
from torch import nn

from prepare.pipeline import Pipeline

FORMATS = ("w.safetensors", "w.pt")
NOTHING = Pipeline([])


def tensor_facts(model: nn.Module) -> dict:
    """Return the strides, dtype, requires_grad and values of every parameter and buffer."""
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers()),
    }
    return {name: (t.stride(), t.dtype, t.requires_grad, t.detach()) for name, t in tensors.items()}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    first, second = tensor_facts(one), tensor_facts(other)
    assert first.keys() == second.keys()
    for name, (*form, values) in first.items():
        *expected_form, expected = second[name]
        assert form == expected_form, name
        assert torch.equal(values, expected), name


def small_like(model: nn.Module) -> nn.Module:
    like = small()
    like.load_state_dict(model.state_dict())
    return like


def small_bytes(path: Path) -> bytes:
    """Return the bytes of one of its tensors, as they are in the file."""
    from prepare.checkpoint.open_weights import open_weights
    from prepare.checkpoint.stored_tensor import raw

    stored = open_weights(path).stored["0.weight"]
    return bytes(raw(next(stored.pieces())[1]))
