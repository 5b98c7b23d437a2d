"""One variant of a bench: runs forward, or forward and backward, and times it on inputs of a pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prepare.core.forward.call import arguments, map_tensors, tensors_in
from prepare.core.forward.explain_error import explained
from prepare.core.forward.torch_state import autocast, device_of
from prepare.core.forward.unchanged import copy_of, without_gradients
from prepare.core.model.devices import wait_for
from prepare.core.model.tensors import is_expanded, is_plain
from prepare.core.utils.process_state import paused_collector
from prepare.core.utils.text import first_line
from prepare.errors import PrepareError, RefusedError
from prepare.stages.bench.model_state import modules_in
from prepare.stages.bench.repeats import Repeats, kept

Clock = Callable[[], float]
Call = Callable[..., Any]
_MAX_INPUTS, _MIN_INPUTS, _MAX_BYTES = 8, 2, 2**28
# Seconds: shorter calls are timed several in a row, or the clock's own resolution would show.
_MIN_TIMING, _MAX_CALLS = 0.005, 1000


class Variant:
    """A model or function, with the formatter of its inputs.

    A timing is the mean of `calls` calls in a row; with `warm`, one untimed call precedes them. A call takes
    about `call_seconds`.
    """

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
        self._call, self._formatter, self._amp, self.is_training = call, formatter, amp, train
        self._scaler: LossScaler | None = None
        self._device: torch.device | None = None
        self._parameters = [p for module in self.modules for p in module.parameters()]
        buffers = (b for module in self.modules for b in module.buffers())
        self._devices = {tensor.device for tensor in (*self._parameters, *buffers)}
        self._gradients: list[Tensor] = []
        # Whether the forward needs gradients in evaluation mode too; None before its first call.
        self._differentiates: bool | None = None
        self.calls, self.warm, self.call_seconds = 1, False, 0.0
        self.repeats = Repeats()

    @property
    def device(self) -> torch.device:
        """Its device, a CPU as long as it was given no input."""
        return self._device or torch.device("cpu")

    @property
    def timer(self) -> str:
        """The name of what times its calls."""
        return "CUDA events" if _has_events(self._devices) else "wall clock"

    def find_device(self, batch: Any) -> torch.device:
        """Return the device of its first parameter or buffer, or else of its first formatted input."""
        self._arguments(batch)
        return self.device

    def first_call(self, batch: Any, clock: Clock) -> float:
        """Return the seconds of one call, which compiles if anything has to be compiled."""
        self.call_seconds = self.timed(batch, clock)
        return self.call_seconds

    def warm_up(self, batch: Any, clock: Clock) -> None:
        """Make two more calls: compilers, algorithm searches and memory pools are done by then."""
        for _ in range(2):
            self.call_seconds = self.timed(batch, clock)
        self.calls = math.ceil(_MIN_TIMING / max(self.call_seconds, _MIN_TIMING / _MAX_CALLS))

    def sample(self, batch: Any, clock: Clock) -> float:
        """Return one timing, in seconds per call."""
        return self.timed(batch, clock, calls=self.calls, warm=self.warm)

    def timed(self, batch: Any, clock: Clock, *, calls: int = 1, warm: bool = False) -> float:
        """Return the mean seconds of `calls` calls in a row; with `warm`, after one untimed call.

        Copying and formatting the input is not timed, nor is what comes afterwards: clearing the gradients,
        and comparing the outputs of the untimed and of the last call with an earlier one for this batch.
        """
        args, kwargs = self._arguments(batch)
        try:
            first = kept(self._step(args, kwargs)) if warm else None
            with paused_collector():
                seconds, output = _timed(
                    lambda: self._step(args, kwargs), calls, self._devices, clock
                )
            if first is not None:
                self.repeats.compare(batch, first)
            self.repeats.compare(batch, output)
            return seconds
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
        try:
            args, kwargs = arguments(batch if self._formatter is None else self._formatter(batch))
        except Exception as error:
            raise RefusedError("its format", f"raised {_describe(error)}") from error
        if self._device is None:
            self._device = device_of(self.modules, tensors_in([*args, *kwargs.values()]))
            self._devices.add(self._device)
        return args, kwargs

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of one call."""
        if not self.is_training:
            if self._differentiates is None:
                output, self._differentiates = without_gradients(
                    partial(self._forward, args, kwargs)
                )
                return output
            with torch.set_grad_enabled(self._differentiates):
                return self._forward(args, kwargs)[0]
        with torch.inference_mode(mode=False), torch.enable_grad():
            self.clear()
            with autocast(self._amp, self.device):
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
            return output

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """Return the output of a call in the present grad mode, and whether that is with gradients."""
        enabled = torch.is_grad_enabled()
        grad_mode = torch.set_grad_enabled(enabled)
        with torch.inference_mode(mode=False), grad_mode, autocast(self._amp, self.device):
            return self._call(*args, **kwargs), enabled

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
) -> tuple[float, object]:
    """Return the mean seconds of `calls` calls, and what the last one returned."""
    if _has_events(devices):
        return _timed_by_events(work, calls, next(d for d in devices if d.type == "cuda"))
    wait_for(devices)
    start = clock()
    for _ in range(calls - 1):
        work()
    output = work()
    wait_for(devices)
    return (clock() - start) / calls, output


def _timed_by_events(
    work: Callable[[], object], calls: int, device: torch.device
) -> tuple[float, object]:
    """Time with the device's own clock: the host runs ahead of it."""
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(calls - 1):
            work()
        output = work()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1000 / calls, output


def _describe(error: Exception) -> str:
    message = first_line(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


class LossScaler:
    """A GradScaler for steps without an optimizer; its factor adapts from step to step."""

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._scaler = torch.amp.GradScaler(device.type)
        # It unscales the gradients of an optimizer; this one only holds them.
        self._optimizer = torch.optim.SGD(parameters, lr=0.0)

    def backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Run backward from scaled outputs, then unscale the gradients and look for infinite ones.

        The gradients are those of a mean: without that, the scaled ones of an output in float16 overflow.
        """
        scaled = [
            self._scaler.scale(root.float() / root.numel()) if root.is_floating_point() else root
            for root in roots
        ]
        torch.autograd.backward(
            scaled, [g.to(s.dtype) for g, s in zip(gradients, scaled, strict=True)]
        )
        self._scaler.unscale_(self._optimizer)
        self._scaler.update()


def make_pool(batch: Any, *, seed: int) -> list[Any]:
    """Return 2 to 8 inputs like `batch`, as many as fit into 256 MiB.

    If `batch` is a function, each input is one of its results. Otherwise each input has the values of
    `batch`, rolled by a random number of places: they stay in its range, and no value becomes one that
    is slower to compute with (denormal). Integers and booleans are not changed, as they may be indices
    or masks.
    """
    first = batch() if callable(batch) else batch
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(first))
    count = max(_MIN_INPUTS, min(_MAX_INPUTS, _MAX_BYTES // max(1, size)))
    if callable(batch):
        return [first, *(batch() for _ in range(count - 1))]
    generator = torch.Generator("cpu").manual_seed(seed)
    return [
        map_tensors(lambda tensor: _roll(tensor, generator), copy_batch(first))
        for _ in range(count)
    ]


def copy_batch(batch: Any) -> Any:
    """Copy every tensor of a batch: a model may write into its input."""
    return map_tensors(copy_of, batch)


def batch_size(batch: Any) -> int | None:
    """Return the first size of the first tensor, or None if there is no such tensor or size."""
    args, kwargs = arguments(batch)
    first = next(tensors_in([*args, *kwargs.values()]), None)
    return None if first is None or first.dim() == 0 else first.shape[0]


@torch.no_grad()
def _roll(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point() or not is_plain(tensor) or is_expanded(tensor):
        return tensor
    if tensor.numel() > 1:
        places = int(torch.randint(1, tensor.numel(), (), generator=generator, device="cpu"))
        # In place, so that the strides stay as the user gave them.
        tensor.copy_(tensor.reshape(-1).roll(places).view(tensor.shape))
    return tensor
