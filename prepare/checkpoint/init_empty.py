"""Builds a model without memory for its parameters: they are on the meta device, and all else is as ever."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from prepare.core.model.tensors import is_wrapper, named_tensors, unregistered_tensors
from prepare.pipeline.tensor_table import preserved_stride


def build_empty(build: Callable[[], nn.Module]) -> nn.Module:
    """What `build` gives, with its parameters on meta; buffers and plain attributes hold their values.

    Where its code needs the values of parameters, or keeps something made of them, that a file does
    not hold, it is built as ever, with parameters that hold values.
    """
    try:
        with empty_parameters():
            model = build()
    except Exception:  # the model's own code; if it is at fault, it raises again
        return build()
    return build() if isinstance(model, nn.Module) and without_values(model) else model


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Within the block, a parameter that a module of this thread takes in goes to the meta device.

    Unlike under `torch.device("meta")`, tensors are made as ever until they are a module's
    parameters: buffers keep their values, and so does what a model computes on the way. torch
    gives fresh memory to a parameter only when it is first written, which is after that.
    """
    thread = threading.get_ident()
    # A parameter that stands in two modules becomes one; by a weak reference, to let go of the rest.
    made: dict[int, tuple[weakref.ref, nn.Parameter]] = {}

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != thread or parameter.is_meta:
            return None
        if is_lazy(parameter) or is_wrapper(parameter) or parameter.layout is not torch.strided:
            return None
        known, empty = made.get(id(parameter), (None, None))
        if known is None or known() is not parameter:
            empty = on_meta(parameter)
            made[id(parameter)] = weakref.ref(parameter), empty
        return empty

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        hook.remove()


def empty_buffers(model: nn.Module) -> None:
    """Puts the buffers that a file of weights holds on meta too, in place."""
    ours: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = ours.setdefault(id(buffer), on_meta(buffer))


def on_meta(tensor: Tensor) -> Tensor:
    """The same parameter or buffer without values: its class, attributes and strides."""
    # Not empty_like, which for a tensor on meta is written in Python, and first imports sympy.
    stride = preserved_stride(tensor.detach())
    return like(
        tensor, torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="meta")
    )


def like(tensor: Tensor, data: Tensor) -> Tensor:
    """`data` as a parameter of the class, and with the attributes, of `tensor`; a buffer is plain."""
    if not isinstance(tensor, nn.Parameter):
        return data
    new = torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
    vars(new).update(vars(tensor))
    return new


def without_values(model: nn.Module) -> list[str]:
    """The tensors on meta that no file of weights holds: unsaved buffers, and plain attributes."""
    saved = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    saved |= set(model.state_dict(keep_vars=True))
    places = [p for p in named_tensors(model) if p.tensor.is_meta]
    held = {id(place.tensor) for place in places}
    names = [place.path for place in places if place.path not in saved]
    loose = (found for found in unregistered_tensors(model) if id(found[1]) not in held)
    return names + [name for name, tensor in loose if tensor.is_meta]
