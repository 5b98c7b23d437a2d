"""Sees every operation of a forward and a backward: where it was called, what it copied, what it gave."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from prepare.flow.call_sites import ModuleStack, Place
from prepare.flow.fake_tensors import corrected
from prepare.flow.layout_states import Operand, States, Step
from prepare.flow.layouts import in_words, order_of
from prepare.flow.torch_operators import (
    PARAMETERS,
    backend_of,
    hidden_copies,
    is_convolution,
    takes_values,
)

if TYPE_CHECKING:
    from prepare.flow.aggregate import Tally


class Watcher(TorchDispatchMode):
    """Follows all operations while it is entered, and tells a Tally.

    While `hidden` it sees nothing, and while `inside` copies and convolutions alone. `fault` is a
    mistake of its own, which is none of the model's.
    """

    supports_higher_order_operators = True

    def __init__(self, stack: ModuleStack, states: States, tally: Tally) -> None:
        super().__init__()
        self.stack, self.states, self.tally = stack, states, tally
        self.hidden = False
        self.inside = False
        self.fault: Exception | None = None
        self._origins: dict[int, Place] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func.namespace == "prim":
            return func(*args, **kwargs)
        if _is_composite(func):  # inference_mode does not take these apart
            with self:
                return func.decompose(*args, **kwargs)
        output = corrected(func._schema.name, args, func(*args, **kwargs))
        if not self.hidden:
            try:
                self._see(func, args, kwargs, output)
            except Exception as error:
                self.fault = error
                raise
        return output

    def passed(self, place: Place, given: list[Tensor], gave: list[Tensor]) -> None:
        """Treats a module that is taken as a whole as one operation."""
        operands = [Operand(f"input {i}", t, self.states.of(t)) for i, t in enumerate(given)]
        self.states.follow(Step("compile", place), operands, list(enumerate(gave)))

    def _see(self, func: OpOverload, args: Any, kwargs: Any, output: Any) -> None:
        name = func._schema.name.partition("::")[2]
        arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        node = torch._C._current_autograd_node()
        # Backward runs without grad mode, but for a checkpointed segment that is computed again.
        again = node is not None and torch.is_grad_enabled()
        phase = "forward" if node is None else "again" if again else "backward"
        place = self._place(node)
        place.operation = f"aten.{name}"
        if phase != "backward":
            place.inside = self.inside
            self._origins.setdefault(torch.autograd._get_sequence_nr() - 1, place)
        backend, memory_format = backend_of(arguments) if is_convolution(name) else ("", None)
        if backend and phase == "forward":
            tensors = arguments["input"], arguments["weight"], output
            self.tally.convolution(place, tensors, backend)
        step = Step(name, place, phase, backend, _is_view(func))
        for operand, tensor, word in hidden_copies(name, arguments, memory_format):
            why = f"{operand} is {_words(tensor)}, and the kernel works on {word}"
            self._copied(step, tensor, why)
        if name in ("clone", "_to_copy"):
            self._reordered(step, arguments["self"], output)
        if place.inside:
            return
        operands = [
            Operand(label, tensor, self.states.of(tensor))
            for label, tensor in _labelled(arguments)
            if label not in PARAMETERS and takes_values(name, label)
        ]
        self.states.follow(step, operands, list(_outputs(output)))

    def _place(self, node: Any) -> Place:
        """Where this operation, or in backward the one that it is the gradient of, was called."""
        if node is None or (self.stack and torch.is_grad_enabled()):
            return self.stack.place()
        found = self._origins.get(node._sequence_nr())
        return found.copy() if found else Place("", self.stack.root)

    def _reordered(self, step: Step, given: Tensor, output: Tensor) -> None:
        """Counts a copy that only changed the order in which the elements lie."""
        if is_followed(given) and is_followed(output) and _is_reordered(given, output):
            why = f"{_words(given)} to {_words(output)}"
            self._copied(step, output, why if step.cause == "clone" else f"{step.cause}: {why}")

    def _copied(self, step: Step, tensor: Tensor, why: str) -> None:
        phase = "forward" if step.phase == "forward" else "backward"
        self.tally.copied(phase, step.place, tensor, why)


def is_followed(value: Any) -> bool:
    """Whether this is a tensor of floating-point numbers with strides."""
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
    # These do not declare what they are.
    return shares or func._schema.name in ("aten::_unsafe_view", "aten::_reshape_alias")


def _labelled(arguments: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in arguments.items():
        if is_followed(value):
            yield name, value
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                if is_followed(item):
                    yield f"{name}[{index}]", item


def _outputs(output: Any) -> Iterator[tuple[int, Tensor]]:
    for index, value in enumerate(output if isinstance(output, list | tuple) else [output]):
        if is_followed(value):
            yield index, value


def _is_reordered(given: Tensor, output: Tensor) -> bool:
    if (given.dtype, given.device) != (output.dtype, output.device) or given.dim() < 3:
        return False
    before, after = (order_of(tuple(t.shape), t.stride()) for t in (given, output))
    # An expanded tensor has to be written out whatever its order.
    return len(before) == len(after) and before != after


def _words(tensor: Tensor) -> str:
    return in_words(tuple(tensor.shape), tensor.stride())
