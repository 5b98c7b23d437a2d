"""The outcome of a job: its result, its exit code, and what an exception means for both."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from prepare.app.job.record import NOTHING_CHANGED, Record, Result
from prepare.core.utils.text import printable, size
from prepare.core.utils.user_code import described, is_out_of_memory, place_of, raised_at
from prepare.errors import (
    CheckpointError,
    ConfigError,
    FileError,
    KnownIssueError,
    ModelError,
    NothingMatchesError,
    PrepareError,
    RefusedError,
    StepError,
)
from prepare.stages.stage import (
    DONE,
    FAILED,
    INTERRUPTED,
    NOT_VERIFIED,  # noqa: F401  the codes are compared with that of an outcome
    WRONG,
    Verdict,
    ordered_stages,
)

if TYPE_CHECKING:
    from prepare.app.job.results import Results

# The reason and the exit code of each of our errors, and whether its traceback is kept; the first that fits.
_REASONS: tuple[tuple[type[PrepareError], str, int, bool], ...] = (
    (KnownIssueError, "known issue", WRONG, False),
    (ConfigError, "configuration", WRONG, False),
    (RefusedError, "refused", WRONG, False),
    (FileError, "file", FAILED, False),
    (CheckpointError, "weights", FAILED, False),
    (ModelError, "model", FAILED, True),
    (StepError, "step", FAILED, True),
    (PrepareError, "error", FAILED, True),
)
# Characters of an error's beginning, and of its end, in a result, which is read again up to a limit.
_LONGEST = 50_000


@dataclass(frozen=True)
class Outcome:
    """The end of a job: its result, the exit code of a single job, its results, and what `fail_on` found.

    There are no results if the job failed, unless it failed to write them.
    """

    result: Result
    code: int
    results: Results | None = None
    asked: tuple[Verdict, ...] = ()


def finished(results: Results, fail_on: Sequence[str] = ()) -> Outcome:
    """Return the outcome of a job that came to its end, or prepared the model before it was stopped."""
    about: dict[str, Any] = {"figures": results.figures(), "amp": results.amp}
    about["notes"] = results.notes
    if results.stopped:
        stopped = Result("interrupted", "interrupted", results.stopped, **about)
        return Outcome(stopped, INTERRUPTED, results)
    given = [cls.verdict(results.found) for cls in ordered_stages()]
    asked = tuple(
        Verdict(status="verification_failed", reason=f"fail_on={word}", error=wrong)
        for cls in ordered_stages()
        for word in cls.fails
        if word in fail_on and (wrong := cls.failure(word, results.found))
    )
    if verdicts := list(filter(None, (*given, *asked))):
        reason = ", ".join(verdict.reason for verdict in verdicts)
        found = Result(verdicts[0].status, reason, "\n".join(v.error for v in verdicts), **about)
        return Outcome(found, verdicts[0].code, results, asked)
    same = NOTHING_CHANGED if results.unchanged else None
    return Outcome(Result("ok", same, **about), DONE, results)


def failure(error: BaseException) -> Outcome:
    """Return the outcome of a job that raised `error`."""
    trace = _cut("".join(traceback.format_exception(error)))
    message = _cut(_message(error))
    if isinstance(error, KeyboardInterrupt):
        stopped = Result("interrupted", "interrupted", message or "stopped by Ctrl-C")
        return Outcome(stopped, INTERRUPTED)
    if isinstance(error, NothingMatchesError):
        return Outcome(Result("no_effect", "no effect", message, problems=[*error.problems]), WRONG)
    for kind, reason, code, traced in _REASONS:
        if isinstance(error, kind):
            place = place_of(error.__cause__) if traced and error.__cause__ else ""
            about: dict[str, Any] = {"problems": [*error.problems], "place": place}
            found = Result("failed", reason, message, trace if traced else None, **about)
            return Outcome(found, code)
    reason, text = "error", described(error, message)
    if isinstance(error, SystemExit):
        reason = "exit"
        text = f"{raised_at(error)}the run called sys.exit({error.code!r})"
    elif is_out_of_memory(error):
        sizes = re.sub(r"\b(\d{7,18}) bytes", lambda found: size(int(found[1])), text)
        reason, text = "oom", f"out of memory: {sizes}"
    return Outcome(Result("failed", reason, text, trace, place=place_of(error)), FAILED)


def write_result(outcome: Outcome, record: Record) -> Outcome:
    """Write the result of a job, the last file of its record; if that fails, so does the job."""
    try:
        record.write_result(outcome.result)
    except FileError as error:
        if outcome.code != DONE:
            # The traceback is lost with the file; the first error is still reported.
            return replace(outcome, result=replace(outcome.result, traceback=None))
        failed = replace(failure(error).result, seconds=outcome.result.seconds)
        with suppress(FileError):
            record.write_result(failed)
        return replace(outcome, result=failed, code=FAILED)
    return outcome


def _cut(text: str) -> str:
    return text if len(text) <= 2 * _LONGEST else f"{text[:_LONGEST]}\n...\n{text[-_LONGEST:]}"


def _message(error: BaseException) -> str:
    """Return one line for each problem of a PrepareError; other messages are unchanged."""
    if isinstance(error, PrepareError):
        return "\n".join(map(printable, error.problems))
    return str(error).strip()
