"""Measure the error of each module alone in 16 bits, on the inputs that it has in a float32 forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.call import Call, call_of
from prepare.core.forward.nested import map_tensors, tensors_in
from prepare.core.forward.torch_state import isolated
from prepare.core.utils.signals import held_interrupts, interruptible
from prepare.errors import RefusedError
from prepare.pipeline import Pipeline
from prepare.verify.execution.determinism import (
    DeterministicMode,
    make_deterministic,
    training_flags,
)
from prepare.verify.execution.module_calls import CallInterceptor

if TYPE_CHECKING:
    from prepare.tune.records import Steps

# A module is worth keeping if its error is by this factor larger than that of the casts around it.
_WORTHWHILE = 1.1
# The modules in a module explain its error if one of them has as much, up to this factor.
_EXPLAINED = 1.5


@dataclass(frozen=True, slots=True)
class ModuleError:
    """The largest errors of a module's results, as fractions of their scale.

    `low` is its error in 16 bits, and `kept` that in float32 with its arguments and results in 16 bits.
    """

    low: float = 0.0
    kept: float = 0.0

    @property
    def gain(self) -> float:
        """The error that keeping the module in float32 avoids; 0 if nearly all of it stays."""
        return self.low - self.kept if self.low > _WORTHWHILE * self.kept else 0.0


def errors_of(
    steps: Steps, copied: Callable[[], nn.Module], batch: Any, *, mode: str
) -> dict[str, ModuleError]:
    """Return the error of each module in the dtype of `half` in `steps`, on copies of the model."""
    device: Steps = {name: options for name, options in steps.items() if name == "device"}
    dtype = getattr(torch, steps["half"]["dtype"])
    reference, low = (
        Pipeline.from_config(device).apply(copied(), strict=False, known_issues="ignore")
        for _ in range(2)
    )
    try:
        half = Pipeline.from_config({"half": steps["half"]})
        half.apply(low, strict=False, known_issues="ignore")
    except RefusedError:  # a weight overflows in this dtype
        low.to(dtype)
    return measure_modules(reference, low, batch, dtype=dtype, mode=mode)


def measure_modules(
    reference: nn.Module, low: nn.Module, batch: Any, *, dtype: torch.dtype, mode: str
) -> dict[str, ModuleError]:
    """Run `reference` once, and each of its modules again: in `low`, the same model in `dtype`, and kept.

    Both models are copies that may be changed. A module that raises in `dtype` has an infinite error; one
    that does not run alone in float32 either is left out.
    """
    for model in (reference, low):
        make_deterministic(model, training_flags(model, mode))
    low_modules, call = dict(low.named_modules()), call_of(batch)
    names = {id(module): name for name, module in reference.named_modules() if name in low_modules}
    errors: dict[str, ModuleError] = {}

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor.clone()

    def exact(tensor: Tensor) -> Tensor:
        return tensor.to(torch.float32) if tensor.dtype == dtype else tensor.clone()

    def measure(name: str, module: nn.Module, arguments: Call, output: Any) -> None:
        expected = [tensor.clone() for tensor in tensors_in(output)]
        kept = map_tensors(rounded, _called(module, arguments.map(exact)))
        error = ModuleError(math.inf, _error(expected, kept))
        with suppress(Exception):  # no kernel in 16 bits, or float32 tensors of its own
            in_low = _called(low_modules[name], arguments.map(torch.clone))
            error = replace(error, low=_error(expected, in_low))
        before = errors.get(name, ModuleError())
        errors[name] = ModuleError(max(before.low, error.low), max(before.kept, error.kept))

    def handle(run: Callable[[], Any], module: nn.Module, arguments: Call) -> Any:
        name = names.get(id(module))
        if not name:
            return run()
        # Rounded copies: the module may change its arguments in place.
        copied, output = arguments.map(rounded), run()
        interceptor.handle = None
        with suppress(Exception):  # code of the model that does not run alone
            measure(name, module, copied, output)
        interceptor.handle = handle
        return output

    interceptor = CallInterceptor()
    interceptor.handle = handle
    with held_interrupts(), isolated(), torch.no_grad(), DeterministicMode(), interceptor:
        interruptible(_called, reference, call)
    return errors


def worth_keeping(errors: Mapping[str, ModuleError]) -> list[str]:
    """Return the modules whose error keeping them avoids, the largest error first.

    A module whose error is that of one module in it comes after all others.
    """
    gains = {name: error.gain for name, error in errors.items() if error.gain}

    def is_explained(name: str) -> bool:
        inside = (gains[other] for other in gains if other.startswith(f"{name}."))
        return gains[name] <= _EXPLAINED * max(inside, default=0.0)

    return sorted(gains, key=lambda name: (is_explained(name), -gains[name]))


def _called(module: nn.Module, call: Call) -> Any:
    return module(*call.args, **call.kwargs)


def _error(exact: list[Tensor], result: Any) -> float:
    """Return the largest error of the tensors in a result, each as a fraction of its scale."""
    worst = 0.0
    for expected, actual in zip(exact, tensors_in(result), strict=True):
        if expected.is_floating_point() and expected.numel() and bool(expected.isfinite().all()):
            error = float((actual.double() - expected.double()).abs().max())
            scale = float(expected.double().abs().max())
            worst = max(worst, error / (scale or 1.0) if math.isfinite(error) else math.inf)
    return worst
