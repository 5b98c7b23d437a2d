"""Find the first module where a prepared model goes wrong, in forward or in backward.

The exact, the baseline and the prepared model run once more, and a trace of each keeps the inputs, outputs
and gradients of every module. Comparing the traces in the order of execution finds the module in one run;
a bisection would need one run for each of its steps.
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

_Key = tuple[str, bool, int]


@dataclass
class ModuleEvent:
    """The start or end of one call of a module: its inputs or outputs, and later their gradients.

    `caller` is the name of the module that calls this one.
    """

    module: str
    caller: str
    is_start: bool
    tensors: dict[str, Tensor | None] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


class ModuleTrace:
    """While entered, records the inputs, outputs and gradients of all modules; uses torch's global hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.events: dict[_Key, ModuleEvent] = {}
        self._running: list[tuple[nn.Module, str]] = []
        self._counts: dict[tuple[str, bool], int] = {}
        # Keyed by tensor and version, so that a tensor that is later changed in place keeps its values.
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._handles: list[Any] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._on_start),
            torch_module.register_module_forward_hook(self._on_end, always_call=True),
        ]
        return self

    def __exit__(self, *raised: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._copies.clear()

    def _on_start(self, module: nn.Module, args: Any) -> None:
        if self._is_in_forward():
            caller = self._running[-1][1] if self._running else ""
            name = self.names.get(id(module), caller)
            self._record(name, caller, args, is_start=True)
            self._running.append((module, name))

    def _on_end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_in_forward() and any(running is module for running, _ in self._running):
            name = ""
            while self._running:
                last, name = self._running.pop()
                if last is module:
                    break
            caller = self._running[-1][1] if self._running else ""
            self._record(name, caller, output, is_start=False)
        return None  # noqa: PLR1711, RET501

    def _is_in_forward(self) -> bool:
        # In backward a checkpointed segment runs again; it was recorded in forward.
        on_thread = threading.get_ident() == self._thread
        return on_thread and torch._C._current_autograd_node() is None

    def _record(self, name: str, caller: str, value: Any, *, is_start: bool) -> None:
        count = self._counts[name, is_start] = self._counts.get((name, is_start), 0) + 1
        event = self.events[name, is_start, count] = ModuleEvent(name, caller, is_start)
        for index, tensor in enumerate(tensors_in(value)):
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            event.tensors[str(index)] = self._copy(tensor)
            event.gradients[str(index)] = None
            if tensor.requires_grad:
                tensor.register_hook(_KeepGradient(event, str(index)))

    def _copy(self, tensor: Tensor) -> Tensor:
        key = (id(tensor), tensor._version)
        if key not in self._copies:
            self._copies[key] = (tensor, tensor.detach().clone())
        return self._copies[key][1]


class _KeepGradient:
    def __init__(self, event: ModuleEvent, name: str) -> None:
        self.event, self.name = event, name

    def __call__(self, gradient: Tensor) -> None:
        self.event.gradients[self.name] = gradient.detach().clone()


@dataclass(frozen=True)
class FaultLocator:
    """The traces of the exact, the baseline and the prepared model, and what their tolerance depends on."""

    exact: ModuleTrace
    baseline: ModuleTrace
    prepared: ModuleTrace
    dtype: torch.dtype
    depth: int

    def first_wrong_output(self) -> str | None:
        """Return the dotted name of the first module whose output is wrong, or None.

        If the inputs of a module are wrong first, the code around it is at fault: return its caller.
        """
        for key, event in self.prepared.events.items():
            if self._is_wrong(event, key, gradients=False):
                return event.caller if event.is_start else event.module
        return None

    def first_wrong_gradient(self, owners: set[str]) -> str | None:
        """Return the first module whose backward is wrong; `owners` have parameters with wrong gradients.

        A wrong gradient of a module's output comes from the code around it, or from the next module.
        """
        for key, event in reversed(self.prepared.events.items()):
            if self._is_wrong(event, key, gradients=True):
                return event.module if event.is_start else event.caller
            if event.is_start and event.module in owners:
                return event.module
        return None

    def input_shape(self, name: str) -> torch.Size | None:
        """Return the shape of the first tensor of a module's first call; None without one."""
        event = self.prepared.events.get((name, True, 1))
        tensors = [] if event is None else [t for t in event.tensors.values() if t is not None]
        return tensors[0].shape if tensors else None

    def _is_wrong(self, event: ModuleEvent, key: _Key, *, gradients: bool) -> bool:
        part = "gradients" if gradients else "tensors"
        exact, baseline = self.exact.events.get(key), self.baseline.events.get(key)
        if exact is None:
            return False
        differences = compare(
            getattr(exact, part),
            [getattr(baseline, part)] if baseline else [],
            getattr(event, part),
            dtype=self.dtype,
            depth=self.depth,
            gradients=gradients,
        )
        return any(difference.exceeds for difference in differences)
