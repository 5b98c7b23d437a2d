"""A weight that says float32 and holds int8, as those of torchao do; no other package is needed."""

import torch
from torch import nn
from torch.utils._pytree import tree_map

_COPIES = (torch.ops.aten.detach.default, torch.ops.aten.clone.default)


class Int8Weight(torch.Tensor):
    """A matrix in int8 with one scale for each row."""

    @staticmethod
    def __new__(cls, rounded, scales):
        return torch.Tensor._make_wrapper_subclass(cls, rounded.shape, dtype=scales.dtype)

    def __init__(self, rounded, scales):
        self.rounded, self.scales = rounded, scales

    def __tensor_flatten__(self):
        return ["rounded", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _context, _size, _stride):
        return cls(inner["rounded"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, function, _types, args=(), kwargs=None):
        if function in _COPIES:
            return cls(function(args[0].rounded), function(args[0].scales))
        plain = tree_map(lambda x: x.rounded * x.scales if isinstance(x, cls) else x, args)
        return function(*plain, **(kwargs or {}))


def in_8_bits(model: nn.Module) -> nn.Module:
    """Round the weights of all Linear modules, in place."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            scales = weight.abs().amax(1, keepdim=True) / 127
            rounded = Int8Weight((weight / scales).round().to(torch.int8), scales)
            module.weight = nn.Parameter(rounded, requires_grad=False)
    return model
