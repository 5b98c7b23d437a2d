"""One variant of a bench: called, stepped through forward and backward, and timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from prepare.bench.input_pool import fresh
from prepare.bench.model_state import modules_in
from prepare.bench.peak_memory import fresh_pages, peak_of
from prepare.core.forward.explain_error import explained
from prepare.core.forward.nested import arguments, tensors_in
from prepare.core.utils.gc_pause import paused_collector
from prepare.errors import PrepareError, RefusedError

Clock = Callable[[], float]
Call = Callable[..., Any]


class Variant:
    """A model or function, with its own way to format the input."""

    def __init__(
        self, name: str, call: Call, *, formatter: Callable[[Any], Any] | None, train: bool
    ) -> None:
        self.name, self.modules = name, modules_in(call)
        self._call, self._format, self._train = call, formatter, train
        self._parameters = [p for module in self.modules for p in module.parameters()]
        self._gradients: list[Tensor] = []
        self.pages = 0.0
        """Fresh pages in a call, when it was last timed."""

    def device(self, batch: Any) -> torch.device:
        """Where it runs: as its first tensor lies, or else as the first one of its formatted input."""
        held = (t for m in self.modules for t in (*m.parameters(), *m.buffers()))
        found = next(held, None)
        if found is None:
            args, kwargs = self._ready(batch)
            found = next(tensors_in([*args, *kwargs.values()]), None)
        return torch.device("cpu") if found is None else found.device

    def timed(
        self, batch: Any, *, calls: int, settle: bool, device: torch.device, clock: Clock
    ) -> float:
        """Seconds of one call, on the mean of `calls` in a row; with `settle`, after one untimed.

        Copying and formatting the input is not timed, nor is giving the gradients up.
        """
        args, kwargs = self._ready(batch)
        try:
            if settle:
                self._step(args, kwargs)
            with paused_collector():
                before = fresh_pages()
                seconds = _timed(lambda: self._step(args, kwargs), calls, device, clock)
                self.pages = (fresh_pages() - before) / calls
                return seconds
        finally:
            self.clear()

    def peak(self, batch: Any, device: torch.device) -> tuple[int | None, str]:
        """The bytes that one call holds beyond the model and its input, and how they were found."""
        args, kwargs = self._ready(batch)
        try:
            return peak_of(lambda: self._step(args, kwargs), device)
        finally:
            self.clear()

    def clear(self) -> None:
        """Gives the gradients up."""
        for parameter in self._parameters:
            parameter.grad = None

    def explain(self, error: Exception) -> str:
        """Why it failed, on one line: which module, and what that likely means."""
        if isinstance(error, PrepareError):
            return str(error.problems[0])
        if isinstance(self._call, nn.Module):
            return str(explained(self._call, error))
        return _named(error)

    def _ready(self, batch: Any) -> tuple[tuple, dict[str, Any]]:
        batch = fresh(batch)
        if self._format is None:
            return arguments(batch)
        try:
            return arguments(self._format(batch))
        except Exception as error:
            raise RefusedError("its format", f"raised {_named(error)}") from error

    def _step(self, args: tuple, kwargs: dict[str, Any]) -> None:
        with torch.inference_mode(mode=False), torch.set_grad_enabled(self._train):
            if not self._train:
                self._call(*args, **kwargs)
                return
            self.clear()
            output = self._call(*args, **kwargs)
            roots = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if not roots:
                raise RefusedError("its output", "needs no gradient", "there is nothing to train")
            torch.autograd.backward(roots, self._like(roots))

    def _like(self, roots: list[Tensor]) -> list[Tensor]:
        # Random, as a loss gives them: of a constant one, a norm makes zeros and numbers near zero
        # (denormal), which are slower on a CPU. Made once, so that the making is not timed.
        made = [(gradient.shape, gradient.dtype, gradient.device) for gradient in self._gradients]
        if made != [(root.shape, root.dtype, root.device) for root in roots]:
            self._gradients = [torch.randn_like(root) for root in roots]
        return self._gradients


def _timed(work: Callable[[], object], calls: int, device: torch.device, clock: Clock) -> float:
    if device.type == "cuda":
        return _by_events(work, calls, device)
    _synchronise(device)
    start = clock()
    for _ in range(calls):
        work()
    _synchronise(device)
    return (clock() - start) / calls


def _by_events(work: Callable[[], object], calls: int, device: torch.device) -> float:
    """On the device's own clock: the processor runs ahead of it."""
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1000 / calls


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def _named(error: Exception) -> str:
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
