"""Tune a model: screen the candidates, verify the fastest, and compare them with the unprepared model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from prepare.core.forward.torch_state import Amp, device_of, isolated, read_amp
from prepare.core.model.devices import free_memory
from prepare.core.model.module_tree import CopyError, copy_or_build
from prepare.core.utils.process_state import ignored_warnings
from prepare.core.utils.suggest import choose
from prepare.core.utils.text import first_line, plural, speed_text
from prepare.errors import ModelError, Problem, RefusedError, raise_problems
from prepare.pipeline import Pipeline
from prepare.pipeline.apply import lazy_problems, precondition_problems
from prepare.pipeline.distributed import on_rank_zero
from prepare.pipeline.tensor_table import make_table
from prepare.stages.bench.compare_variants import compare
from prepare.stages.tune.candidates import Candidate, candidates
from prepare.stages.tune.records import UNPREPARED, CandidateResult, Tuning
from prepare.stages.tune.stage import TuneStage
from prepare.stages.verify import verify
from prepare.stages.verify.runs import user_formatter

if TYPE_CHECKING:
    from torch import nn

    from prepare.core.utils.text import Progress
    from prepare.stages.bench.records import Comparison

# The part of the time for the first look, with a compiler and without.
_SCREEN = {True: 0.7, False: 0.4}
# So many recipes are timed together, first a few, as it is not known how long a call takes.
_GROUP, _FIRST_GROUP = 6, 2
# Calls of each recipe in the first look: three before the rounds, and eight rounds.
_CALLS = 11
# The finalists: right, and not slower than the best one by more than this factor.
_FINALISTS, _NEAR = 4, 1.15
# The verdicts of a first look with which a recipe may be faster.
_HOPEFUL = ("faster", "unclear")
# Of recipes that are as fast as the fastest up to this factor, the simplest wins.
_SAME = 1.02
# The precision of the last comparison.
_PRECISION = 0.01
# What a row takes from a comparison.
_FIGURES = ("verdict", "seconds", "ratio", "ratio_interval")
_LATE = "no time was left to try it; give it more with tune.budget"
# The seconds that a verification may take at least, and the part of the free memory for copies.
_VERIFY, _MEMORY = 30.0, 0.5


def tune(
    model: nn.Module,
    batch: Any,
    *,
    allow: Iterable[str] = (),
    mode: Literal["eval", "train"] = "eval",
    amp: Amp = "none",
    budget: float = 60.0,
    declared: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: Progress = lambda _: nullcontext(),
    build: Callable[[], nn.Module] | None = None,
) -> Tuning:
    """Time recipes on copies of `model`, and return the fastest one that is right; `model` is not changed.

    All recipes get a first look, in groups that are timed with the unprepared model (see
    `prepare.stages.bench`). The fastest are verified (see `prepare.verify`), until four are right. These are
    timed against the unprepared model in one last comparison. Of those that are `faster` in it, the simplest
    within 2 % of the fastest wins (see `prepare.stages.tune.candidates`); if none is, the unprepared model.

    Args:
        model: on the device where it will run, not compiled and not wrapped (DDP).
        batch: a tensor, a tuple of positional arguments, a mapping of named arguments, or an Example.
        allow: what may be tried besides float32 without a compiler: `bfloat16`, `half`, `compile`
            (inductor; in `eval` also with freezing).
        mode: `eval` times the forward and verifies outputs; `train` times forward and backward, and
            verifies gradients as well.
        amp: run the forward of every candidate under `torch.autocast` to this dtype.
        budget: seconds. A compilation, a verification or a round that has begun is finished.
        declared: a pipeline of your own, as one more candidate; all candidates run on its `device`.
        seed: seed of the order and of the inputs.
        progress: called with a description of each stage; the context manager that it returns is
            entered for the duration of the stage.
        build: a function that builds an equal model, for a model that cannot be copied.

    If torch.distributed is initialised, rank 0 tunes, and every rank returns its result.

    Raises:
        ConfigError: an argument is invalid; one problem for each.
        RefusedError: `mode` or `amp` is unknown, or the model cannot be copied or prepared in its present
            state.
        ModelError: the unprepared model itself does not run.

    Examples:
        >>> from torch import nn, randn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        >>> tuning = tune(model, randn(1, 3, 32, 32), budget=2.0)
        >>> tuning.winner in {row.name for row in tuning.rows}
        True
        >>> prepared = tuning.pipeline.apply(model)
    """
    if mode not in ("eval", "train"):
        raise RefusedError("mode", f"{mode!r} is not a mode", choose(mode, ("eval", "train")))
    given = {"allow": allow if isinstance(allow, str) else list(allow), "budget": budget}
    options, amp = TuneStage.from_options(given, {"mode": mode}), read_amp(amp)
    declared = dict(declared or {})
    tuner = _Tuner(model, batch, options, mode, amp, declared, seed, progress, build)
    return on_rank_zero(tuner.run)


@dataclass
class _Tuner:
    """The checked arguments of one call of `tune`, and a row for each candidate; call `run` once."""

    model: nn.Module
    batch: Any
    options: TuneStage
    mode: Literal["eval", "train"]
    amp: Amp
    declared: Mapping[str, Any]
    seed: int
    progress: Progress
    build: Callable[[], nn.Module] | None
    compiled: dict[str, tuple[nn.Module, Pipeline]] = field(default_factory=dict)

    def run(self) -> Tuning:
        """Return the winner and a row for each candidate."""
        _check_model(self.model)
        self.began, self.part = time.perf_counter(), _SCREEN["compile" in self.options.allow]
        how: Any = {"mode": self.mode, "amp": self.amp, "declared": self.declared}
        with isolated(), ignored_warnings():
            recipes = candidates(self._copied(), allow=self.options.allow, **how)
            self.base, *others = recipes
            self.rows = {
                each.name: CandidateResult(
                    name=each.name,
                    steps=each.steps,
                    status="not measured",
                    reason=_LATE,
                    cost=each.cost,
                )
                for each in recipes
            }
            to_device = Pipeline.from_config({**self.base.steps, "input_format": {}})
            self.on_device = to_device.format(self.batch)
            last = self._screen(others)
            if finalists := self._verified(others):
                last = self._last(finalists)
        if not any(row.status == "winner" for row in self.rows.values()):
            reason = "no recipe was shown to be right and faster"
            self._set(self.base, status="winner", reason=reason)
        rows = sorted(self.rows.values(), key=lambda row: row.status != "winner")
        passed = round(time.perf_counter() - self.began, 3)
        return Tuning(rows=tuple(rows), winner=rows[0].name, seconds=passed, last=last)

    def _set(self, recipe: Candidate, **found: Any) -> None:
        self.rows[recipe.name] = replace(self.rows[recipe.name], **found)

    def _copied(self) -> nn.Module:
        """Return a copy of the model in the mode of the tuning; one in training keeps its frozen parts."""
        try:
            duplicate = copy_or_build(self.model, self.build)
        except CopyError as error:
            remedy = "set seed=, or give build=, so that a second model is equal"
            raise RefusedError("the model", f"cannot be copied: {error}", remedy) from error
        train = self.mode == "train"
        return duplicate if train and duplicate.training else duplicate.train(train)

    def _prepared(self, recipe: Candidate) -> tuple[nn.Module, Pipeline] | None:
        """Return a copy prepared by a recipe, and its pipeline; None, with a row, if that fails."""
        if recipe.name in self.compiled:
            return self.compiled[recipe.name]
        copied = self._copied()
        # In training a known issue would make wrong gradients.
        known: Any = "error" if self.mode == "train" else "ignore"
        try:
            pipeline = Pipeline.from_config(recipe.steps)
            pair = pipeline.apply(copied, known_issues=known, amp=self.amp), pipeline
        except Exception as error:
            self._set(recipe, status="failed", reason=first_line(error) or type(error).__name__)
            return None
        if "compile" in recipe.steps:
            self.compiled[recipe.name] = pair
        return pair

    def _compare(
        self, chosen: list[Candidate], seconds: float, precision: float | None
    ) -> Comparison:
        """Time the recipes against the unprepared model, and note what was found."""
        tried = [self.base, *chosen]
        made = {each.name: pair for each in tried if (pair := self._prepared(each))}
        formats = {name: user_formatter(pipeline) for name, (_, pipeline) in made.items()}
        found = compare(
            {name: model for name, (model, _) in made.items()},
            self.on_device,
            train=self.mode == "train",
            amp=self.amp,
            budget=seconds,
            precision=precision,
            seed=self.seed,
            format={name: each for name, each in formats.items() if each},
        )
        for recipe in (each for each in tried if each.name in made):
            row = found.row(recipe.name)
            status, reason = "dropped", f"dropped after {plural(found.repeats, 'round')}"
            if row.verdict == "failed":
                status, reason = "failed", row.reason
            figures = {name: getattr(row, name) for name in _FIGURES}
            self._set(recipe, status=status, reason=reason, rounds=len(row.samples), **figures)
        if found.row(UNPREPARED).verdict == "failed":
            raise ModelError("the unprepared model", found.row(UNPREPARED).reason)
        self._set(self.base, status="timed", reason="the model as it is")
        return found

    def _screen(self, waiting: list[Candidate]) -> Comparison:
        """Time all recipes for a while, in groups; return the last of these comparisons."""
        # Each copy has gradients, and a copy to restore it.
        size = 3 * sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers()))
        free = free_memory(device_of([self.model]))
        fit = _GROUP if free is None else int(_MEMORY * free / max(1, size)) - 1
        found, count = None, _FIRST_GROUP
        while found is None or (waiting and count > 0):
            count = 1 if waiting and "compile" in waiting[0].steps else max(1, min(count, fit))
            group, rest = waiting[:count], waiting[count:]
            left = self.began + self.part * self.options.budget - time.perf_counter()
            with self.progress(f"timing {', '.join(each.name for each in group)}{self._state()}"):
                found = self._compare(
                    group, max(0.1, left * len(group) / max(1, len(waiting))), None
                )
            left = self.began + self.part * self.options.budget - time.perf_counter()
            waiting, call = rest, found.row(UNPREPARED).wall_seconds or 1e-9
            count = min(_GROUP, int(left / (_CALLS * call)) - 2)
        return found

    def _verified(self, recipes: list[Candidate]) -> list[Candidate]:
        """Return the fastest recipes that are right, at most four, but those shown to be no faster."""
        known = {each.name: self.rows[each.name] for each in recipes}
        ratio = {n: row.ratio for n, row in known.items() if row.ratio and row.verdict in _HOPEFUL}
        finalists: list[Candidate] = []
        for recipe in sorted((r for r in recipes if r.name in ratio), key=lambda r: ratio[r.name]):
            best = ratio[(finalists or [recipe])[0].name]
            if len(finalists) == _FINALISTS or ratio[recipe.name] >= min(1.0, _NEAR * best):
                break
            with self.progress(f"verifying {recipe.name}{self._state()}"):
                if self._is_right(recipe):
                    finalists.append(recipe)
        return finalists

    def _is_right(self, recipe: Candidate) -> bool:
        if (pair := self._prepared(recipe)) is None:
            return False
        how: Any = {"mode": self.mode, "amp": self.amp, "pipeline": pair[1]}
        try:
            limit = max(_VERIFY, self.options.budget)
            found = verify(self.model, pair[0], self.batch, seconds=limit, **how)
        except Exception as error:  # out of memory, or what no check anticipates
            reason = f"its verification raised {type(error).__name__}: {first_line(error)}"
            self._set(recipe, status="cannot tell", reason=reason)
            return False
        checks = [
            each for each in found.checks if each.what == "outputs" and each.error is not None
        ]
        if checks:
            worst = max(checks, key=lambda each: each.error or 0.0)
            self._set(recipe, error=worst.error, allowed=worst.allowed)
        self._set(recipe, verified=found.status)
        if found.status != "pass":
            status = "wrong" if found.status == "fail" else "cannot tell"
            self._set(recipe, status=status, reason=f"its verification: {found.reason}")
        return found.status == "pass"

    def _last(self, finalists: list[Candidate]) -> Comparison:
        """Compare the finalists with the unprepared model, and choose the winner."""
        names = ", ".join(each.name for each in finalists)
        with self.progress(f"timing {names} against the unprepared model{self._state()}"):
            # The first look may have used its part, and the verifications are not counted.
            found = self._compare(finalists, (1 - self.part) * self.options.budget, _PRECISION)
        rows = [self.rows[each.name] for each in finalists]
        ratios = {row.name: row.ratio or 1.0 for row in rows if row.verdict == "faster"}
        limit = _SAME * min(ratios.values(), default=1.0)
        near = [(row.cost, row.ratio, row.name) for row in rows if ratios.get(row.name, 2) <= limit]
        winner = min(near, default=(0, 1.0, UNPREPARED))[-1]
        for recipe, row in zip(finalists, rows, strict=True):
            reason = f"{winner} is faster" if row.name in ratios else "not shown to be faster"
            if ratios.get(row.name, 2) <= limit:
                reason = f"{winner} is as fast, and simpler"
            if row.name == winner:
                word = "faster" if (row.ratio or 1.0) < 1 else "slower"
                pace = speed_text(word, row.ratio or 1.0, row.ratio_interval)
                reason = f"{pace} than the unprepared model"
            if row.status != "failed":
                self._set(recipe, status="winner" if row.name == winner else "timed", reason=reason)
        return found

    def _state(self) -> str:
        left = self.began + self.options.budget - time.perf_counter()
        return f"; {max(0.0, left):.0f} s left"


def _check_model(model: nn.Module) -> None:
    """Raise RefusedError if no candidate could be prepared, or nothing would be measured."""
    table = make_table(model, [])
    problems = [*lazy_problems(table), *precondition_problems(model, table)]
    if any(parameter.is_meta for parameter in model.parameters()):
        remedy = "build it on a device, or load it first"
        problems.append(Problem("the model", "meta holds no data, and computes nothing", remedy))
    raise_problems(RefusedError, problems)
