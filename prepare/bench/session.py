"""Runs a bench: warms up, goes in rounds until the ratios are precise or the time is spent, sums up."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from prepare.bench import statistics as intervals
from prepare.bench.input_pool import batch_size
from prepare.bench.peak_memory import seconds_of_page
from prepare.bench.records import Comparison, Control, Progress
from prepare.bench.samples import Field, Lane
from prepare.core.utils.environment import environment
from prepare.errors import RefusedError

if TYPE_CHECKING:
    from prepare.bench.variant import Clock, Variant

# Seconds: shorter calls are timed several in a row, else the clock itself would be seen.
_TURN = 0.005
_MOST_CALLS, _MOST_ROUNDS = 1000, 1000
# To stop at the first narrow interval would favour those that are narrow by chance: so not before
# this many rounds, and asked only now and then.
_FEWEST_ROUNDS, _ASKED_EVERY = 20, 5
# With fewer rounds than these a ratio says too little to wait for it.
_WORTH_IT = 3
# So much of the baseline's time in fresh memory is worth a word; fewer pages in a call are not looked at.
_NOTABLE, _MANY_PAGES = 0.1, 1000


@dataclass(frozen=True, slots=True)
class Goal:
    """What is timed, how long that may take, how precise it is to be, and the seed of what is random."""

    train: bool
    budget: float
    within_budget: bool
    precision: float
    confidence: float
    seed: int


class Session:
    """One bench. `run` gives what it found, and is called once."""

    def __init__(
        self,
        variants: Mapping[str, Variant],
        baseline: str,
        goal: Goal,
        progress: Callable[[Progress], None] | None,
        clock: Clock,
    ) -> None:
        lanes = {name: Lane(variant) for name, variant in variants.items()}
        confidence = intervals.each_of(goal.confidence, len(lanes) - 1)
        again = Lane(variants[baseline])
        self._field = Field(list(lanes.values()), lanes[baseline], again, confidence)
        self._goal, self._progress, self._clock = goal, progress, clock
        self._start, self._rounds, self._settle, self._memory = clock(), 0, False, ""

    def run(self, pool: list[Any], device: str | torch.device | None) -> Comparison:
        """Times all of them on the inputs of `pool` in turn."""
        where, conditions = environment(), _conditions()
        for lane in self._field.lanes:
            self._tell(f"warming up {lane.variant.name}")
            self._guarded(lane, lambda lane=lane: self._first_call(lane, pool[0], device))
            self._check_time(lane, rounds=0)
            self._guarded(lane, lambda lane=lane: self._warm_up(lane, pool[0]))
            self._check_time(lane, rounds=_WORTH_IT)
        base, again = self._field.baseline, self._field.again
        again.device, again.seconds = base.device, base.seconds
        for lane in (*self._field.lanes, again):
            # For all of them alike: the mean of several calls takes part of every stall of the machine,
            # the time of a single one mostly none.
            lane.calls = base.calls
        self._go_in_rounds(pool)
        items, control = batch_size(pool[0]), self._field.control()
        settings = asdict(self._goal) | {
            "confidence_of_each": self._field.confidence,
            "batch_size": items,
            "untimed_call_first": self._settle,
            "timer": "CUDA events" if base.device.type == "cuda" else "wall clock",
            "memory": self._memory or None,
            "fresh_memory": self._fresh_memory(),
        }
        return Comparison(
            rows=tuple(self._field.rows(items)),
            baseline=base.variant.name,
            aa=control,
            repeats=self._rounds,
            seconds=self._elapsed(),
            settings=settings | conditions,
            environment=where,
            notes=tuple(self._notes(control, settings | conditions)),
        )

    def _first_call(self, lane: Lane, batch: Any, device: str | torch.device | None) -> None:
        lane.device = lane.variant.device(batch)
        _check_place(lane, device)
        lane.seconds = self._timed(lane, batch)

    def _warm_up(self, lane: Lane, batch: Any) -> None:
        """Two calls more: compilers, searches for algorithms and pools of memory are done by then."""
        lane.seconds = self._timed(lane, batch)
        lane.calls = math.ceil(_TURN / max(lane.seconds, _TURN / _MOST_CALLS))
        lane.peak, found = lane.variant.peak(batch, lane.device)
        self._memory = found or self._memory

    def _check_time(self, lane: Lane, *, rounds: int) -> None:
        """Raises RefusedError where the budget is to be kept, and does not hold so many rounds.

        Lanes that have not run yet are taken to be as slow as this one.
        """
        goal = self._goal
        a_round = sum(each.seconds or lane.seconds for each in self._field.running())
        needed = self._elapsed() + 2 * lane.seconds + rounds * a_round
        if goal.within_budget and not lane.reason and needed > goal.budget:
            known = {each.variant.name: each.seconds for each in self._field.lanes if each.seconds}
            calls = " and ".join(f"{seconds:.2g} s ({name})" for name, seconds in known.items())
            took = "calls take" if rounds else "first calls took"
            wrong = f"{took} about {calls}, and {_WORTH_IT} rounds do not fit"
            raise RefusedError("budget", f"{wrong} into {goal.budget:.0f} s", "give more time")

    def _go_in_rounds(self, pool: list[Any]) -> None:
        order, budget = random.Random(self._goal.seed), self._goal.budget  # noqa: S311
        needed = sum(lane.seconds * (lane.calls + 1) for lane in self._field.running())
        self._settle = self._elapsed() + _FEWEST_ROUNDS * needed <= budget
        took = 0.0
        while self._rounds < _MOST_ROUNDS and not self._is_precise():
            began = self._elapsed()
            if self._rounds and began + took > budget:
                break
            running = self._field.running()
            batch = pool[self._rounds % len(pool)]
            for lane in order.sample(running, len(running)):
                self._guarded(lane, lambda lane=lane, batch=batch: self._turn(lane, batch))
            self._rounds += 1
            took = self._elapsed() - began
            self._tell("timing")

    def _turn(self, lane: Lane, batch: Any) -> None:
        lane.samples.append(self._timed(lane, batch, calls=lane.calls, settle=self._settle))
        lane.pages.append(lane.variant.pages)

    def _timed(self, lane: Lane, batch: Any, *, calls: int = 1, settle: bool = False) -> float:
        return lane.variant.timed(
            batch, calls=calls, settle=settle, device=lane.device, clock=self._clock
        )

    def _guarded(self, lane: Lane, work: Callable[[], None]) -> None:
        """Runs `work` unless the variant is out; if it raises, it is, and the others go on."""
        if lane.reason:  # the baseline may have gone out a moment ago, in its other lane
            return
        try:
            work()
        except Exception as error:
            self._field.out(lane.variant, lane.variant.explain(error))
        # Here the error is gone, and with its traceback the tensors that it held.
        if lane.reason and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _is_precise(self) -> bool:
        if not self._field.running():
            return True
        if self._rounds < _FEWEST_ROUNDS or self._rounds % _ASKED_EVERY:
            return False
        return self._field.precision() <= self._goal.precision

    def _fresh_memory(self) -> float | None:
        """Which part of the baseline's time goes, about, into memory that it frees and takes anew."""
        base = self._field.baseline
        if not base.samples or base.device.type != "cpu":
            return None
        pages, seconds = median(base.pages), median(base.samples)
        if pages < _MANY_PAGES or not seconds:
            return 0.0
        return round(min(1.0, pages * seconds_of_page() / seconds), 3)

    def _elapsed(self) -> float:
        return self._clock() - self._start

    def _tell(self, doing: str) -> None:
        if self._progress is not None:
            precision = self._field.precision() if self._rounds else math.inf
            self._progress(
                Progress(
                    doing=doing,
                    rounds=self._rounds,
                    seconds=self._elapsed(),
                    budget=self._goal.budget,
                    precision=precision if math.isfinite(precision) else None,
                )
            )

    def _notes(self, control: Control | None, settings: Mapping[str, Any]) -> Iterator[str]:
        """What to bear in mind."""
        precision, fewest = self._field.precision(), intervals.fewest(self._field.confidence)
        load, cores = settings["load_before"], settings["cores_available"]
        if not self._field.running():
            return
        if self._rounds < fewest:
            yield (
                f"{self._rounds} rounds are too few to conclude anything, it takes {fewest}: "
                "give it more time"
            )
        elif precision > self._goal.precision:
            yield (
                f"the ratios are known to ±{precision:.1%}, not to ±{self._goal.precision:.1%}: "
                "give it more time, or a quieter machine"
            )
        if control and control.interval and not control.interval[0] <= 1 <= control.interval[1]:
            yield "the baseline differs from itself: the machine was not steady"
        if not self._settle:
            yield "no untimed call before each timed one: there was no time for it"
        if (fresh := settings["fresh_memory"]) and fresh >= _NOTABLE:
            yield (
                f"about {fresh:.0%} of the baseline's time goes into memory that it gives back to the system "
                "and takes anew, which may change from one process to the next: see docs/timing.md"
            )
        if load is not None and load >= cores:
            yield f"the machine was busy before: load {load:.1f} on {cores} cores"


def _check_place(lane: Lane, device: str | torch.device | None) -> None:
    """Raises RefusedError where a variant lies where nothing is computed, or elsewhere than wanted."""
    here, wanted = lane.device, None if device is None else torch.device(device)
    if here.type == "meta":
        raise RefusedError("its device", "meta computes nothing", "give the tensors values")
    if wanted and (here.type != wanted.type or wanted.index not in (None, here.index)):
        raise RefusedError("its device", f"it lies on {here}, not on {wanted}", "move it there")


def _conditions() -> dict[str, Any]:
    """What sways timings and is not in the environment: a launcher's neighbours show in the load."""
    known = hasattr(os, "sched_getaffinity")
    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cores_available": len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1,
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }
