"""Time variants of a model in paired rounds, and judge the differences: the call `prepare.compare`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import torch

from prepare.core.forward.call import arguments
from prepare.core.forward.torch_state import Amp, isolated, read_amp
from prepare.core.forward.unchanged import unchanged
from prepare.core.utils.machine import MachineWatch, busy_sentence, disturbance, environment
from prepare.core.utils.process_state import held_interrupts, interruptible
from prepare.core.utils.suggest import choose
from prepare.core.utils.text import plural
from prepare.errors import ConfigError, Problem, RefusedError
from prepare.stages.bench import statistics
from prepare.stages.bench.model_state import check_independent, set_mode
from prepare.stages.bench.records import PROCESSOR, Comparison, Control, VariantResult
from prepare.stages.bench.statistics import Estimate, Rounds
from prepare.stages.bench.variant import Call, Clock, Times, Variant, make_pool

_MAX_ROUNDS, _CONFIDENCE = 1000, 0.95
# The rounds after which a comparison may stop, each with its part of the error; the end has the rest. To look
# again and again finds a difference by chance sooner or later. Eight ratios are the fewest that have an
# interval at the confidence of one look.
LOOKS = {**dict.fromkeys((8, 16, 32, 64), 0.16), **dict.fromkeys((128, 256, 512), 0.09)}
_FEWEST = min(LOOKS)
# Seconds of timing before the first look: a stall of the machine is shorter.
_MIN_SECONDS = 1.0
# With fewer rounds than these a ratio says too little to be worth its time.
_USEFUL_ROUNDS = 3
# By this factor the budget may be exceeded until the first look.
_OVERTIME = 4
# Seconds: longer calls need no untimed call before them, as the state of the caches matters less.
_WARM_BELOW = 0.05
# The process's own time is worth something if the system counts it this finely.
_FINE = time.get_clock_info("process_time").resolution <= 1e-6


def compare(
    variants: Mapping[str, Call],
    batch: Any,
    *,
    baseline: str | None = None,
    train: bool = False,
    budget: float = 20.0,
    longest: float | None = None,
    precision: float | None = 0.02,
    format: Mapping[str, Callable[[Any], Any]] | None = None,  # noqa: A002
    amp: Amp = "none",
    seed: int = 0,
    progress: Callable[[str], object] = lambda _: None,
    _clock: Clock = time.perf_counter,
    _processor: Clock | None = None,
) -> Comparison:
    """Time every variant in every round, in random order, until the answer is clear.

    A verdict rests on the ratios of a variant's time to the baseline's time in the same round, so a
    machine that slows down for a while slows both. It uses the confidence interval of the median ratio
    (see `prepare.stages.bench.statistics`) and an A/A control, in which the baseline runs twice per round. A
    variant is `faster` or `slower` if the interval excludes 1 and the ratio is beyond the noise that the
    control shows. There is `no difference` if the whole interval is within 3 % of 1; anything else is
    `unclear`, for a `reason`. All intervals hold together with 95 %.

    It may stop after 8, 16, 32, ... rounds, and after a second: when every verdict is clear, and every
    interval within `precision`. The looks share the error.

    On a CPU each timing has two clocks. The verdict follows the wall clock, and on a busy machine the
    processor time of this process, in which other programs do not count. On a GPU it is the wall clock, from
    one synchronisation to the next.

    Each timing gets a fresh input, copied and formatted before the clock starts. If a call of the
    baseline is shorter than 5 ms, a timing averages several calls of every variant; if it is shorter than
    50 ms, one untimed call precedes each timing, so that every variant finds equally warm caches.

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
        budget: seconds for everything. The 8 rounds that an interval needs may take four times as long.
            Two or three calls of each variant and one round always run.
        longest: seconds for these 8 rounds instead; if three rounds do not fit into them, that is a
            RefusedError.
        precision: stop only when every interval is within ± this fraction of its ratio. With None, a clear
            verdict is enough, and it stops too when the budget will not make one clear.
        format: `Pipeline.format` for each variant that needs formatted inputs.
        amp: run the forward of every variant under `torch.autocast` to this dtype. With `none`, an
            autocast region around this call has no effect.
        seed: seed of the order and of the inputs.
        progress: called with a line from time to time.

    A variant that raises is reported as failed, and the others continue.

    Raises:
        ConfigError: names or numbers are invalid; one problem for each.
        RefusedError: `amp` is unknown, two models share a tensor, or three rounds do not fit into `longest`.
    """
    names, formats = list(variants), format or {}
    baseline = names[0] if baseline is None and names else baseline
    options: dict[str, Any] = {
        "train": train,
        "budget": budget,
        "longest": longest,
        "precision": precision,
        "confidence": _CONFIDENCE,
        "seed": seed,
        "amp": read_amp(amp),
    }
    if problems := list(_problems(names, baseline, formats, options)):
        raise ConfigError.of(problems)
    check_independent(variants)
    # A simulated clock counts for both.
    processor = _processor or (time.process_time if _clock is time.perf_counter else _clock)
    make = partial(Variant, train=train, amp=options["amp"], clocks=(_clock, processor))
    timed = {name: make(name, call, formats.get(name)) for name, call in variants.items()}
    models = {id(model): model for variant in timed.values() for model in variant.modules}
    session = _Timing(timed, str(baseline), options, progress, Rounds(_clock, seed))
    with held_interrupts(), ExitStack() as stack:
        stack.enter_context(isolated())  # of functions without a model, too
        given = () if callable(batch) else arguments(batch)
        for model in models.values():
            stack.enter_context(unchanged(model, given))
            set_mode(model, train=train)
        return interruptible(session.run, make_pool(batch, seed=seed))


def _problems(
    names: list[str], baseline: str | None, formats: Mapping[str, Any], options: Mapping[str, Any]
) -> Iterator[Problem]:
    """Yield one problem for each invalid name and number."""
    if not names:
        yield Problem("variants", "the mapping is empty", "give {name: model}, the baseline first")
    wanted = [("baseline", baseline)] if names else []
    for key, name in [*wanted, *(("format", name) for name in formats)]:
        if name not in names:
            remedy = choose(str(name), names, noun="variants")
            yield Problem(key, f"{name!r} is not a variant", remedy)
    for key, limit, example in (
        ("budget", math.inf, "seconds, as in 20"),
        ("precision", 1, "0.02"),
    ):
        value = options[key]
        if value is not None and not 0 < value < limit:
            yield Problem(key, f"{value!r} is not between 0 and {limit}", f"give {example}")


class _Timing:
    """One comparison; call `run` once. `control` are the second timings of the baseline (A/A)."""

    def __init__(
        self,
        variants: Mapping[str, Variant],
        baseline: str,
        options: Mapping[str, Any],
        progress: Callable[[str], object],
        rounds: Rounds,
    ) -> None:
        self.variants, self.base, self.control = variants, variants[baseline], list[Times]()
        self.options, self.progress, self.rounds = options, progress, rounds
        self.budget, self.precision = float(options["budget"]), options["precision"]
        self.longest = max(self.budget, options["longest"] or _OVERTIME * self.budget)
        # That of each interval; until the end, of one that has not looked before.
        self.confidence = statistics.bonferroni(_CONFIDENCE, len(variants) - 1)
        self.is_settled, self.looked, self.by_processor = False, 0.0, False
        self.watch, self.conditions = MachineWatch(), dict[str, Any]()

    def run(self, pool: list[Any]) -> Comparison:
        """Time all variants on the inputs of `pool` in turn, and compare them."""
        where = environment()
        for name, variant in self.variants.items():
            self.progress(f"warming up {name}")
            self._guarded(variant, partial(variant.warm_up, pool[0]))
        self._check_time()
        began = self.rounds.seconds()
        for variant in self.variants.values():
            # The same for all: a mean of several calls includes a part of every stall of the machine.
            variant.calls, variant.warm = self.base.calls, self.base.call_seconds < _WARM_BELOW
        while self._goes_on(began):
            batch = pool[self.rounds.count % len(pool)]
            for variant, samples in self.rounds.turns(self._players()):
                self._guarded(variant, partial(variant.sample, batch, samples))
            left = max(0.0, self._limit() - self.rounds.seconds())
            self.progress(f"{plural(self.rounds.count, 'round')}, at most {left:.0f} s left")
        if not self.is_settled:
            self._choose_clock()
            self.confidence = self._spending(1 - self.looked)
        return self._result(where)

    def _players(self) -> list[tuple[Variant, list[Times]]]:
        """Return who takes a turn in a round, and where its times go: the baseline twice."""
        all_of_them = [(each, each.samples) for each in self.variants.values()]
        return [each for each in (*all_of_them, (self.base, self.control)) if not each[0].reason]

    def _limit(self) -> float:
        """Return the seconds within which a round must end: more until the first look."""
        return self.budget if self.rounds.count >= _FEWEST else self.longest

    def _check_time(self) -> None:
        """Raise RefusedError if three rounds do not fit into `longest`, where the caller gave one."""
        a_round = sum(variant.call_seconds for variant, _ in self._players())
        needed = self.rounds.seconds() + _USEFUL_ROUNDS * a_round
        if self.options["longest"] and needed > self.longest:
            known = [each for each in self.variants.values() if not each.reason]
            calls = " and ".join(f"{each.call_seconds:.2g} s ({each.name})" for each in known)
            too_long = f"{_USEFUL_ROUNDS} rounds do not fit into {self.longest:.0f} s"
            raise RefusedError("budget", f"calls take about {calls}, and {too_long}", "give more")

    def _guarded(self, variant: Variant, work: Callable[[], None]) -> None:
        """Run `work` unless the variant has failed; if `work` raises, only this variant fails."""
        if variant.reason:  # the baseline may have failed a moment ago, in its other turn
            return
        try:
            work()
        except Exception as error:
            variant.reason = variant.explain(error)
        # Here the error is released, and with its traceback the tensors that it referred to.
        if variant.reason and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def _goes_on(self, began: float) -> bool:
        """Return whether another round is worth its time; `began` is when rounds began."""
        rounds = self.rounds
        if not self._players() or rounds.count >= _MAX_ROUNDS or not rounds.fits(self._limit()):
            return False
        seconds, part = rounds.seconds() - began, LOOKS.get(rounds.count)
        if part is None or seconds < _MIN_SECONDS or self.base.reason:
            return True
        self.looked += part
        self._choose_clock()
        at_look, precision = self._spending(part), self.precision
        ratios, verdicts = self._judged(at_look)
        is_clear = "unclear" not in verdicts
        if is_clear and all(each.precision <= (precision or math.inf) for each in ratios):
            self.is_settled, self.confidence = True, at_look
            return False
        if is_clear or precision is not None:
            return True
        # Whether the verdict would become clear if the same ratios came again until the end, and some more.
        more = max(self._limit() - began, seconds) / seconds
        _, later = self._judged(self._spending(1 - self.looked), again=math.ceil(1.5 * more))
        return any(a == "unclear" != b for a, b in zip(verdicts, later, strict=True))

    def _judged(self, confidence: float, again: int = 1) -> tuple[list[Estimate], list[str]]:
        """Return the ratio and the verdict of each variant but the baseline, of the rounds `again` times."""
        noise = statistics.noise(self._ratio(self.control, confidence, again))
        others = [each for each in self.variants.values() if each is not self.base]
        samples = [each.samples for each in others if not each.reason]
        ratios = [self._ratio(each, confidence, again) for each in samples]
        return ratios, [statistics.verdict(each, noise) for each in ratios]

    def _spending(self, part: float) -> float:
        """Return the confidence of intervals that spend this part of the error."""
        return 1 - (1 - self.confidence) * part

    def _choose_clock(self) -> None:
        """Follow the processor time where other programs take time from this one.

        Only of one process on a CPU: ranks that wait for each other use processor time.
        """
        self.conditions = self.watch.conditions() | {"threads": torch.get_num_threads()}
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        on_cpu = all(each.is_on_cpu for each in self.variants.values())
        self.by_processor = _FINE and alone and on_cpu and bool(disturbance(self.conditions))

    def _times(self, samples: list[Times]) -> list[float]:
        return [each.processor if self.by_processor else each.wall for each in samples]

    def _ratio(self, samples: list[Times], confidence: float, again: int = 1) -> Estimate:
        ratios = statistics.ratios(self._times(samples), self._times(self.base.samples))
        return statistics.estimate(ratios * again, confidence)

    def _result(self, where: dict[str, Any]) -> Comparison:
        control = None
        if not self.base.reason:
            aa = self._ratio(self.control, self.confidence)
            control = Control(ratio=aa.value, interval=aa.interval, noise=statistics.noise(aa))
        settings = {
            **self.options,
            "confidence_of_each": self.confidence,
            "timer": PROCESSOR if self.by_processor else "wall clock",
            **self.conditions,
        }
        return Comparison(
            rows=tuple(self._row(each, control) for each in self.variants.values()),
            baseline=self.base.name,
            aa=control,
            repeats=self.rounds.count,
            seconds=self.rounds.seconds(),
            settings=settings,
            environment=where,
            notes=tuple(self._notes(control)),
        )

    def _row(self, variant: Variant, control: Control | None) -> VariantResult:
        name, device = variant.name, str(variant.device)
        if variant.reason:
            return VariantResult(name=name, verdict="failed", device=device, reason=variant.reason)
        verdict, ratio = "not compared", None
        if variant is self.base:
            verdict, ratio = "baseline", Estimate(1.0, None)
        elif control is not None:
            ratio = self._ratio(variant.samples, self.confidence)
            verdict = statistics.verdict(ratio, control.noise)
        times = self._times(variant.samples)
        seconds = statistics.estimate(times, self.confidence)
        wall, processor = map(median, zip(*variant.samples, strict=True))
        return VariantResult(
            name=name,
            verdict=verdict,
            seconds=seconds.value,
            seconds_interval=seconds.interval,
            ratio=ratio and ratio.value,
            ratio_interval=ratio and ratio.interval,
            wall_seconds=wall,
            processor_seconds=processor,
            first_seconds=variant.first_seconds,
            device=device,
            calls=variant.calls,
            samples=tuple(times),
            reason=self._unclear(control) if verdict == "unclear" else "",
        )

    def _unclear(self, control: Control | None) -> str:
        """Return why a verdict is unclear, if it is."""
        count, needed = self.rounds.count, statistics.min_values(self.confidence)
        few = f"too few rounds, {count} of at least {needed}" if count < needed else ""
        disturbed = "" if self.by_processor else disturbance(self.conditions)
        if few or disturbed:
            return "; ".join(filter(None, (few, disturbed)))
        rounds = plural(count, "round")
        if control and control.noise and control.noise > 1 + statistics.SAME:
            return f"{self.base.name} differed from itself in these {rounds}: the machine was not steady"
        return f"the ratios of {rounds} scatter too much"

    def _notes(self, control: Control | None) -> Iterator[str]:
        """Yield what limits the result."""
        if control is None:
            return
        if control.interval and not control.interval[0] <= 1 <= control.interval[1]:
            yield "the baseline differs significantly from itself (A/A): the machine was not steady"
        if busy := busy_sentence(self.conditions, control.noise):
            yield busy
