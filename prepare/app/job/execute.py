"""One job: what is sent to the process that executes it, its execution, and what its end means."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare.app.job.record import NOTHING_CHANGED, Job, Record, Result, Results
from prepare.app.job.settings import Settings, read_settings
from prepare.core.utils import packages
from prepare.core.utils.machine import environment
from prepare.core.utils.packages import described, is_out_of_memory, place_of
from prepare.core.utils.process_state import held_interrupts
from prepare.core.utils.text import printable, size
from prepare.errors import (
    CheckpointError,
    ConfigError,
    FileError,
    KnownIssueError,
    ModelError,
    NothingMatchesError,
    PrepareError,
    Problem,
    RefusedError,
    StepError,
)
from prepare.stages.stage import DONE, FAILED, INTERRUPTED, WRONG, Verdict, ordered_stages

if TYPE_CHECKING:
    from prepare.core.utils.text import Progress

_log = logging.getLogger(__name__)
# Called with the results so far.
Show = Callable[[Results], None]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One job: its configuration and its folder; can be pickled.

    Attributes:
        config: the resolved configuration, as plain data.
        unresolved: the problems of the interpolations in it that have no value.
        job: what its record says of the job.
        folder: where its record is written.
        logging: sets up the logs of a child process.
        current: the working directory of a child process; None is that of its parent.
        path: `sys.path` of a child process.
        environ: the environment variables of a child process.
    """

    config: dict[str, Any]
    unresolved: tuple[Problem, ...] = ()
    job: Job
    folder: Path
    logging: Callable[[], None] | None = None
    current: str | None = None
    path: list[str] = field(default_factory=lambda: list(sys.path))
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def settings(self) -> Settings:
        """Check the configuration.

        Raises:
            ConfigError: with one problem for every error in it.
        """
        if self.unresolved:
            raise ConfigError.of(self.unresolved)
        return read_settings(self.config, choices=self.job.choices)

    def enter(self) -> None:
        """Set the working directory, import path, environment variables and logs of this process."""
        os.environ.clear()
        os.environ.update(self.environ)
        sys.path[:] = self.path
        if self.current is not None:
            os.chdir(self.current)
        if self.logging is not None:
            self.logging()


@dataclass(frozen=True)
class Outcome:
    """The end of a job: its result, the exit code of a single job, its results, and what `fail_on` found.

    There are no results if the job failed, unless it failed to write them.
    """

    result: Result
    code: int
    results: Results | None = None
    asked: tuple[Verdict, ...] = ()


def run_job(
    spec: JobSpec,
    *,
    stage: Progress = lambda _: nullcontext(),
    show: Show = lambda _: None,
    begun: bool = False,
) -> Outcome:
    """Execute one job and write its record; never raises.

    `stage` is entered with a line on what begins, and may return a function that reports more. `show`
    is called with the results so far: once the model is prepared, and after each of its stages. `begun`
    says that the caller has called `Record.begin`.
    """
    record, course, start = Record(spec.folder), Course(stage), time.perf_counter()
    results: Results | None = None
    packages.switch_off_telemetry()
    packages.quiet_torchao()
    try:
        if not begun:
            record.begin(spec.job)
            begun = True
        settings = spec.settings()
        _log.debug("configuration: %s", settings)
        # The import of torch swallows an interrupt, and then fails with an unrelated error.
        with course.stage("starting torch"), held_interrupts():
            from prepare.app.job.run_stages import run_stages, save
            from prepare.core.forward.torch_state import isolated
        with isolated():
            results, work = run_stages(settings, spec.job, progress=course.stage, show=show)
            save(settings, work, results, course.stage)
        with course.stage("writing the record"):
            results = replace(results, environment=environment())
            record.write_results(results)
        outcome = finished(results, settings.fail_on)
    except (FileError, CheckpointError) as error:
        # A full disk, for example: the terminal still shows the results.
        outcome = replace(failure(error), results=results)
    except BaseException as error:  # an error of one job may not end the sweep
        outcome = failure(error)
    told: dict[str, Any] = {"seconds": round(time.perf_counter() - start, 3)}
    if failed := outcome.results is None:
        told |= {"done": course.done, "during": course.during}
    result = replace(outcome.result, **told)
    outcome = replace(outcome, result=result)
    _log.info("%s after %.1f s, in %s", result.status, result.seconds, spec.folder)
    if result.error:
        _log.error("%s", result.error)
    if result.traceback:
        _log.debug("%s", result.traceback)
    try:
        # Without figures its record could not be written, and that error matters.
        if begun and (failed or result.figures is not None):
            _write_page(record, outcome.results or Results(job=spec.job), result)
    except BaseException as error:
        if not failed:  # the error of the job matters, not one of its page
            late = replace(failure(error).result, seconds=result.seconds)
            outcome = replace(failure(error), result=late, results=results)
    return write_result(outcome, record)


def _write_page(record: Record, results: Results, result: Result) -> None:
    from prepare.app.report import pages  # Jinja is slow to import

    if result.figures is None:  # it failed: what is known, as far as it can be written
        record.write_job(results.job)
    if result.done:  # torch was started
        results = replace(results, environment=environment())
        record.write_environment(results.environment or {})
    pages.write_page(record.folder, replace(results, result=result))


class Course:
    """The course of a job: the stages that it has completed, and the innermost that an error ended."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self.done: list[str] = []
        self.during = ""

    @contextmanager
    def stage(self, what: str) -> Iterator[Any]:
        """Show that a stage begins, write it to the log, and its seconds at level DEBUG."""
        _log.info("%s", what)
        start = time.perf_counter()
        with self._shown(what) as tell:
            try:
                yield tell
            except BaseException:
                self.during = self.during or what
                raise
        # A stage of a tuning is repeated; what follows a semicolon changes each time.
        if (name := what.partition(";")[0]) not in self.done:
            self.done.append(name)
        self.during = ""
        _log.debug("%s: done in %.3f s", what, time.perf_counter() - start)


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
        called = f"the run called sys.exit({error.code!r})"
        reason, text = "exit", ": ".join(filter(None, (place_of(error), called)))
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
