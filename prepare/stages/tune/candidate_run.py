"""One candidate on a copy of the model: prepare it, time it, and verify it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from prepare.core.forward.unchanged import ModelState
from prepare.core.model.devices import free_memory
from prepare.core.utils.process_state import ignored_warnings
from prepare.core.utils.text import first_line
from prepare.errors import PrepareError
from prepare.pipeline import Pipeline
from prepare.stages.bench.variant import Variant
from prepare.stages.tune.compare_candidates import CandidateError, CheckResult
from prepare.stages.verify import verify
from prepare.stages.verify.inputs import user_formatter

if TYPE_CHECKING:
    from prepare.pipeline.known_issue_checks import KnownIssues
    from prepare.stages.tune.candidates import Candidate

# Seconds: longer calls need no untimed call first: the state of the caches matters less.
_WARM_BELOW = 0.05
# A verification may use half of the free memory and as many seconds as the tuning, but at least these.
_MIN_CHECK_MEMORY, _MIN_CHECK_SECONDS, _MEMORY_PART = 4 * 2**30, 30.0, 0.5


class PreparedCandidate:
    """A copy of the tuned model, prepared by a candidate; `turn` times it on one of the inputs.

    `tuning` is the `TuningSession`, which imports this file; `pool` are the inputs. With `like`, a turn
    times as many calls in a row as one of that candidate.

    Raises:
        CandidateError: the candidate cannot be prepared, or does not run.
    """

    def __init__(
        self,
        tuning: Any,
        candidate: Candidate,
        pool: list[Any],
        *,
        like: PreparedCandidate | None = None,
    ) -> None:
        self._tuning, self._pool, train = tuning, pool, tuning.mode == "train"
        with _as_candidate_error(None), ignored_warnings():
            self.pipeline = Pipeline.from_config(candidate.steps)
            self.model = tuning.copied()
            # In training a known issue would make wrong gradients.
            known_issues: KnownIssues = "error" if train else "ignore"
            self.pipeline.apply(self.model, known_issues=known_issues, amp=tuning.amp)
        self._before = ModelState(self.model)
        self._before.begin()
        formatter = user_formatter(self.pipeline)
        self._variant = Variant(
            candidate.name, self.model, formatter=formatter, train=train, amp=tuning.amp
        )
        with _as_candidate_error(self._variant), ignored_warnings():
            self._warm_up(like)

    def turn(self, number: int) -> float:
        """Return the seconds of one call, with its share of the first one if the number of calls is known."""
        calls = self._tuning.options.calls
        share = self.first_seconds / calls if calls else 0.0
        with _as_candidate_error(self._variant):
            batch = self._pool[number % len(self._pool)]
            return share + self._variant.sample(batch, self._tuning.clock)

    def check(self) -> CheckResult:
        """Verify the prepared copy, with all its values as they were before it was timed."""
        self._before.restore()
        free, tuning = free_memory(torch.device("cpu")) or 0, self._tuning
        try:
            with ignored_warnings():
                verification = verify(
                    tuning.model,
                    self.model,
                    tuning.batch,
                    pipeline=self.pipeline,
                    mode=tuning.mode,
                    gradients=tuning.mode == "train",
                    seconds=max(_MIN_CHECK_SECONDS, tuning.options.budget),
                    memory=max(_MIN_CHECK_MEMORY, int(_MEMORY_PART * free)),
                    amp=tuning.amp,
                )
        except Exception as error:  # out of memory, or a candidate that no check anticipates
            reason = f"it raised {type(error).__name__}: {first_line(error)}"
            return CheckResult("cannot tell", reason)
        outputs = [check for check in verification.checks if check.what == "outputs"]
        worst = max(outputs, key=lambda check: check.error or 0.0, default=None)
        figures = (worst.error, worst.allowed) if worst else ()
        return CheckResult(verification.status, verification.reason, *figures)

    def _warm_up(self, like: PreparedCandidate | None) -> None:
        variant, first, clock = self._variant, self._pool[0], self._tuning.clock
        self.first_seconds = variant.first_call(first, clock)
        variant.warm_up(first, clock)
        variant.warm = variant.call_seconds < _WARM_BELOW
        if like is not None:
            # The first call in a row finds colder caches.
            variant.calls, variant.warm = like._variant.calls, like._variant.warm
        self.seconds = variant.call_seconds * (variant.calls + variant.warm)


def capacity(model: nn.Module, device: torch.device) -> int:
    """Return how many copies, each with gradients and a copy to restore, fit into half of the free memory."""
    size = sum(t.nbytes for each in (model.parameters(), model.buffers()) for t in each)
    free = free_memory(device)
    return 1000 if free is None else int(_MEMORY_PART * free / max(1, 3 * size))


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
