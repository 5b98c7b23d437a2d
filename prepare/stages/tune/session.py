"""One tuning: look into the cache, else race the candidates, and record the result of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from prepare.core.forward.torch_state import Amp, device_of, isolated
from prepare.core.model.deep_copy import CopyError, copy_or_build
from prepare.core.utils.machine import MachineWatch, environment
from prepare.errors import (
    ModelError,
    PrepareError,
    Problem,
    RefusedError,
)
from prepare.pipeline.collect_wants import make_table
from prepare.pipeline.preconditions import lazy_problems, precondition_problems
from prepare.stages.bench import statistics
from prepare.stages.bench.variant import Clock, make_pool
from prepare.stages.tune.cache import Cache, age, conditions
from prepare.stages.tune.candidate_run import PreparedCandidate, capacity
from prepare.stages.tune.candidates import Candidate, calls_to_keep, candidates
from prepare.stages.tune.compare_candidates import CandidateError, CheckResult
from prepare.stages.tune.race import Race
from prepare.stages.tune.race_results import notes_on, row_of
from prepare.stages.tune.records import (
    STATUSES,
    UNPREPARED,
    StoppedTuning,
    Tuning,
)
from prepare.steps.input_format import InputFormat

if TYPE_CHECKING:
    from prepare.core.utils.text import Progress
    from prepare.stages.tune.stage import TuneStage


@dataclass(frozen=True, kw_only=True)
class TuningSession:
    """The checked arguments of one call of `tune`."""

    model: nn.Module
    batch: Any
    options: TuneStage
    mode: Literal["eval", "train"]
    amp: Amp = "none"
    declared: Mapping[str, Any] = field(default_factory=dict)
    seed: int
    progress: Progress
    clock: Clock = time.perf_counter
    build: Callable[[], nn.Module] | None = None

    def run(self) -> Tuning:
        """Return the cached tuning if its winner still passes its verification; otherwise run a race."""
        _check_model(self.model)
        with isolated():
            recipes = candidates(
                self.copied(),
                declared=self.declared,
                allow=self.options.allow,
                mode=self.mode,
                amp=self.amp,
                calls=self._calls_to_keep(),
            )
            under = conditions(self.model, self.batch, recipes, mode=self.mode, amp=self.amp)
            if self.options.calls is not None:
                under["calls"] = self.options.calls
            cache = Cache(self.options.cache)
            cached = cache.find(under, budget=self.options.budget)
            tuning = cached and self._verified_again(cached, cache)
            if not tuning:
                tuning = self._race(recipes, under)
                cache.store(tuning)
        return replace(tuning, notes=(*tuning.notes, *cache.notes))

    def _calls_to_keep(self) -> tuple[str, ...]:
        example = make_pool(self.batch, seed=self.seed)[0]
        try:
            return calls_to_keep(self.copied(), example, mode=self.mode, amp=self.amp)
        except PrepareError:
            return ()

    def copied(self) -> nn.Module:
        """Return a copy of the model without gradients, in the mode of the tuning.

        In `train`, a model that is in training mode keeps the mode of each submodule.

        Raises:
            RefusedError: the model cannot be copied.
        """
        try:
            duplicate = copy_or_build(self.model, self.build)
        except CopyError as error:
            remedy = "give build=, a function that builds an equal model"
            if self.build is not None:
                remedy = "let its code draw all numbers from torch's generator, after the same seed"
            raise RefusedError("the model", f"cannot be copied: {error}", remedy) from error
        train = self.mode == "train"
        return duplicate if train and duplicate.training else duplicate.train(train)

    def _verified_again(self, cached: Tuning, cache: Cache) -> Tuning | None:
        """Return a cached tuning if its winner is correct with the present values of the model."""
        row, winner = cached.rows[0], Candidate(cached.winner, cached.recipe)
        if winner.name != UNPREPARED:
            with self.progress(f"verifying {winner.name}, the cached winner"):
                checked = self._check_again(winner)
            if checked.status != "pass":
                cache.notes.append(
                    f"the cached winner {winner.name} was not used: {checked.reason}"
                )
                return None
            row = replace(row, error=checked.error, allowed=checked.allowed)
        again = "" if winner.name == UNPREPARED else ", and verified again"
        note = f"from the cache{again}: measured {age(cached.made)}, on {cached.made}"
        notes = (note, *cached.notes)
        return replace(cached, rows=(row, *cached.rows[1:]), from_cache=True, notes=notes)

    def _check_again(self, winner: Candidate) -> CheckResult:
        try:
            return PreparedCandidate(self, winner, self._pool(winner)).check()
        except CandidateError as error:
            return CheckResult("cannot tell", str(error))

    def _race(self, recipes: list[Candidate], under: dict[str, Any]) -> Tuning:
        began, pool, watch = self.clock(), self._pool(recipes[0]), MachineWatch()
        first: PreparedCandidate | None = None

        def start(candidate: Candidate) -> PreparedCandidate:
            nonlocal first
            runner = PreparedCandidate(self, candidate, pool, like=first)
            first = first or runner  # the unprepared model
            return runner

        def check(_: Candidate, runner: PreparedCandidate) -> CheckResult:
            return runner.check()

        race = Race(
            recipes,
            start=start,
            check=check,
            budget=self.options.budget,
            clock=self.clock,
            capacity=capacity(self.model, _device(recipes[0], self.model)),
            seed=self.seed,
            progress=self.progress,
        )
        stopped: KeyboardInterrupt | None = None
        try:
            winner = race.run()
        except CandidateError as error:
            raise ModelError("the unprepared model", str(error)) from None
        except KeyboardInterrupt as error:
            if not race.rounds.count:
                raise
            winner, stopped = race.stop(), error
        machine = watch.conditions() | {"threads": torch.get_num_threads()}
        # The winner comes first; within a status the contestants stay in the order of the candidates.
        ranked = sorted(race.contestants, key=lambda each: STATUSES.index(each.status))
        tuning = Tuning(
            rows=tuple(row_of(race, winner, each) for each in ranked),
            winner=winner.name,
            mode=self.mode,
            amp=self.amp,
            allow=self.options.allow,
            budget=self.options.budget,
            seconds=round(self.clock() - began, 3),
            rounds=race.rounds.count,
            noise=statistics.noise(race.standings.control_ratio()),
            made=datetime.now().astimezone().isoformat(timespec="seconds"),
            from_cache=False,
            conditions=under,
            environment=environment() | machine,
            notes=tuple(notes_on(race, machine)),
        )
        if stopped is not None:
            what = str(stopped) or "stopped by Ctrl-C"
            so_far = race.standings.best_text(winner)
            raise StoppedTuning(f"{what}; {so_far}", tuning) from None
        return tuning

    def _pool(self, base: Candidate) -> list[Any]:
        """Return inputs on the device of the model: no timing has their transfer."""
        to_device = InputFormat(device=str(_device(base, self.model)))
        return [to_device.format(batch) for batch in make_pool(self.batch, seed=self.seed)]


def _check_model(model: nn.Module) -> None:
    """Raise RefusedError if no candidate could be prepared, or nothing would be measured."""
    table = make_table(model, [])
    problems = [*lazy_problems(table), *precondition_problems(model, table)]
    if any(parameter.is_meta for parameter in model.parameters()):
        remedy = "build it on a device, or load it first"
        problems.append(Problem("the model", "meta holds no data, and computes nothing", remedy))
    if problems:
        raise RefusedError.of(problems)


def _device(base: Candidate, model: nn.Module) -> torch.device:
    """Return the device of all candidates: that of the step `device`, else that of the model."""
    if declared := base.steps.get("device", {}).get("device"):
        return torch.device(declared)
    return device_of([model])
