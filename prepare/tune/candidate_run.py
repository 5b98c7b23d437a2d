"""One candidate on a copy of the model: prepare it, time it, and verify it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from prepare.bench.samples import Series
from prepare.bench.variant import Variant
from prepare.core.model.deep_copy import CopyError, copy_or_build
from prepare.core.model.free_memory import free_memory
from prepare.core.utils.process_state import ignored_warnings
from prepare.core.utils.text import first_line, size
from prepare.errors import PrepareError, RefusedError
from prepare.pipeline import Pipeline
from prepare.tune.compare_candidates import CandidateError, CheckResult
from prepare.verify.check_model import check_model
from prepare.verify.inputs import user_formatter

if TYPE_CHECKING:
    from prepare.bench.variant import Clock
    from prepare.core.forward.autocast import Amp
    from prepare.pipeline.known_issue_checks import KnownIssues
    from prepare.tune.candidates import Candidate
    from prepare.verify.metric import Limit

Mode = Literal["eval", "train"]
# Seconds: longer calls need no untimed call first: the state of the caches matters less.
_WARM_BELOW = 0.05
# A verification may use half of the free memory and as many seconds as the tuning, but at least these.
_MIN_CHECK_MEMORY, _MIN_CHECK_SECONDS, _MEMORY_PART = 4 * 2**30, 30.0, 0.5


class PreparedCandidate:
    """A copy of `model`, prepared by a candidate; `turn` times it on one of the inputs in `pool`.

    With `like`, a turn times as many calls in a row as one of that candidate.

    Raises:
        CandidateError: the candidate cannot be prepared, or does not run.
    """

    def __init__(
        self,
        model: nn.Module,
        candidate: Candidate,
        pool: list[Any],
        *,
        mode: Mode,
        amp: Amp = "none",
        limit: Limit | None = None,
        max_memory: int | None = None,
        calls: int | None = None,
        clock: Clock,
        like: PreparedCandidate | None = None,
        build: Callable[[], nn.Module] | None = None,
    ) -> None:
        self._mode, self._pool, self._clock, self._amp = mode, pool, clock, amp
        self._limit, self._calls = limit, calls
        with _as_candidate_error(None), ignored_warnings():
            self.pipeline = Pipeline.from_config(candidate.steps)
            self.model = copy_model(model, mode, build)
            # In training a known issue would make wrong gradients.
            known_issues: KnownIssues = "error" if mode == "train" else "ignore"
            self.pipeline.apply(self.model, known_issues=known_issues, amp=amp)
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        formatter, train = user_formatter(self.pipeline), mode == "train"
        self._variant = Variant(
            candidate.name, self.model, formatter=formatter, train=train, amp=amp
        )
        self._series = Series(self._variant)
        with _as_candidate_error(self._variant), ignored_warnings():
            self._warm_up(like)
        if max_memory is not None and (self.peak or 0) > max_memory:
            reason = f"a call needs {size(self.peak or 0)}, and max_memory is {size(max_memory)}"
            raise CandidateError(reason)

    def turn(self, number: int) -> float:
        """Return the seconds of one call, with its share of the first one if the number of calls is known."""
        share = self.first_seconds / self._calls if self._calls else 0.0
        with _as_candidate_error(self._variant):
            return share + self._series.sample(self._pool[number % len(self._pool)], self._clock)

    def check(
        self, reference: nn.Module, batch: Any, exact: dict[Any, Any], *, budget: float
    ) -> CheckResult:
        """Verify the prepared copy, with its buffers as they were before it was timed.

        `exact` caches results of the reference for the next candidate. `budget` is that of the tuning.
        """
        with torch.no_grad():
            for buffer, values in self._buffers:
                buffer.copy_(values)
        free = free_memory(torch.device("cpu")) or 0
        try:
            with ignored_warnings():
                verification = check_model(
                    reference,
                    self.model,
                    batch,
                    pipeline=self.pipeline,
                    mode=self._mode,
                    gradients=self._mode == "train",
                    seconds=max(_MIN_CHECK_SECONDS, budget),
                    memory=max(_MIN_CHECK_MEMORY, int(_MEMORY_PART * free)),
                    exact_runs=exact,
                    amp=self._amp,
                    limit=self._limit,
                )
        except Exception as error:  # out of memory, or a candidate that no check anticipates
            reason = f"it raised {type(error).__name__}: {first_line(error)}"
            return CheckResult("cannot tell", reason)
        outputs = [check for check in verification.checks if check.what == "outputs"]
        worst = max(outputs, key=lambda check: check.error or 0.0, default=None)
        figures = (worst.error, worst.allowed) if worst else ()
        return CheckResult(verification.status, verification.reason, *figures)

    def _warm_up(self, like: PreparedCandidate | None) -> None:
        series, first = self._series, self._pool[0]
        series.device = self._variant.device(first)
        self.first_seconds = series.first_call(first, self._clock)
        series.warm_up(first, self._clock)
        series.warm = series.call_seconds < _WARM_BELOW
        if like is not None:
            series.like(like._series)
        self.peak, self.seconds = series.peak, series.call_seconds * (series.calls + series.warm)


def copy_model(
    model: nn.Module, mode: str, build: Callable[[], nn.Module] | None = None
) -> nn.Module:
    """Return a copy without gradients, in the given mode.

    In `train`, a model that is in training mode keeps the mode of each submodule.

    Raises:
        RefusedError: the model cannot be copied.
    """
    try:
        duplicate = copy_or_build(model, build)
    except CopyError as error:
        remedy = "give build=, a function that builds an equal model"
        if build is not None:
            remedy = "let its code draw all numbers from torch's generator, after the same seed"
        raise RefusedError("the model", f"cannot be copied: {error}", remedy) from error
    train = mode == "train"
    return duplicate if train and duplicate.training else duplicate.train(train)


def capacity(model: nn.Module, device: torch.device) -> int:
    """Return how many copies, each with gradients, fit into half of the free memory."""
    size = sum(t.nbytes for each in (model.parameters(), model.buffers()) for t in each)
    free = free_memory(device)
    return 1000 if free is None else int(_MEMORY_PART * free / max(1, 2 * size))


@contextlib.contextmanager
def _as_candidate_error(variant: Variant | None) -> Iterator[None]:
    """Turn any exception into a CandidateError with a one-line reason."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PrepareError) or variant is None:
            reason = first_line(error) or type(error).__name__
        else:
            reason = variant.explain(error)
        raise CandidateError(reason) from None
