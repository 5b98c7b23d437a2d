"""Networks that every step can change, and functions that read their state."""

from typing import Any

import torch
from torch import Tensor, nn

from prepare.core.model.tensors import inner_data, stride_of

# A module that stays the same object may change its class, its mode and these hooks.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


def small_2d() -> nn.Module:
    """Return 2-d convolutions, one of them 1x1, and a norm."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 1),
        nn.ConvTranspose2d(4, 2, 2),
    )


def small_3d() -> nn.Module:
    """Return 3-d convolutions, the first with one channel, and a norm."""
    return nn.Sequential(
        nn.Conv3d(1, 8, 3),
        nn.InstanceNorm3d(8, affine=True),
        nn.Conv3d(8, 4, 1),
        nn.ConvTranspose3d(4, 2, 2),
    )


class Tied(nn.Module):
    """Two convolutions with one weight, a linear layer and an embedding with another."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(4, 4, 3, padding=1)
        self.decoder = nn.Conv2d(4, 4, 3, padding=1)
        self.decoder.weight = self.encoder.weight
        self.embedding = nn.Embedding(4, 6)
        self.head = nn.Linear(6, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def mixed() -> nn.Module:
    """Return a model with 2-d and 3-d convolutions, norms, tied weights, integers and complex tensors."""
    model = nn.ModuleDict({"flat": small_2d(), "deep": small_3d(), "tied": Tied()})
    model.register_parameter("position", nn.Parameter(torch.randn(1, 4, 5, 5)))
    model.register_parameter("phase", nn.Parameter(torch.randn(3, dtype=torch.complex64)))
    model.register_buffer("count", torch.tensor(7))
    model.register_buffer("mask", torch.tensor([True, False]))
    model.register_buffer("scale", torch.rand(3, dtype=torch.float64))
    return model.eval()


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer under every name."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return named | dict(model.named_buffers(remove_duplicate=False))


def facts(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return the state of each tensor, and the class, mode and hooks of each module, of a model.

    Tensors are stored under their name, facts of a module under `name:fact`.
    """
    state: dict[str, tuple[Any, ...]] = {}
    for name, t in tensors(model).items():
        state[name] = (id(t), stride_of(t), t.dtype, t.device, t.requires_grad, bits(t))
        state[name] += (t._backward_hooks is None,)
    for name, module in model.named_modules():
        state[f"{name}:class"] = (id(module), type(module), module.training)
        for table in _HOOKS:
            state[f"{name}:{table}"] = tuple(map(id, getattr(module, table).values()))
    return state


def bits(tensor: Tensor) -> bytes:
    """Return the values of a tensor as bytes, independent of its strides."""
    if tensor.device.type == "meta":
        return b""
    if data := inner_data(tensor):
        return b"".join(map(bits, data))
    if tensor.is_nested:
        return b"".join(map(bits, tensor.unbind()))
    if tensor.is_quantized:
        return bits(tensor.int_repr())
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    plain = dense.cpu().contiguous().resolve_conj().resolve_neg()
    flat = plain.as_strided((plain.numel(),), (1,))  # one element may have any stride
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
