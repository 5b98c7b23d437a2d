"""The outputs that an artefact should have: those of the unprepared model in float64, with a tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.nested import numbers_as_tensors, tensors_in
from prepare.core.forward.unchanged import unchanged
from prepare.core.utils.numbers import finite
from prepare.stages.verify.check_model import default_memory
from prepare.stages.verify.execution.budget import Budget, estimate
from prepare.stages.verify.execution.determinism import training_flags
from prepare.stages.verify.execution.runner import ModelPair, Runner
from prepare.stages.verify.tolerance import (
    Deviation,
    compare,
    first_non_finite,
    is_too_noisy,
)

if TYPE_CHECKING:
    from prepare.core.forward.call import Call
    from prepare.stages.verify.execution.single_run import NamedTensors

# The seconds of two runs: more than any model that is exported here takes.
_SECONDS = 600.0


@dataclass(frozen=True)
class Judgement:
    """The comparison of outputs with the exact ones; `error` and `allowed` are those of the worst tensor."""

    status: str
    error: float | None = None
    allowed: float | None = None
    note: str = ""


class _Numbers(nn.Module):
    """A model whose outputs that are numbers become tensors, as those of an artefact are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return numbers_as_tensors(self.model(*args, **kwargs))


class Reference:
    """The unprepared model: it judges outputs for any call, and keeps its own outputs for each size."""

    def __init__(self, reference: nn.Module, prepared: nn.Module, call: Call) -> None:
        reference, prepared = _Numbers(reference), _Numbers(prepared)
        self._models = ModelPair(reference, prepared)
        flags = training_flags(reference, "eval")
        budget = Budget(_SECONDS, default_memory(prepared))
        cost = estimate(reference, call, flags)
        self._runner = Runner(self._models, flags, budget, cost, backward=False)
        self._known: dict[Any, tuple[NamedTensors, list[NamedTensors]]] = {}

    def judge(self, outputs: Iterable[Tensor], call: Call) -> Judgement:
        """Compare outputs with those of the exact run of `call`.

        Raises:
            CannotTellError: the exact run does not fit into time or memory.
        """
        exact, baseline = self._expected(call)
        given = list(outputs)
        if len(given) != len(exact):
            note = f"it returns {len(given)} tensors, not {len(exact)}"
            return Judgement("fail", note=note)
        if name := first_non_finite(exact):
            return Judgement("cannot tell", note=f"{name} of the reference is not finite")
        named = dict(zip(exact, given, strict=True))
        deviations = compare(
            exact, baseline, named, dtype=self._models.dtype, depth=self._models.depth
        )
        # A whole number, such as a size, is compared by its value.
        whole = {
            n for n, t in exact.items() if t is not None and not (t.dim() or t.is_floating_point())
        }
        return _judged(
            [replace(d, allowed=0.0) if d.name in whole and not d.noise else d for d in deviations]
        )

    def _expected(self, call: Call) -> tuple[NamedTensors, list[NamedTensors]]:
        shapes = tuple(tensor.shape for tensor in call.tensors())
        if shapes not in self._known:
            exact = self._runner.run_exact(call)
            baseline = self._runner.run_baseline(call, backward=False)
            self._known[shapes] = exact.outputs, [run.outputs for run in baseline]
        return self._known[shapes]


def _judged(deviations: Sequence[Deviation]) -> Judgement:
    if not deviations:
        return Judgement("cannot tell", note="it returns no tensor")
    worst = max(deviations, key=lambda each: each.excess)
    status, note = "pass", worst.note
    if worst.exceeds:
        status = "fail"
    elif is_too_noisy(deviations):
        status, note = "cannot tell", "the unprepared model in this dtype is itself too far off"
    if not note and status == "fail":
        note = f"{worst.name} is off by {worst.error:.2g} of its scale; the tolerance is {worst.allowed:.2g}"
    return Judgement(status, finite(worst.error), worst.allowed, note)


def outputs_of(function: Callable[..., Any], call: Call) -> list[Tensor]:
    """Call a function with copies of the tensors of a call; return the tensors and numbers that it returns.

    A module is restored afterwards.
    """
    copied = call.map(_same_strides)
    kept = unchanged(function) if isinstance(function, nn.Module) else nullcontext()
    with kept, torch.no_grad():
        outputs = numbers_as_tensors(function(*copied.args, **copied.kwargs))
        return [each.detach().clone() for each in tensors_in(outputs)]


def _same_strides(tensor: Tensor) -> Tensor:
    fresh = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return fresh.copy_(tensor)
