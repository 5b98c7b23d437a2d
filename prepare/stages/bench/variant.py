"""One variant of a bench: runs forward, or forward and backward, and times it on inputs of a pool."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from prepare.core.forward.call import arguments, map_tensors, tensors_in
from prepare.core.forward.run_example import explained
from prepare.core.forward.torch_state import autocast, device_of
from prepare.core.forward.unchanged import copy_of, without_gradients
from prepare.core.model.devices import wait_for
from prepare.core.model.tensors import is_expanded, is_plain
from prepare.core.utils.process_state import paused_collector
from prepare.core.utils.text import first_line
from prepare.errors import PrepareError, RefusedError
from prepare.stages.bench.model_state import modules_in

Clock = Callable[[], float]
Call = Callable[..., Any]
_MAX_INPUTS, _MIN_INPUTS, _MAX_BYTES = 8, 2, 2**28
# Seconds: shorter calls are timed several in a row, or the clock's own resolution would show.
_MIN_TIMING, _MAX_CALLS, _LONG = 0.005, 1000, 0.3


class Times(NamedTuple):
    """The seconds of a call on the wall, and those that processors spent on this process meanwhile."""

    wall: float
    processor: float


class Variant:
    """A model or function, with the formatter of its inputs.

    `samples` are its timings, one for each round; `reason` says why it failed. A timing is the mean of
    `calls` calls in a row; with `warm`, one untimed call precedes them. A call takes about `call_seconds`,
    the first one took `first_seconds`.
    """

    def __init__(
        self,
        name: str,
        call: Call,
        formatter: Callable[[Any], Any] | None,
        *,
        train: bool,
        amp: str,
        clocks: tuple[Clock, Clock],
    ) -> None:
        self.name, self.modules = name, modules_in(call)
        self._call, self._formatter, self._amp, self.is_training = call, formatter, amp, train
        self._clocks = clocks
        self._device: torch.device | None = None
        self._parameters = [p for module in self.modules for p in module.parameters()]
        buffers = (b for module in self.modules for b in module.buffers())
        self._devices = {tensor.device for tensor in (*self._parameters, *buffers)}
        self._gradients: list[Tensor] = []
        # Whether the forward needs gradients in evaluation mode too; None before its first call.
        self._differentiates: bool | None = None
        self.calls, self.warm = 1, False
        self.call_seconds = self.first_seconds = 0.0
        self.samples: list[Times] = []
        self.reason = ""

    @property
    def device(self) -> torch.device:
        """Its device, a CPU as long as it was given no input."""
        return self._device or torch.device("cpu")

    @property
    def is_on_cpu(self) -> bool:
        """Return whether no tensor of it is on another device."""
        return all(device.type == "cpu" for device in self._devices)

    def warm_up(self, batch: Any) -> None:
        """Make three calls: compilers, searches and memory pools are done then; two if they take long."""
        for number in range(3):
            if number < 2 or self.call_seconds < _LONG:
                self.call_seconds = self._timed(batch, 1).wall
            self.first_seconds = self.first_seconds or self.call_seconds
        self.calls = math.ceil(_MIN_TIMING / max(self.call_seconds, _MIN_TIMING / _MAX_CALLS))

    def sample(self, batch: Any, samples: list[Times]) -> None:
        """Add one timing to these, in seconds per call."""
        samples.append(self._timed(batch, self.calls, warm=self.warm))

    def _timed(self, batch: Any, calls: int, *, warm: bool = False) -> Times:
        """Return the mean seconds of `calls` calls in a row; with `warm`, after one untimed call.

        Copying and formatting the input is not timed, nor is clearing the gradients afterwards.
        """
        args, kwargs = self._arguments(batch)
        try:
            if warm:
                self._step(args, kwargs)
            with paused_collector():
                wait_for(self._devices)
                before = [clock() for clock in self._clocks]
                for _ in range(calls):
                    self._step(args, kwargs)
                wait_for(self._devices)
                after = [clock() for clock in self._clocks]
            return Times(*((b - a) / calls for a, b in zip(before, after, strict=True)))
        finally:
            self._clear()

    def _clear(self) -> None:
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
        if self._device.type == "meta":
            raise RefusedError("its device", "meta computes nothing", "give the tensors values")
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
            self._clear()
            with autocast(self._amp, self.device):
                output = self._call(*args, **kwargs)
            roots = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if not roots:
                message = "does not require gradients"
                raise RefusedError("its output", message, "there is nothing to train")
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


def _describe(error: Exception) -> str:
    message = first_line(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


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


@torch.no_grad()
def _roll(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point() or not is_plain(tensor) or is_expanded(tensor):
        return tensor
    if tensor.numel() > 1:
        places = int(torch.randint(1, tensor.numel(), (), generator=generator, device="cpu"))
        # In place, so that the strides stay as the user gave them.
        tensor.copy_(tensor.reshape(-1).roll(places).view(tensor.shape))
    return tensor
