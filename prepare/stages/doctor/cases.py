"""One operation at one size, in one format and dtype; float64 judges it, and another case times it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from prepare.core.utils.numbers import verdict_text
from prepare.core.utils.text import first_line
from prepare.stages.bench import statistics
from prepare.stages.bench.rounds import Rounds
from prepare.stages.bench.variant import Variant

# A format is wrong only if its error is this many times that of the contiguous format.
_WORSE = 10.0
_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
# The largest error that rounding explains, relative to the largest number of a tensor. In float32, sums of a
# few thousand products stay below 1e-5.
ALLOWED = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 6e-2}
_MIN_ROUNDS, _MAX_ROUNDS, _SECONDS = 9, 60, 1.0


@dataclass(frozen=True)
class OperationCase:
    """A module, the shape of its input, and how both are prepared.

    `mean` is added to the input; `trained_input`: whether it needs a gradient. With `against_contiguous`,
    errors that the contiguous format has too are allowed. `repeats` equal calls must all be right.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    format: str = "contiguous"
    dtype: str = "float32"
    mean: float = 0.0
    trained_input: bool = True
    against_contiguous: bool = False
    repeats: int = 3
    allowed: float | None = None

    def __str__(self) -> str:
        return f"{' x '.join(map(str, self.shape))}, {self.format}, {self.dtype}"

    def models(self) -> tuple[nn.Module, Tensor]:
        """Return the module and its input on a CPU, contiguous and rounded to the dtype."""
        torch.manual_seed(0)
        module, dtype = self.build(), getattr(torch, self.dtype)
        return module.to(dtype), (torch.randn(self.shape) + self.mean).to(dtype)

    def placed(self, device: str) -> tuple[nn.Module, Tensor]:
        """Return the module and its input on the device, in the format."""
        module, given = self.models()
        module = module.to(device)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() == given.dim():
                    parameter.data = parameter.data.to(memory_format=_FORMATS[self.format])
        return module, self.formatted(given.to(device))

    def formatted(self, tensor: Tensor) -> Tensor:
        """Return the tensor in the format, if it has as many dimensions as the format needs."""
        fits = self.format == "contiguous" or tensor.dim() == len(self.shape)
        return tensor.to(memory_format=_FORMATS[self.format]) if fits else tensor


@dataclass(frozen=True)
class CaseOutcome:
    """The result of a case: `bad` (wrong, inexact, slow or lost here, unclear or empty), and the figures."""

    bad: str
    text: str


def judge(case: OperationCase, device: str) -> CaseOutcome:
    """Compare outputs, gradients and buffers of forward and backward with a run in float64 on a CPU."""
    module, given = case.models()
    exact = _run(case, deepcopy(module).double(), given.double())
    allowed = case.allowed or ALLOWED[case.dtype]
    worst = []
    for _ in range(case.repeats):
        try:
            worst.append(_worst(_run(case, *case.placed(device)), exact))
        except RuntimeError as raised:
            if "memory" in str(raised).lower():
                raise
            text = f"({case}): {type(raised).__name__}: {first_line(raised)}"
            if "not implemented" in text or "not support" in text:
                return CaseOutcome("", f"not run {text}")
            return CaseOutcome("wrong here", f"it raises {text}")
    if case.against_contiguous:
        contiguous = replace(case, format="contiguous")
        _, known = _worst(_run(contiguous, *contiguous.placed(device)), exact)
        allowed = max(allowed, _WORSE * known)
    (part, error), runs = max(worst, key=lambda item: item[1]), len(worst)
    wrong = sum(size > allowed for _, size in worst)
    error = min(error, 1e18)
    if not wrong:
        return CaseOutcome("", f"error {error:.1e}, allowed {allowed:.0e}")
    some = f" in {wrong} of {runs} equal calls" if wrong < runs else ""
    size = f"error {error:.1e}" if error < 1e15 else "garbage or NaN"
    return CaseOutcome("wrong here", f"{part} wrong{some} ({case}): {size}, allowed {allowed:.0e}")


def loses_layout(case: OperationCase, device: str) -> CaseOutcome:
    """Return `lost here` if a channels-last input gives activations in another format."""
    module, given = case.placed(device)
    with torch.no_grad():
        out = module(given)
    kept = out.is_contiguous(memory_format=_FORMATS[case.format])
    return CaseOutcome("" if kept else "lost here", f"{'keeps' if kept else 'loses'} {case.format}")


def pace(
    case: OperationCase,
    control: OperationCase,
    device: str,
    *,
    factor: float,
    than: str,
    change: Callable[[nn.Module], Any] | None = None,
) -> CaseOutcome:
    """Time forward and backward of two cases in paired rounds, in random order.

    `slow here` if the whole interval of the ratio is above `factor` and a second, longer measurement agrees:
    other programs may slow down one of them for as long as a few rounds. `unclear` if only a part is. `than`
    names the control; `change` is applied to its module first.
    """
    timers = [_timer(case, device), _timer(control, device, change)]
    for each in (*timers, *timers):
        each()
    ratio = _ratio(timers, _SECONDS)
    low, high = ratio.interval or (0.0, math.inf)
    if low > factor:
        ratio = _ratio(timers, 2 * _SECONDS)
        low, high = ratio.interval or (0.0, math.inf)
    bad = "slow here" if low > factor else "" if high < factor else "unclear"
    speed = verdict_text("slower" if ratio.value >= 1 else "faster", ratio.value, ratio.interval)
    text = f"{speed} than {than} ({case})"
    if bad == "unclear":
        text = f"unclear if slower than {than} ({case}): {low:.2g} to {high:.2g} times its time; "
        text += "a quieter machine may decide it"
    return CaseOutcome(bad, text)


def _ratio(timers: list[Callable[[], float]], seconds: float) -> statistics.Estimate:
    """Time both in each round, in random order; return the median ratio and its 99 % interval."""
    times: tuple[list[float], list[float]] = ([], [])
    rounds = Rounds(time.perf_counter)
    while rounds.count < _MIN_ROUNDS or (
        rounds.count < _MAX_ROUNDS and rounds.seconds() <= seconds
    ):
        for index in rounds.turns((0, 1)):
            times[index].append(timers[index]())
    return statistics.ratio(*times, 0.99)


def _timer(
    case: OperationCase, device: str, change: Callable[[nn.Module], Any] | None = None
) -> Callable[[], float]:
    """Return a function that times one forward and backward, in seconds."""
    module, given = case.placed(device)
    if change is not None:
        change(module)
    variant = Variant(str(case), module, formatter=None, train=True)
    batch = given.requires_grad_()
    return lambda: variant.sample(batch, time.perf_counter)


def _run(case: OperationCase, module: nn.Module, given: Tensor) -> dict[str, Tensor]:
    """Return outputs, gradients and buffers of one forward and backward, in float64 on a CPU."""
    given = given.detach().requires_grad_(case.trained_input)
    out = module(given)
    torch.manual_seed(1)
    gradient = torch.randn(out.shape).to(getattr(torch, case.dtype)).to(out)
    out.backward(case.formatted(gradient) if given.dtype != torch.float64 else gradient)
    return {name: tensor.detach().double().cpu() for name, tensor in _results(module, given, out)}


def _results(module: nn.Module, given: Tensor, out: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "outputs", out
    if given.grad is not None:
        yield "input gradients", given.grad
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            yield f"gradient of {name}", parameter.grad
    yield from module.named_buffers()


def _worst(results: dict[str, Tensor], exact: dict[str, Tensor]) -> tuple[str, float]:
    """Return the name of the tensor with the largest error, and that error."""
    errors = ((name, _error(results[name], tensor)) for name, tensor in exact.items())
    return max(errors, key=lambda item: item[1])


def _error(result: Tensor, exact: Tensor) -> float:
    scale = max(exact.abs().max().item(), 1e-30)
    error = (result - exact).abs().max().item() / scale
    return error if math.isfinite(error) else math.inf
