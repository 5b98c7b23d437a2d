"""One variant of a bench: runs forward, or forward and backward, and times it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from prepare.bench.input_pool import copy_batch
from prepare.bench.loss_scaler import LossScaler
from prepare.bench.model_state import modules_in
from prepare.bench.peak_memory import measure_peak, page_faults
from prepare.core.forward.autocast import autocast, device_of
from prepare.core.forward.explain_error import explained
from prepare.core.forward.nested import arguments, tensors_in
from prepare.core.model.devices import wait_for
from prepare.core.utils.process_state import paused_collector
from prepare.core.utils.text import first_line
from prepare.errors import PrepareError, RefusedError

Clock = Callable[[], float]
Call = Callable[..., Any]


class Variant:
    """A model or function, with the formatter of its inputs."""

    def __init__(
        self,
        name: str,
        call: Call,
        *,
        formatter: Callable[[Any], Any] | None,
        train: bool,
        amp: str = "none",
    ) -> None:
        self.name, self.modules = name, modules_in(call)
        self._call, self._formatter, self._train, self._amp = call, formatter, train, amp
        self._scaler: LossScaler | None = None
        self._device: torch.device | None = None
        self._parameters = [p for module in self.modules for p in module.parameters()]
        buffers = (b for module in self.modules for b in module.buffers())
        self._devices = {tensor.device for tensor in (*self._parameters, *buffers)}
        self._gradients: list[Tensor] = []
        self.page_faults = 0.0
        """Page faults per call, in the last timing."""

    def device(self, batch: Any) -> torch.device:
        """Return the device of its first parameter or buffer, or else of its first formatted input."""
        args, kwargs = self._arguments(batch)
        self._device = device_of(self.modules, tensors_in([*args, *kwargs.values()]))
        return self._device

    def timed(
        self, batch: Any, *, calls: int, warm: bool, device: torch.device, clock: Clock
    ) -> float:
        """Return the mean seconds of `calls` calls in a row; with `warm`, after one untimed call.

        Copying and formatting the input is not timed, nor is clearing the gradients afterwards.
        """
        args, kwargs = self._arguments(batch)
        try:
            if warm:
                self._step(args, kwargs)
            with paused_collector():
                before = page_faults()
                seconds = _timed(
                    lambda: self._step(args, kwargs), calls, self._devices | {device}, clock
                )
                self.page_faults = (page_faults() - before) / calls
                return seconds
        finally:
            self.clear()

    def timer(self, device: torch.device) -> str:
        """Return the name of what times its calls."""
        return "CUDA events" if _has_events(self._devices | {device}) else "wall clock"

    def peak(self, batch: Any, device: torch.device) -> tuple[int | None, str]:
        """Return the peak memory of one call in bytes, without model and input, and its measure."""
        args, kwargs = self._arguments(batch)
        try:
            return measure_peak(lambda: self._step(args, kwargs), self._devices | {device})
        finally:
            self.clear()

    def clear(self) -> None:
        """Remove the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def explain(self, error: Exception) -> str:
        """Describe an error on one line: the module that raised it, and a likely cause."""
        if isinstance(error, PrepareError):
            return str(error.problems[0])
        if isinstance(self._call, nn.Module):
            return str(explained(self._call, error))
        return _describe(error)

    def _arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        batch = copy_batch(batch)
        if self._formatter is None:
            return arguments(batch)
        try:
            return arguments(self._formatter(batch))
        except Exception as error:
            raise RefusedError("its format", f"raised {_describe(error)}") from error

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch.inference_mode(mode=False), torch.set_grad_enabled(self._train):
            if not self._train:
                with self._autocast(args, kwargs):
                    self._call(*args, **kwargs)
                return
            self.clear()
            with self._autocast(args, kwargs):
                output = self._call(*args, **kwargs)
            roots = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if not roots:
                message = "does not require gradients"
                raise RefusedError("its output", message, "there is nothing to train")
            if self._amp == "float16":
                self._scaler = self._scaler or LossScaler(self._parameters, roots[0].device)
                self._scaler.backward(roots, self._gradients_of(roots))
            else:
                torch.autograd.backward(roots, self._gradients_of(roots))

    def _autocast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager:
        if self._device is None:
            self._device = device_of(self.modules, tensors_in([*args, *kwargs.values()]))
        return autocast(self._amp, self._device)

    def _gradients_of(self, roots: list[Tensor]) -> list[Tensor]:
        # Random, as a loss gives them: from a constant gradient, a norm makes zeros and denormal
        # numbers, which are slower on a CPU. Made once, so that making them is not timed.
        made_for = [(each.shape, each.dtype, each.device) for each in self._gradients]
        if made_for != [(root.shape, root.dtype, root.device) for root in roots]:
            self._gradients = [torch.randn_like(root) for root in roots]
        return self._gradients


def _has_events(devices: Collection[torch.device]) -> bool:
    """Return whether CUDA events time the work: those of one GPU do not see the end of another's work."""
    return [device.type for device in devices if device.type != "cpu"] == ["cuda"]


def _timed(
    work: Callable[[], object], calls: int, devices: Collection[torch.device], clock: Clock
) -> float:
    if _has_events(devices):
        return _timed_by_events(work, calls, next(d for d in devices if d.type == "cuda"))
    wait_for(devices)
    start = clock()
    for _ in range(calls):
        work()
    wait_for(devices)
    return (clock() - start) / calls


def _timed_by_events(work: Callable[[], object], calls: int, device: torch.device) -> float:
    """Time with the device's own clock: the host runs ahead of it."""
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1000 / calls


def _describe(error: Exception) -> str:
    message = first_line(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
