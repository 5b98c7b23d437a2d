"""A dispatch mode that records each operation of a forward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from prepare.stages.flow.fake_tensors import correct_strides
from prepare.stages.flow.layout_states import LayoutStates, Operand, Operation
from prepare.stages.flow.layouts import describe_layout, dimension_order, layout_of
from prepare.stages.flow.torch_operators import (
    PARAMETERS,
    backend_of,
    cudnn_format,
    hidden_copies,
    is_convolution,
    takes_values,
)

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from prepare.stages.flow.call_sites import ModuleStack
    from prepare.stages.flow.records import FlowBuilder


# Operators of these namespaces take every layout.
_ANY_LAYOUT = ("aten", "prims", "torchvision", "c10d", "_c10d_functional")
KERNEL_NOTE = "it may need a contiguous tensor"


class OperatorWatcher(TorchDispatchMode):
    """While entered, follows all operations and adds what it records to a FlowBuilder.

    While `in_compiled`, it records nothing; while `in_repaired`, only copies and convolutions. With
    `as_cuda`, fake tensors on the CPU stand for those of a CUDA that is not here; `fake` is the mode below.
    `internal_error` is an error of the watcher, which must not be reported as one of the model.
    """

    supports_higher_order_operators = True

    def __init__(self, stack: ModuleStack, states: LayoutStates, builder: FlowBuilder) -> None:
        super().__init__()
        self.stack, self.states, self.builder = stack, states, builder
        self.in_compiled = False
        self.in_repaired = False
        self.as_cuda = False
        self.fake: FakeTensorMode | None = None
        self.internal_error: Exception | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func.namespace == "prim":
            return func(*args, **kwargs)
        if _is_composite(func):  # inference_mode does not decompose these operators
            with self:
                return func.decompose(*args, **kwargs)
        if self.fake:
            # torch keeps results of shape functions for the process, but not what convolutions depend on:
            # the number of threads, and the backends that are enabled.
            self.fake.cache_enabled = not is_convolution(func._schema.name.partition("::")[2])
        output = func(*args, **kwargs)
        output = correct_strides(func._schema.name, args, output, as_cuda=self.as_cuda)
        # Not what a backward inside of forward computes, as that of a force field.
        if not self.in_compiled and torch._C._current_autograd_node() is None:
            try:
                self._record(func, args, kwargs, output)
            except Exception as error:
                self.internal_error = error
                raise
        return output

    def _record(self, func: OpOverload, args: Any, kwargs: Any, output: Any) -> None:
        name = func._schema.name.partition("::")[2]
        arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        site = self.stack.call_site()
        site.operation = f"aten.{name}"
        backend, memory_format = self._backend(arguments) if is_convolution(name) else ("", None)
        if backend:
            tensors = arguments["input"], arguments["weight"], output
            self.builder.add_convolution(site, map(layout_of, tensors), backend)
        operation = Operation(name, site, backend, _is_view(func))
        for operand, tensor, layout in hidden_copies(name, arguments, memory_format):
            why = f"{operand} is {describe_layout(tensor)}, and the kernel works on {layout}"
            self.builder.add_copy(site, tensor, why)
        if name in ("clone", "_to_copy"):
            self._record_reordering(operation, arguments["self"], output)
        if self.in_repaired:  # the module is followed as one operation
            return
        operands = [
            Operand(label, tensor, self.states.of(tensor))
            for label, tensor in _tensor_arguments(arguments)
            if label not in PARAMETERS and takes_values(name, label)
        ]
        if func.namespace not in _ANY_LAYOUT or name == "as_strided":
            self._note_kernel(func, operands)
        self.states.follow(operation, operands, _tensor_outputs(output))

    def _backend(self, arguments: dict[str, Any]) -> tuple[str, torch.memory_format | None]:
        if self.as_cuda and arguments["input"].dim() in (4, 5):
            return "Cudnn", cudnn_format(arguments["input"], arguments["weight"])
        return backend_of(arguments)

    def _note_kernel(self, func: OpOverload, operands: list[Operand]) -> None:
        for operand in operands:
            if self.states.is_in_layout(operand.tensor):
                layout = layout_of(operand.tensor)
                text = f"{func.name()} is given {operand.label} in {layout}: {KERNEL_NOTE}"
                self.builder.add_note(text)

    def _record_reordering(self, operation: Operation, source: Tensor, output: Tensor) -> None:
        """Count a copy that only changed the order of the elements."""
        if is_followed(source) and is_followed(output) and _is_reordered(source, output):
            why = f"{describe_layout(source)} to {describe_layout(output)}"
            cause = operation.cause
            why = why if cause == "clone" else f"{cause}: {why}"
            self.builder.add_copy(operation.site, output, why)


def is_followed(value: Any) -> bool:
    """Return True if a value is a strided tensor of floating-point or complex numbers."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not value.is_nested
        and (value.is_floating_point() or value.is_complex())
    )


@lru_cache(maxsize=4096)
def _is_composite(func: OpOverload) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


@lru_cache(maxsize=4096)
def _is_view(func: OpOverload) -> bool:
    infos = [returned.alias_info for returned in func._schema.returns]
    shares = any(info is not None and not info.is_write for info in infos)
    # These two operators return views, although their schemas do not declare it.
    return shares or func._schema.name in ("aten::_unsafe_view", "aten::_reshape_alias")


def _tensor_arguments(arguments: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in arguments.items():
        if is_followed(value):
            yield name, value
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                if is_followed(item):
                    yield f"{name}[{index}]", item


def _tensor_outputs(output: Any) -> list[Tensor]:
    values = output if isinstance(output, list | tuple) else [output]
    return [value for value in values if is_followed(value)]


def _is_reordered(source: Tensor, output: Tensor) -> bool:
    if (source.dtype, source.device) != (output.dtype, output.device) or source.dim() < 3:
        return False
    before, after = dimension_order(source), dimension_order(output)
    # An expanded tensor must be copied in any order.
    return len(before) == len(after) and before != after
