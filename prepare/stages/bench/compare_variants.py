"""Time variants of a model in paired rounds: the call `prepare.compare`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from prepare.core.forward.call import arguments
from prepare.core.forward.torch_state import Amp, isolated, read_amp
from prepare.core.forward.unchanged import unchanged
from prepare.core.utils.process_state import held_interrupts, interruptible
from prepare.core.utils.suggest import choose
from prepare.core.utils.text import first_line
from prepare.errors import ConfigError, Problem, RefusedError
from prepare.stages.bench.model_state import check_independent, set_mode
from prepare.stages.bench.session import BenchOptions, BenchSession
from prepare.stages.bench.variant import Call, Clock, Variant, make_pool

if TYPE_CHECKING:
    from prepare.stages.bench.records import Comparison, Progress


def compare(
    variants: Mapping[str, Call],
    batch: Any,
    *,
    baseline: str | None = None,
    train: bool = False,
    budget: float = 20.0,
    within_budget: bool = False,
    longest: float | None = None,
    settle: bool = False,
    precision: float = 0.02,
    confidence: float = 0.95,
    format: Mapping[str, Callable[[Any], Any]] | None = None,  # noqa: A002
    device: str | torch.device | None = None,
    amp: Amp = "none",
    seed: int = 0,
    progress: Callable[[Progress], object] | None = None,
    _clock: Clock = time.perf_counter,
) -> Comparison:
    """Time every variant in every round, in random order, until the ratios are precise.

    A verdict rests on the ratios of a variant's time to the baseline's time in the same round, so a
    machine that slows down for a while slows both. It uses the confidence interval of the median ratio
    (see `prepare.stages.bench.statistics`) and an A/A control, in which the baseline runs twice per round. A
    variant is `faster` or `slower` if the interval excludes 1 and the ratio is beyond the noise that the
    control shows. There is `no difference` if the whole interval is within 3 % of 1; anything else is
    `unclear`, for a `reason`. All intervals hold together with `confidence`.

    Each timing gets a fresh input, copied and formatted before the clock starts. If a call of the
    baseline is shorter than 5 ms, a timing averages several calls of every variant. If the budget allows
    20 such rounds (8 with `settle`), one untimed call precedes each timing, so that every variant finds
    equally warm caches. On CUDA, events measure the time.

    The models are restored: values, gradients, attributes, hooks, modes and random states. For
    functions this applies to the models that they refer to.

    Args:
        variants: distinct models, or functions that are called like a model; functions may share a
            model, to compare ways to call it (autocast). The order of the mapping is kept.
        batch: a tensor, a tuple of positional arguments, a mapping of named arguments, an Example, or a
            function that returns a new one of these on each call.
        baseline: the variant that ratios are relative to; the first by default.
        train: if True, time zero_grad, forward and backward in training mode, with random gradients of
            the outputs; otherwise the forward in evaluation mode without gradients.
        budget: seconds for everything. Three calls of each variant and one round always run.
        within_budget: if three rounds do not fit into `budget`, raise RefusedError instead of running
            over; the budget is then exceeded by one call at most.
        longest: with `settle`, seconds in place of `budget` until the first look, for calls so slow that
            fewer than 8 rounds fit into `budget`.
        settle: stop as soon as no verdict is `unclear`, instead of at a precision. The looks are few, and
            share the error.
        precision: stop as soon as every interval is within ± this fraction of its ratio.
        confidence: the probability with which all intervals hold.
        format: `Pipeline.format` for each variant that needs formatted inputs.
        device: require this device. By default each variant runs where its parameters are.
        amp: run the forward of every variant under `torch.autocast` to this dtype; a training step in float16
            uses a GradScaler. With `none`, an autocast region around this call has no effect.
        seed: seed of the order and of the inputs.
        progress: called from time to time between timings.

    A variant that raises is reported as failed, and the others continue.

    Raises:
        ConfigError: names or numbers are invalid; one problem for each.
        RefusedError: `amp` is unknown; two models share a tensor; `device` is not available, or a variant
            is on another one; or `within_budget` is set and the calls take too long.
    """
    names, formats = list(variants), format or {}
    baseline = names[0] if baseline is None and names else baseline
    amp = read_amp(amp)
    options = BenchOptions(
        train,
        budget,
        within_budget,
        longest,
        settle,
        precision,
        confidence,
        seed,
        amp,
    )
    if problems := list(_problems(names, baseline, formats, options)):
        raise ConfigError.of(problems)
    _check_device(device)
    check_independent(variants)
    timed = {
        name: Variant(name, call, formatter=formats.get(name), train=train, amp=amp)
        for name, call in variants.items()
    }
    models = {id(model): model for variant in timed.values() for model in variant.modules}
    session = BenchSession(timed, str(baseline), options, progress, _clock)
    with held_interrupts(), ExitStack() as stack:
        stack.enter_context(isolated())  # of functions without a model, too
        given = () if callable(batch) else arguments(batch)
        for model in models.values():
            stack.enter_context(unchanged(model, given))
            set_mode(model, train=train)
        return interruptible(session.run, make_pool(batch, seed=seed), device)


def _problems(
    names: list[str], baseline: str | None, formats: Mapping[str, Any], options: BenchOptions
) -> Iterator[Problem]:
    """Yield one problem for each invalid name and number."""
    if not names:
        yield Problem("variants", "the mapping is empty", "give {name: model}, the baseline first")
    wanted = [("baseline", baseline)] if names else []
    for key, name in [*wanted, *(("format", name) for name in formats)]:
        if name not in names:
            remedy = choose(str(name), names, noun="variants")
            yield Problem(key, f"{name!r} is not a variant", remedy)
    for key, remedy in _REMEDIES.items():
        value, limit = getattr(options, key), math.inf if key == "budget" else 1
        if not 0 < value < limit:
            yield Problem(key, f"{value!r} is not between 0 and {limit}", remedy)


def _check_device(device: str | torch.device | None) -> None:
    """Raise RefusedError if the device is not available; never fall back to another one."""
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    # torch built without CUDA raises AssertionError.
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error).rstrip(".")
        message = f"{device} cannot be used here: {reason}"
        raise RefusedError("device", message, "run it on a machine that has one") from error


_REMEDIES = {
    "budget": "give seconds, as in 20",
    "precision": "give a fraction of the ratio, as in 0.02",
    "confidence": "give a probability, as in 0.95",
}
