"""Hash a model: its values, independent of memory format, or its structure."""

import hashlib

import torch
from torch import nn

from prepare.core.model.tensors import is_strided, named_modules, named_tensors


def fingerprint(model: nn.Module) -> str:
    """Return the sha256 (hexadecimal) of every parameter's and buffer's name, shape, dtype and values.

    Values are read in the order of the dimensions. A hash of the bytes in storage would differ for
    the same values in another layout.

    >>> flat, last = nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3)
    >>> _ = last.load_state_dict(flat.state_dict())
    >>> fingerprint(flat) == fingerprint(last.to(memory_format=torch.channels_last))
    True
    """
    digest = hashlib.sha256()
    for place in sorted(named_tensors(model), key=lambda place: place.path):
        tensor = place.tensor.detach()
        if tensor.is_nested:
            tensor = torch.cat([part.reshape(-1) for part in tensor.unbind()])
        dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        plain = dense.cpu().contiguous().resolve_conj().resolve_neg()
        flat = plain.as_strided((plain.numel(),), (1,))  # one element may have any stride
        values = flat.view(torch.uint8).numpy()
        head = f"{place.path!r} {tuple(tensor.shape)} {tensor.dtype}\n"
        digest.update(head.encode("utf-8", "surrogatepass"))
        digest.update(values.data)
    return digest.hexdigest()


def structure(model: nn.Module) -> str:
    """Return the sha256 (hexadecimal) of the structure of a model, independent of its values.

    It covers every module's name, class and `extra_repr` (sizes, strides, groups), and every
    tensor's name, shape, strides, dtype and device type.

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
        shape = "nested" if tensor.is_nested else tuple(tensor.shape)
        lines.append(f"{place.path!r} {shape} {strides} {kind}")
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()
