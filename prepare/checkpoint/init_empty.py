"""Build a model with its parameters on the meta device, where they take no memory."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from prepare.core.model.tensors import is_strided, is_wrapper, named_tensors, unregistered_tensors
from prepare.pipeline.tensor_table import preserved_stride

_T = TypeVar("_T", bound=Tensor)


def build_empty(build: Callable[[], nn.Module]) -> nn.Module:
    """Call `build`, and return its model with parameters on meta; buffers and attributes have values.

    If the model's code needs the values of parameters, or keeps a tensor computed from them that a file
    does not contain, return a model whose parameters have values.
    """
    try:
        with empty_parameters():
            model = build()
    except Exception:  # an error of the model's own code is raised again here
        return build()
    if isinstance(model, nn.Module):
        saved = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        if {*names_on_meta(model)} - saved:
            return build()
    return model


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Within the block, move each parameter that this thread registers in a module to the meta device.

    Unlike under `torch.device("meta")`, tensors have values until they become parameters: buffers keep
    theirs, and so do the tensors that a model computes while it is built. The memory of a parameter
    is only used once it is written, which happens later.
    """
    thread = threading.get_ident()
    # A parameter of two modules becomes one; the weak references let the original be freed.
    made: dict[int, tuple[weakref.ref, nn.Parameter]] = {}

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != thread or parameter.is_meta or is_wrapper(parameter):
            return None
        original, empty = made.get(id(parameter), (None, None))
        if empty is None or original is None or original() is not parameter:
            empty = on_meta(parameter)
            made[id(parameter)] = weakref.ref(parameter), empty
        return empty

    hook = register_module_parameter_registration_hook(
        to_meta  # type: ignore[arg-type]  # what the hook returns takes the place of the parameter
    )
    try:
        yield
    finally:
        hook.remove()


def empty_buffers(model: nn.Module) -> None:
    """Move the buffers that a file of weights contains to meta as well, in place."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = moved.setdefault(id(buffer), on_meta(buffer))


def on_meta(tensor: _T) -> _T:
    """Return the same parameter or buffer without values: its class, attributes and strides.

    One that is sparse, nested, quantized or of mkldnn stays as it is.
    """
    if not is_strided(tensor) or tensor.is_quantized:
        return tensor
    # Not empty_like: for a tensor on meta it is implemented in Python, and imports sympy first.
    stride = preserved_stride(tensor.detach())
    return like(
        tensor, torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="meta")
    )


def like(tensor: _T, data: Tensor) -> _T:
    """Return `data` as a parameter of the class of `tensor`, with its attributes; a buffer is plain."""
    if not isinstance(tensor, nn.Parameter):
        return cast("_T", data)
    new = torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
    vars(new).update(vars(tensor))
    return new


def names_on_meta(model: nn.Module) -> list[str]:
    """Return the tensors without values: parameters, buffers and plain attributes."""
    places = [p for p in named_tensors(model) if p.tensor.is_meta]
    held = {id(place.tensor) for place in places}
    others = [name for name, t in unregistered_tensors(model) if t.is_meta and id(t) not in held]
    return [*(place.path for place in places), *others]
