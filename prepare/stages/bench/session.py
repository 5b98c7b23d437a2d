"""One bench: warm up, run rounds until the ratios are precise or the budget is spent, and summarise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from prepare.core.utils.machine import MachineWatch, busy_sentence, disturbance, environment
from prepare.core.utils.numbers import finite
from prepare.core.utils.text import plural
from prepare.errors import RefusedError
from prepare.stages.bench import statistics
from prepare.stages.bench.records import Comparison, Control, Progress
from prepare.stages.bench.rounds import Rounds
from prepare.stages.bench.samples import SampleSet, Series
from prepare.stages.bench.variant import Clock, Variant, batch_size

_MAX_ROUNDS = 1000
# Stopping at the first narrow interval would favour intervals that are narrow by chance. So precision
# is not tested before this many rounds, and then only every few rounds.
_MIN_ROUNDS, _TEST_EVERY = 20, 5
# The rounds after which a bench may stop because its verdict is settled. To test again and again finds a
# difference by chance sooner or later; so there are few looks, and their error probabilities add up to that
# of the whole bench. Eight ratios are the fewest that have an interval at the confidence of one look.
LOOKS = (8, 16, 32, 64)
# The looks above, and the one at the end of the budget.
_LOOK_COUNT = len(LOOKS) + 1
# Seconds of timing before the first look: a stall of the machine is shorter.
_MIN_SECONDS = 1.0
# With fewer rounds than these a ratio says too little to be worth its time.
_USEFUL_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of `bench.compare`: mode, seconds, when it stops, seed, autocast."""

    train: bool
    budget: float
    within_budget: bool
    longest: float | None
    settle: bool
    precision: float
    confidence: float
    seed: int
    amp: str


class Looks:
    """The looks of one bench; each spends a fifth of the error, and the end spends what is left."""

    def __init__(self) -> None:
        self._taken, self.is_settled = 0, False

    def look(self, samples: SampleSet, rounds: int, seconds: float) -> SampleSet | None:
        """Return the samples at the confidence of a look if every verdict is settled; else None."""
        if rounds not in LOOKS or seconds < _MIN_SECONDS:
            return None
        self._taken += 1
        at_look = _spending(samples, 1 / _LOOK_COUNT)
        self.is_settled = at_look.is_settled()
        return at_look if self.is_settled else None

    def end(self, samples: SampleSet) -> SampleSet:
        """Return the samples at the confidence that the looks have left for the end of the budget."""
        return _spending(samples, 1 - self._taken / _LOOK_COUNT)


class BenchSession:
    """One bench; call `run` once."""

    def __init__(
        self,
        variants: Mapping[str, Variant],
        baseline: str,
        options: BenchOptions,
        progress: Callable[[Progress], object] | None,
        clock: Clock,
    ) -> None:
        series = {name: Series(variant) for name, variant in variants.items()}
        confidence = statistics.bonferroni(options.confidence, len(series) - 1)
        control = Series(variants[baseline])
        self._samples = SampleSet(list(series.values()), series[baseline], control, confidence)
        self._options, self._progress = options, progress
        self._rounds, self._warm = Rounds(clock, options.seed), False
        self._expected = options.budget
        self._looks = Looks() if options.settle else None

    def run(self, pool: list[Any], device: str | torch.device | None) -> Comparison:
        """Time all variants on the inputs of `pool` in turn, and compare them."""
        where, watch, base = environment(), MachineWatch(), self._samples.baseline.variant
        for series in self._samples.series:
            self._report(f"warming up {series.variant.name}")
            self._guarded(series, partial(self._first_call, series.variant, pool[0], device))
            self._check_time(series, rounds=0)
            self._guarded(series, partial(series.variant.warm_up, pool[0], self._rounds.clock))
            self._check_time(series, rounds=_USEFUL_ROUNDS)
        self._run_rounds(pool)
        items, control_result = batch_size(pool[0]), self._samples.control_result()
        conditions = watch.conditions() | {
            "threads": torch.get_num_threads(),
            "interop_threads": torch.get_num_interop_threads(),
        }
        settings = asdict(self._options) | {
            "confidence_of_each": self._samples.confidence,
            "batch_size": items,
            "untimed_call_first": self._warm,
            "timer": base.timer,
        }
        return Comparison(
            rows=tuple(self._samples.rows(items, self._unclear(control_result, conditions))),
            baseline=base.name,
            aa=control_result,
            repeats=self._rounds.count,
            seconds=self._rounds.seconds(),
            settings=settings | conditions,
            environment=where,
            notes=tuple(self._notes(control_result, settings | conditions)),
        )

    def _first_call(self, variant: Variant, batch: Any, device: str | torch.device | None) -> None:
        _check_place(variant.find_device(batch), device)
        variant.first_call(batch, self._rounds.clock)

    def _check_time(self, series: Series, *, rounds: int) -> None:
        """Raise RefusedError if the budget must be kept and does not hold that many rounds.

        Variants that have not run yet are assumed to be as slow as this one.
        """
        call = series.variant.call_seconds
        of_round = sum(each.variant.call_seconds or call for each in self._samples.active())
        needed = self._rounds.seconds() + 2 * call + rounds * of_round
        if self._options.within_budget and not series.reason and needed > self._limit():
            known = [each.variant for each in self._samples.series if each.variant.call_seconds]
            calls = " and ".join(f"{each.call_seconds:.2g} s ({each.name})" for each in known)
            measured = f"{'calls take' if rounds else 'first calls took'} about {calls}"
            too_long = f"{_USEFUL_ROUNDS} rounds do not fit into {self._limit():.0f} s"
            raise RefusedError("budget", f"{measured}, and {too_long}", "give more time")

    def _run_rounds(self, pool: list[Any]) -> None:
        rounds, base = self._rounds, self._samples.baseline.variant
        variants = [each.variant for each in self._samples.active()]
        needed = sum(each.call_seconds for each in variants) * (base.calls + 1)
        fewest = LOOKS[0] if self._looks else _MIN_ROUNDS
        begin = rounds.seconds()
        self._warm = begin + fewest * needed <= self._options.budget
        self._expected = min(self._limit(), max(self._options.budget, begin + fewest * needed))
        for each in variants:
            # The same for all: a mean of several calls includes a part of every stall of the machine,
            # a single call usually none.
            each.calls, each.warm = base.calls, self._warm
        while rounds.count < _MAX_ROUNDS and not self._is_done(begin):
            if not rounds.fits(self._limit()):
                break
            batch = pool[rounds.count % len(pool)]
            for series in rounds.turns(self._samples.active()):
                self._guarded(series, partial(self._sample, series, batch))
            self._report("timing")
        if self._looks and not self._looks.is_settled:
            self._samples = self._looks.end(self._samples)

    def _limit(self) -> float:
        """Return the seconds within which a round must end: more until the first look, if that is allowed."""
        budget, longest = self._options.budget, self._options.longest or 0.0
        return max(budget, longest) if self._looks and self._rounds.count < LOOKS[0] else budget

    def _sample(self, series: Series, batch: Any) -> None:
        series.samples.append(series.variant.sample(batch, self._rounds.clock))

    def _guarded(self, series: Series, work: Callable[[], None]) -> None:
        """Run `work` unless the variant has failed; if `work` raises, only this variant fails."""
        if series.reason:  # the baseline may have failed a moment ago, in its other series
            return
        try:
            work()
        except Exception as error:
            self._samples.drop(series.variant, series.variant.explain(error))
        # Here the error is released, and with its traceback the tensors that it referred to.
        if series.reason and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _is_done(self, begin: float) -> bool:
        """Return whether the verdicts are settled, or the ratios precise; `begin` is when rounds began."""
        if not self._samples.active():
            return True
        if self._looks:
            rounds, seconds = self._rounds.count, self._rounds.seconds() - begin
            settled = self._looks.look(self._samples, rounds, seconds)
            self._samples = settled or self._samples
            return settled is not None
        if self._rounds.count < _MIN_ROUNDS or self._rounds.count % _TEST_EVERY:
            return False
        return self._samples.precision() <= self._options.precision

    def _report(self, doing: str) -> None:
        if self._progress is None:
            return
        count, seconds = self._rounds.count, self._rounds.seconds()
        precision = finite(self._samples.precision()) if count else None
        self._progress(Progress(doing, count, seconds, self._expected, precision))

    def _notes(self, control: Control | None, settings: Mapping[str, Any]) -> Iterator[str]:
        """Yield what limits the result."""
        if not self._samples.active():
            return
        precision, count = self._samples.precision(), self._rounds.count
        needed = statistics.min_values(self._samples.confidence)
        if count < needed:
            yield (
                f"too few rounds to conclude anything: {plural(count, 'round')}, and an interval "
                f"needs {needed}; give it more time"
            )
        elif precision > self._options.precision and not (self._looks and self._looks.is_settled):
            yield (
                f"the ratios are known to ±{precision:.1%}, not to ±{self._options.precision:.1%}: "
                "give it more time, or a quieter machine"
            )
        if control and control.interval and not control.interval[0] <= 1 <= control.interval[1]:
            yield "the baseline differs significantly from itself (A/A): the machine was not steady"
        if not self._warm:
            yield "no untimed call before each timed one: the budget is too short for it"
        for series in self._samples.series:
            if text := self._samples.repeats(series):
                yield f"{series.variant.name}: {text}"
        if busy := busy_sentence(settings, control.noise if control else None):
            yield busy

    def _unclear(self, control: Control | None, conditions: Mapping[str, Any]) -> str:
        """Return why a verdict is unclear, if it is."""
        needed, count = statistics.min_values(self._samples.confidence), self._rounds.count
        disturbed = disturbance(conditions)
        if count < needed:
            few = f"too few rounds, {count} of at least {needed}"
            return f"{few}; {disturbed}" if disturbed else few
        if disturbed:
            return disturbed
        if control and control.noise and control.noise > 1 + self._options.precision:
            return (
                f"{self._samples.baseline.variant.name} differed from itself in these "
                f"{plural(count, 'round')}: the machine was not steady"
            )
        return f"the ratios of {plural(count, 'round')} scatter too much"


def _check_place(actual: torch.device, required: str | torch.device | None) -> None:
    """Raise RefusedError if a variant is on meta, or not on the required device."""
    expected = None if required is None else torch.device(required)
    if actual.type == "meta":
        raise RefusedError("its device", "meta computes nothing", "give the tensors values")
    if expected and (actual.type != expected.type or expected.index not in (None, actual.index)):
        raise RefusedError("its device", f"it is on {actual}, not on {expected}", "move it there")


def _spending(samples: SampleSet, part: float) -> SampleSet:
    """Return the samples with intervals that spend this part of the error probability."""
    return replace(samples, confidence=1 - (1 - samples.confidence) * part)
