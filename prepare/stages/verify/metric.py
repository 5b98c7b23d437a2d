"""Compare a number of the user's own on both models: an accuracy, a Dice score, the negative of a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from prepare.core.forward.autocast import autocast, device_of
from prepare.core.forward.unchanged import unchanged
from prepare.core.utils.signals import held_interrupts, interruptible
from prepare.core.utils.user_code import described
from prepare.core.utils.wording import words
from prepare.errors import Problem, RefusedError
from prepare.stages.verify.inputs import user_call, user_formatter
from prepare.stages.verify.records import Check

if TYPE_CHECKING:
    from prepare.core.forward.call import Call
    from prepare.pipeline import Pipeline
    from prepare.stages.verify.execution.runner import ModelPair

# A function of a model and a batch, or of data that it loads itself; a larger number is better.
Metric = Callable[[nn.Module, Any], float]


@dataclass(frozen=True)
class Limit:
    """A metric, and by how much the prepared model's value may be lower."""

    metric: Metric
    max_drop: float

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.metric, "__name__", type(self.metric).__name__)

    @property
    def identity(self) -> str:
        """The module and the name of the function."""
        kind = self.metric if hasattr(self.metric, "__qualname__") else type(self.metric)
        return f"{kind.__module__}.{kind.__qualname__}"


def limit_of(metric: Metric | None, max_drop: float | None) -> Limit | None:
    """Check the two arguments, which need each other.

    Raises:
        RefusedError: one problem for each mistake.
    """
    problems = []
    if metric is not None and not callable(metric):
        wrong = f"a {type(metric).__name__} is not a function"
        problems.append(Problem("metric", wrong, "give a function of (model, batch)"))
    if metric is not None and max_drop is None:
        problems.append(
            Problem(
                "max_drop",
                "is missing",
                words(cli="give verify.max_drop=0.001", python="give max_drop=0.001"),
            )
        )
    if metric is None and max_drop is not None:
        wrong = "limits a metric, and there is none"
        problems.append(
            Problem("max_drop", wrong, words(cli="give verify.metric=", python="give metric="))
        )
    if max_drop is not None and not 0 <= max_drop < math.inf:
        problems.append(Problem("max_drop", f"{max_drop} is not a drop", "give one from 0 on"))
    if problems:
        raise RefusedError.of(problems)
    return None if metric is None or max_drop is None else Limit(metric, max_drop)


def check_metric(models: ModelPair, limit: Limit, call: Call) -> Check:
    """Evaluate the metric on both models in eval mode; the prepared one as it will be used."""
    prepared_call = user_call(call, models.prepared, models.pipeline)
    before, wrong = _value(models.reference, limit, call, "none")
    if wrong:
        return _check(limit, "cannot tell", f"on the unprepared model it {wrong}")
    with _formatting(models.prepared, models.pipeline):
        after, wrong = _value(models.prepared, limit, prepared_call, models.amp)
    if wrong:
        return _check(limit, "fail", f"on the prepared model it {wrong}")
    drop = before - after
    note = (
        f"{before:.6g} on the unprepared model, {after:.6g} on the prepared one: a drop of {drop:.2g}, "
        f"and {limit.max_drop:.2g} is allowed"
    )
    status = "pass" if drop <= limit.max_drop else "fail"
    return _check(limit, status, note, drop)


def _check(limit: Limit, status: str, note: str, drop: float | None = None) -> Check:
    return Check(
        what="metric",
        status=status,
        worst=limit.name,
        note=note,
        compared=1,
        error=None if drop is None else max(drop, 0.0),
        allowed=limit.max_drop,
    )


@held_interrupts()
def _value(model: nn.Module, limit: Limit, call: Call, amp: str) -> tuple[float, str]:
    """Return the metric of a model, and what is wrong with it; the model and all state are restored."""
    try:
        with (
            unchanged(model),
            torch.inference_mode(mode=False),
            torch.no_grad(),
            autocast(amp, device_of([model], call.tensors())),
        ):
            torch.manual_seed(0)
            model.eval()
            value = float(interruptible(limit.metric, model, _batch(call)))
    except Exception as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
        return math.nan, f"raised {described(error)}"
    return value, "" if math.isfinite(value) else f"is {value}"


def _batch(call: Call) -> Any:
    """Return the arguments as a user gives them: one tensor, a tuple, or a mapping."""
    if call.kwargs:
        return call.kwargs if not call.args else (*call.args, call.kwargs)
    return call.args[0] if len(call.args) == 1 else call.args


@contextmanager
def _formatting(model: nn.Module, pipeline: Pipeline | None) -> Iterator[None]:
    """Format every input of the model, since a metric may load data itself."""
    formatter = None if pipeline is None else user_formatter(pipeline)
    if formatter is None:
        yield
        return
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: (formatter(args), formatter(kwargs)), with_kwargs=True, prepend=True
    )
    try:
        yield
    finally:
        handle.remove()
