"""One tuning from its question to its answer: the cache, the race, and what is said of each candidate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from prepare.bench import statistics
from prepare.bench.input_pool import make_pool
from prepare.core.forward.torch_state import isolated
from prepare.core.utils.environment import environment
from prepare.core.utils.text import plural
from prepare.errors import ModelError, Problem, RefusedError
from prepare.pipeline.collect_wants import make_table
from prepare.pipeline.preconditions import lazy_problems, precondition_problems
from prepare.steps.input_format import InputFormat
from prepare.tune.cache import Cache, age, conditions
from prepare.tune.candidate_run import Manner, Running, capacity, copied
from prepare.tune.candidates import Candidate, candidates
from prepare.tune.contestants import Checked, Entrant, OutError
from prepare.tune.race import Race
from prepare.tune.records import STATUSES, UNPREPARED, Row, Tuning

if TYPE_CHECKING:
    from prepare.bench.variant import Clock
    from prepare.core.utils.progress import Stage
    from prepare.tune.options import TuneOptions


@dataclass(frozen=True, kw_only=True)
class Question:
    """What `tune` was asked, its arguments checked."""

    model: nn.Module
    batch: Any
    options: TuneOptions
    mode: str
    declared: Mapping[str, Any]
    seed: int
    progress: Stage
    clock: Clock

    def answer(self) -> Tuning:
        """From the cache, where the winner of then is right still; else by a race."""
        _refuse(self.model)
        with isolated():
            how = {"declared": self.declared, "allow": self.options.allow, "mode": self.mode}
            found = candidates(copied(self.model, self.mode), **how)
            asked = conditions(self.model, self.batch, found, mode=self.mode)
            cache = Cache(self.options.cache)
            kept = cache.find(asked, budget=self.options.budget)
            tuning = kept and self._again(kept, cache)
            if not tuning:
                tuning = self._raced(found, asked)
                cache.keep(tuning)
        return replace(tuning, notes=(*tuning.notes, *cache.notes))

    def _again(self, kept: Tuning, cache: Cache) -> Tuning | None:
        """What won before, if it is right with the numbers that the model holds now."""
        row, winner = kept.rows[0], Candidate(kept.winner, kept.recipe)
        if winner.name != UNPREPARED:
            with self.progress(f"verifying {winner.name}, which won before"):
                checked = self._check_again(winner)
            if checked.status != "pass":
                cache.notes.append(f"{winner.name} won before, but not now: {checked.reason}")
                return None
            row = replace(row, error=checked.error, allowed=checked.allowed)
        again = "" if winner.name == UNPREPARED else ", and verified again"
        note = f"from the cache{again}: measured {age(kept.made)}, on {kept.made}"
        notes = (note, *kept.notes)
        return replace(kept, rows=(row, *kept.rows[1:]), from_cache=True, notes=notes)

    def _check_again(self, winner: Candidate) -> Checked:
        try:
            return self._check(self._start(winner, self._pool(winner)), {})
        except OutError as error:
            return Checked("cannot tell", str(error))

    def _raced(self, found: list[Candidate], asked: dict[str, Any]) -> Tuning:
        began, pool = self.clock(), self._pool(found[0])
        manner: list[Manner] = []
        exact: dict[Any, Any] = {}

        def start(candidate: Candidate) -> Running:
            runner = self._start(candidate, pool, *manner)
            manner[:] = [runner.manner]  # that of the first, the unprepared model, for all
            return runner

        race = Race(
            found,
            start=start,
            check=lambda _, runner: self._check(runner, exact),
            budget=self.options.budget,
            clock=self.clock,
            capacity=capacity(self.model, _device(found[0], self.model)),
            seed=self.seed,
            progress=self.progress,
        )
        try:
            winner = race.run()
        except OutError as error:
            raise ModelError("the unprepared model", str(error)) from None
        control = race.control()
        known = control is not None and control.interval is not None
        return Tuning(
            rows=tuple(_row(race, winner, each) for each in _ranked(race.entrants)),
            winner=winner.name,
            mode=self.mode,
            allow=self.options.allow,
            budget=self.options.budget,
            seconds=round(self.clock() - began, 3),
            rounds=race.rounds,
            noise=statistics.noise(control) if known else None,
            made=datetime.now().astimezone().isoformat(timespec="seconds"),
            from_cache=False,
            conditions=asked,
            environment=environment(),
            notes=tuple(_notes(race)),
        )

    def _start(
        self, candidate: Candidate, pool: list[Any], manner: Manner | None = None
    ) -> Running:
        how = {"mode": self.mode, "clock": self.clock, "manner": manner}
        return Running(self.model, candidate, pool, **how)

    def _check(self, runner: Running, exact: dict[Any, Any]) -> Checked:
        return runner.check(self.model, self.batch, exact, budget=self.options.budget)

    def _pool(self, base: Candidate) -> list[Any]:
        """Inputs where the model is to run: to bring them there is no part of any candidate."""
        device = str(_device(base, self.model))
        there = InputFormat(device=device)
        return [there.format(batch) for batch in make_pool(self.batch, seed=self.seed)]


def _refuse(model: nn.Module) -> None:
    """Raises RefusedError where no candidate could be prepared, or nothing would be measured."""
    table = make_table(model, [])
    problems = [*lazy_problems(table), *precondition_problems(model, table)]
    if any(parameter.is_meta for parameter in model.parameters()):
        remedy = "build it on a device, or load it first"
        problems.append(Problem("the model", "meta holds no data, and computes nothing", remedy))
    if problems:
        raise RefusedError.of(problems)


def _device(base: Candidate, model: nn.Module) -> torch.device:
    """Where all candidates run: where the step `device` says, or else where the model lies."""
    if named := base.steps.get("device", {}).get("device"):
        return torch.device(named)
    held = (tensor for each in (model.parameters(), model.buffers()) for tensor in each)
    return next((tensor.device for tensor in held), torch.device("cpu"))


def _ranked(entrants: list[Entrant]) -> list[Entrant]:
    """The winner first, then those that came closest to it; each kind in the order it was tried."""
    return sorted(entrants, key=lambda each: STATUSES.index(each.status))


def _row(race: Race, winner: Entrant, entrant: Entrant) -> Row:
    ratio, candidate = race.ratio_by(winner, entrant), entrant.candidate
    times, checked = list(entrant.times.values()), entrant.checked
    is_base = entrant is race.entrants[0]
    return Row(
        name=candidate.name,
        steps=candidate.steps,
        status=entrant.status,
        reason=entrant.reason,
        cost=candidate.cost,
        seconds=statistics.estimate(times, 0.95).value if times else None,
        ratio=ratio.value if ratio else None,
        ratio_interval=ratio.interval if ratio else None,
        rounds=len(times),
        peak_bytes=entrant.peak,
        verified=checked.status if checked else "",
        error=0.0 if is_base else checked and checked.error,
        allowed=checked and checked.allowed,
    )


def _notes(race: Race) -> Iterator[str]:
    """What to bear in mind."""
    control, fewest = race.control(), statistics.min_values(race.confidence)
    waiting = sum(each.status == "not measured" for each in race.entrants)
    if waiting:
        yield f"{plural(waiting, 'candidate')} not measured: give more time with budget="
    if 0 < race.rounds < fewest:
        yield (
            f"{plural(race.rounds, 'round')} are too few to tell small differences, it takes "
            f"{fewest}: give more time with budget="
        )
    if control and control.interval and not control.interval[0] <= 1 <= control.interval[1]:
        yield "the unprepared model differs from itself: the machine was not steady"
