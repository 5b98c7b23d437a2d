"""Hashes of a model: of what it holds, the same in every memory format; and of how it is built."""

import hashlib

import torch
from torch import nn

from prepare.core.model.tensors import is_strided, named_modules, named_tensors


def fingerprint(model: nn.Module) -> str:
    """The sha256 (hexadecimal) of every parameter's and buffer's name, shape, dtype and values.

    Hashing the bytes as they lie in storage would give another answer for the same values in
    another layout; here they are read in the order of the dimensions.

    >>> flat, last = nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3)
    >>> _ = last.load_state_dict(flat.state_dict())
    >>> fingerprint(flat) == fingerprint(last.to(memory_format=torch.channels_last))
    True
    """
    found = hashlib.sha256()
    for place in sorted(named_tensors(model), key=lambda place: place.path):
        tensor = place.tensor.detach()
        dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        values = dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        head = f"{place.path!r} {tuple(tensor.shape)} {tensor.dtype}\n"
        found.update(head.encode("utf-8", "surrogatepass"))
        found.update(values.data)
    return found.hexdigest()


def structure(model: nn.Module) -> str:
    """The sha256 (hexadecimal) of how a model is built, whatever the numbers in it.

    Every module's name, class and what its repr says of it (sizes, strides, groups), and every
    tensor's name, shape, strides, dtype and kind of device.

    >>> structure(nn.Conv2d(2, 2, 3)) == structure(nn.Conv2d(2, 2, 3))
    True
    >>> structure(nn.Conv2d(2, 2, 3)) == structure(nn.Conv2d(2, 2, 3, padding=1))
    False
    """
    lines = [
        f"{name!r} {type(module).__module__}.{type(module).__qualname__} {module.extra_repr()}"
        for name, module in named_modules(model)
    ]
    for place in sorted(named_tensors(model), key=lambda place: place.path):
        tensor = place.tensor
        strides = tensor.stride() if is_strided(tensor) else tensor.layout
        kind = f"{tensor.dtype} {tensor.device.type} {tensor.requires_grad}"
        lines.append(f"{place.path!r} {tuple(tensor.shape)} {strides} {kind}")
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()
