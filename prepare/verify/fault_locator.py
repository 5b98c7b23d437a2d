"""Finds the first module where a prepared model goes wrong, in forward or in backward.

Three models run once more, the exact, the plain and the prepared one, and keep what goes into and
comes out of every module, and the gradients there. One look along these in the order of execution
finds the place, without a search by halves, which would take a run for each step.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from prepare.core.forward.nested import tensors_in
from prepare.verify.tolerance import compare


@dataclass
class Event:
    """A module begins or ends for the n-th time: the tensors there, and their gradients later."""

    module: str
    above: str
    begins: bool
    tensors: dict[str, Tensor | None] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


class Trace:
    """While it is entered, keeps what passes every module of one model; by torch's global hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.events: dict[tuple[str, bool, int], Event] = {}
        self._running: list[tuple[nn.Module, str]] = []
        self._counts: dict[tuple[str, bool], int] = {}
        # By the tensor and its version, so that what an operation in place changes is kept as it was.
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._handles: list[Any] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._begin),
            torch_module.register_module_forward_hook(self._end, always_call=True),
        ]
        return self

    def __exit__(self, *raised: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._kept.clear()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if self._is_here():
            above = self._running[-1][1] if self._running else ""
            name = self.names.get(id(module), above)
            self._note(name, above, args, begins=True)
            self._running.append((module, name))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_here() and any(one is module for one, _ in self._running):
            name = ""
            while self._running:
                last, name = self._running.pop()
                if last is module:
                    break
            above = self._running[-1][1] if self._running else ""
            self._note(name, above, output, begins=False)
        return None  # noqa: PLR1711, RET501

    def _is_here(self) -> bool:
        # In backward a checkpointed segment runs again, and says nothing new.
        on_thread = threading.get_ident() == self._thread
        return on_thread and torch._C._current_autograd_node() is None

    def _note(self, name: str, above: str, value: Any, *, begins: bool) -> None:
        count = self._counts[name, begins] = self._counts.get((name, begins), 0) + 1
        event = self.events[name, begins, count] = Event(name, above, begins)
        for index, tensor in enumerate(tensors_in(value)):
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            event.tensors[str(index)] = self._copy(tensor)
            event.gradients[str(index)] = None
            if tensor.requires_grad:
                tensor.register_hook(_Arrival(event, str(index)))

    def _copy(self, tensor: Tensor) -> Tensor:
        key = (id(tensor), tensor._version)
        if key not in self._kept:
            self._kept[key] = (tensor, tensor.detach().clone())
        return self._kept[key][1]


class _Arrival:
    def __init__(self, event: Event, name: str) -> None:
        self.event, self.name = event, name

    def __call__(self, gradient: Tensor) -> None:
        self.event.gradients[self.name] = gradient.detach().clone()


def first_wrong_output(exact: Trace, plain: Trace, ours: Trace, **how: Any) -> str | None:
    """The module, by its dotted name, whose output is the first that is wrong; None if none is.

    Where the first wrong thing is what goes into a module, the code around it is at fault: the
    module above.
    """
    for key, event in ours.events.items():
        if key in exact.events and _wrong(event, "tensors", (exact, plain), key, how):
            return event.above if event.begins else event.module
    return None


def first_wrong_gradient(
    exact: Trace, plain: Trace, ours: Trace, owners: set[str], **how: Any
) -> str | None:
    """The module whose backward is the first to go wrong; `owners` have a parameter with a wrong gradient.

    A wrong gradient of what came out of a module was made by the code around it, or by the next one.
    """
    for key, event in reversed(ours.events.items()):
        if key in exact.events and _wrong(event, "gradients", (exact, plain), key, how):
            return event.module if event.begins else event.above
        if event.begins and event.module in owners:
            return event.module
    return None


def _wrong(event: Event, part: str, others: tuple[Trace, Trace], key: Any, how: Any) -> bool:
    exact, plain = (trace.events.get(key) for trace in others)
    found = compare(
        getattr(exact, part),
        [getattr(plain, part)] if plain else [],
        getattr(event, part),
        scaled="gradient" if part == "gradients" else "",
        **how,
    )
    return any(difference.exceeds for difference in found)
