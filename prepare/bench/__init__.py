"""Times prepared models against the unprepared one, in pairs, and says what may be concluded.

>>> from copy import deepcopy
>>> from torch import nn, randn
>>> from prepare.pipeline import Pipeline
>>> model = nn.Conv2d(8, 8, 3)
>>> pipeline = Pipeline.from_config({"half": {"dtype": "bfloat16"}, "input_format": {}})
>>> prepared = pipeline.apply(deepcopy(model))
>>> found = compare(
...     {"float32": model, "bfloat16": prepared},
...     randn(2, 8, 32, 32),
...     format={"bfloat16": pipeline.format},
...     budget=1.0,
... )
>>> found.row("bfloat16").verdict in ("faster", "slower", "no significant difference")
True
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from prepare.bench.records import Comparison, Control, Progress, Row
from prepare.core.utils.suggest import choose
from prepare.errors import ConfigError, Problem, RefusedError

if TYPE_CHECKING:
    import torch

    from prepare.bench.session import Goal
    from prepare.bench.variant import Call, Clock

__all__ = ["Comparison", "Control", "Progress", "Row", "compare"]


def compare(
    variants: Mapping[str, Call],
    batch: Any,
    *,
    baseline: str | None = None,
    train: bool = False,
    budget: float = 20.0,
    within_budget: bool = False,
    precision: float = 0.02,
    confidence: float = 0.95,
    format: Mapping[str, Callable[[Any], Any]] | None = None,  # noqa: A002
    device: str | torch.device | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
    _clock: Clock = time.perf_counter,
) -> Comparison:
    """Times every variant in every round, in an order shuffled anew, until the ratios are precise.

    What is said of a variant rests on its ratio to the baseline within each round, so that a machine
    that slows down for a while slows both; on the interval of the median of these ratios (see
    `prepare.bench.statistics`); and on a control, in which the baseline runs a second time under
    another name (A/A). A difference is significant where the interval leaves out 1 and the ratio lies
    beyond what the control shows between equals. All intervals hold together with `confidence`.

    A turn takes a fresh input, copied and formatted before the clock starts. Where the baseline's
    call is shorter than 5 ms, all are timed several in a row; and, where the budget allows 20 such
    rounds, after one untimed call, so that no variant finds the processor's caches warmer than
    another. On CUDA, events time.

    The models stay as they were: values, gradients, attributes, hooks, modes and random states. Of
    functions that holds for the models they refer to.

    Args:
        variants: models of their own, or functions that are called as a model is; functions may share
            one model, to compare ways to call it (autocast). In a dict's order.
        batch: a tensor, a tuple of positional or a mapping of named arguments, an Example, or a
            function that gives a new one of these at each call.
        baseline: whom the ratios are to; the first by default.
        train: time zero_grad, forward and backward in training mode, with random gradients of the
            outputs; else forward in evaluation mode without gradients.
        budget: seconds that all of it may take. Three calls each and one round are run in any case.
        within_budget: rather raise than exceed it by more than a call, once three rounds do not fit.
        precision: stop once every interval is as narrow as ± this part of its ratio.
        format: `Pipeline.format` of variants that have one.
        device: insist on this device. By default each variant is timed where its parameters lie.
        seed: of the order and of the inputs.
        progress: called now and then, between turns.

    A variant that raises is reported as failed, and the others go on. Peak memory is that of one call
    beyond the model, see `prepare.bench.peak_memory`; measuring it sets the process's own peak back.

    Raises:
        ConfigError: names or numbers are wrong; one problem for each.
        RefusedError: two models share a tensor; `device` is not there, or not where a variant lies;
            or the calls take too long for `within_budget`.
    """
    from prepare.bench.input_pool import make_pool
    from prepare.bench.model_state import check_apart, kept
    from prepare.bench.session import Goal, Session
    from prepare.bench.variant import Variant
    from prepare.core.forward.torch_state import isolated

    names, formats = list(variants), format or {}
    baseline = names[0] if baseline is None and names else baseline
    goal = Goal(train, budget, within_budget, precision, confidence, seed)
    _check(names, baseline, formats, goal)
    _check_device(device)
    check_apart(variants)
    made = {
        name: Variant(name, call, formatter=formats.get(name), train=train)
        for name, call in variants.items()
    }
    models = {id(model): model for variant in made.values() for model in variant.modules}
    session = Session(made, str(baseline), goal, progress, _clock)
    with ExitStack() as stack:
        stack.enter_context(isolated())
        for model in models.values():
            stack.enter_context(kept(model, train=train))
        return session.run(make_pool(batch, seed=seed), device)


def _check(names: list[str], baseline: str | None, formats: Mapping[str, Any], goal: Goal) -> None:
    """Raises ConfigError with one problem for everything that is wrong with the names and numbers."""
    problems = list(_problems(names, baseline, formats))
    for key in ("budget", "precision", "confidence"):
        value, most = getattr(goal, key), math.inf if key == "budget" else 1
        if not 0 < value < most:
            wrong = f"{value!r} is not between 0 and {most}"
            problems.append(Problem(key, wrong, _REMEDIES[key]))
    if problems:
        raise ConfigError.of(problems)


def _problems(
    names: list[str], baseline: str | None, formats: Mapping[str, Any]
) -> Iterator[Problem]:
    if not names:
        yield Problem("variants", "there are none", "give {name: model}, the baseline first")
    elif baseline not in names:
        remedy = choose(str(baseline), names, noun="variants")
        yield Problem("baseline", f"no variant is called {baseline!r}", remedy)
    for name in formats:
        if name not in names:
            remedy = choose(str(name), names, noun="variants")
            yield Problem("format", f"no variant is called {name!r}", remedy)


def _check_device(device: str | torch.device | None) -> None:
    """Raises RefusedError where there is no such device: no other one may answer for it."""
    if device is None:
        return
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch that was built without CUDA asserts
        said = str(error).partition("\n")[0].rstrip(".")
        wrong = f"{device} cannot be used here: {said}"
        raise RefusedError("device", wrong, "run it on a machine that has one") from error


_REMEDIES = {
    "budget": "give seconds, as in 20",
    "precision": "give a part of the ratio, as in 0.02",
    "confidence": "give a probability, as in 0.95",
}
