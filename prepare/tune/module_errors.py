"""Measure the error of each module alone in 16 bits, on the inputs that it has in a float32 forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.call import call_of
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
    modules, call = dict(low.named_modules()), call_of(batch)
    errors: dict[str, ModuleError] = {}
    meter = _Meter(dtype, errors)
    for model in (reference, low):
        make_deterministic(model, training_flags(model, mode))
    for name, module in reference.named_modules():
        if name and name in modules:
            meter.watch(name, module, modules[name])
    with held_interrupts(), isolated(), torch.no_grad(), DeterministicMode():
        interruptible(reference, *call.args, **call.kwargs)
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


@dataclass
class _Meter:
    """Hooks that measure each call of a module, and write its largest error into `errors`."""

    dtype: torch.dtype
    errors: dict[str, ModuleError]
    _arguments: list[tuple[tuple, dict]] = field(default_factory=list)
    _measuring: bool = False

    def watch(self, name: str, module: nn.Module, low: nn.Module) -> None:
        module.register_forward_pre_hook(self._on_call, with_kwargs=True)
        module.register_forward_hook(partial(self._on_result, name, low))

    def _on_call(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not self._measuring:
            # Rounded copies: the module may change its arguments in place.
            rounded = map_tensors(self._rounded, args), map_tensors(self._rounded, kwargs)
            self._arguments.append(rounded)

    def _on_result(
        self, name: str, low: nn.Module, module: nn.Module, args: tuple, output: Any
    ) -> None:
        if self._measuring:
            return
        self._measuring, (args, kwargs) = True, self._arguments.pop()
        try:
            with suppress(Exception):  # code of the model that does not run alone
                self._measure(name, low, module, (args, kwargs), output)
        finally:
            self._measuring = False

    def _measure(
        self, name: str, low: nn.Module, module: nn.Module, rounded: tuple[tuple, dict], output: Any
    ) -> None:
        exact = [tensor.clone() for tensor in tensors_in(output)]
        kept = map_tensors(self._rounded, _call(module, rounded, self._exact))
        error = ModuleError(math.inf, _error(exact, kept))
        with suppress(Exception):  # no kernel in 16 bits, or float32 tensors of its own
            in_low = _call(low, rounded, lambda tensor: tensor.clone())
            error = replace(error, low=_error(exact, in_low))
        before = self.errors.get(name, ModuleError())
        self.errors[name] = ModuleError(max(before.low, error.low), max(before.kept, error.kept))

    def _rounded(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor.clone()

    def _exact(self, tensor: Tensor) -> Tensor:
        return tensor.to(torch.float32) if tensor.dtype == self.dtype else tensor.clone()


def _call(module: nn.Module, arguments: tuple[tuple, dict], change: Callable) -> Any:
    args, kwargs = map_tensors(change, arguments)
    return module(*args, **kwargs)


def _error(exact: list[Tensor], result: Any) -> float:
    return max(_errors(exact, result), default=0.0)


def _errors(exact: list[Tensor], result: Any) -> Iterator[float]:
    for expected, actual in zip(exact, tensors_in(result), strict=True):
        if expected.is_floating_point() and expected.numel() and bool(expected.isfinite().all()):
            error = float((actual.double() - expected.double()).abs().max())
            scale = float(expected.double().abs().max())
            yield (error / scale if scale else error) if math.isfinite(error) else math.inf
