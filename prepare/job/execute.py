"""Execute one job: build the model, prepare it, analyse it, audit it, and write its record."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from prepare.core.utils.packages import quiet_torchao, switch_off_telemetry
from prepare.core.utils.signals import held_interrupts
from prepare.core.utils.wording import command_line_words
from prepare.errors import CheckpointError, FileError
from prepare.job.outcome import Outcome, failure, finished, write_result
from prepare.job.record import Record

if TYPE_CHECKING:
    from prepare.core.utils.progress import Stage
    from prepare.job.results import Show
    from prepare.job.spec import JobSpec

_log = logging.getLogger(__name__)


@dataclass
class _Course:
    """The stages that a job has completed, and the innermost stage that an error ended."""

    done: list[str] = field(default_factory=list)
    during: str = ""


def run_job(
    spec: JobSpec,
    *,
    stage: Stage = lambda _: nullcontext(),
    show: Show = lambda _: None,
    begun: bool = False,
) -> Outcome:
    """Execute one job and write its record; never raises.

    `stage` is entered with a line on what begins, and may return a function that reports more. `show`
    is called with the results so far: once the model is prepared, and after its verification. `begun`
    says that the caller has called `Record.begin`.
    """
    # A job of a sweep runs in a process of its own, which the command line has not begun.
    with command_line_words():
        return _run_job(spec, stage, show, begun=begun)


def _run_job(spec: JobSpec, stage: Stage, show: Show, *, begun: bool) -> Outcome:
    record = Record(spec.folder)
    start = time.perf_counter()
    course = _Course()
    switch_off_telemetry()
    quiet_torchao()
    try:
        if not begun:
            record.begin(spec.job)
            begun = True
        outcome = _run_in_clean_state(spec, record, _logged(stage, course), show)
    except BaseException as error:  # an error of one job may not end the sweep
        outcome = failure(error)
    seconds = round(time.perf_counter() - start, 3)
    outcome = replace(outcome, result=replace(outcome.result, seconds=seconds))
    _log.info("%s after %.1f s, in %s", outcome.result.status, seconds, spec.folder)
    if outcome.result.error:
        _log.error("%s", outcome.result.error)
    if outcome.result.traceback:
        _log.debug("%s", outcome.result.traceback)
    if outcome.results is None:
        result = replace(outcome.result, done=course.done, during=course.during)
        outcome = replace(outcome, result=result)
        if begun:
            _write_failure(spec, record, outcome)
        return write_result(outcome, record)
    try:
        # Without figures its record could not be written, and that error matters.
        if outcome.result.figures is not None:
            spec.pages(outcome, spec.folder)
    except BaseException as error:
        failed = replace(failure(error).result, seconds=seconds)
        outcome = replace(outcome, result=failed, code=failure(error).code)
    return write_result(outcome, record)


def _write_failure(spec: JobSpec, record: Record, outcome: Outcome) -> None:
    """Write what a page says of a job that failed, as far as it can be written."""
    with suppress(BaseException):  # the error of the job matters, not one of its page
        record.write_job(spec.job)
        if outcome.result.done:  # torch was started
            from prepare.core.utils.environment import environment

            record.write_environment(environment())
        spec.pages(outcome, spec.folder)


def _logged(stage: Stage, course: _Course) -> Stage:
    """Return `stage` with messages to the logger, its seconds at level DEBUG, and notes in `course`."""

    @contextmanager
    def logged(what: str) -> Iterator[Any]:
        _log.info("%s", what)
        start = time.perf_counter()
        with stage(what) as tell:
            try:
                yield tell
            except BaseException:
                course.during = course.during or what
                raise
        # A stage of a tuning is repeated; what follows a semicolon changes each time.
        if (name := what.partition(";")[0]) not in course.done:
            course.done.append(name)
        course.during = ""
        _log.debug("%s: done in %.3f s", what, time.perf_counter() - start)

    return logged


def _run_in_clean_state(spec: JobSpec, record: Record, stage: Stage, show: Show) -> Outcome:
    settings = spec.settings()
    # The import of torch swallows an interrupt, and then fails with an unrelated error.
    with stage("starting torch"), held_interrupts():
        from prepare.core.forward.torch_state import isolated
        from prepare.job.build_model import import_plugins
        from prepare.job.carry_out import carry_out
        from prepare.job.load_weights import save
    _log.debug("configuration: %s", settings)
    with isolated():
        import_plugins(settings.plugins)
        results, model = carry_out(
            settings, spec.build, folder=spec.folder, progress=stage, show=show
        )
        try:
            if results.audit is not None and not results.stopped:
                notes = save(settings, model, results.pipeline, stage)
                results = replace(results, notes=[*results.notes, *notes])
            with stage("writing the record"):
                results.write(record, replace(spec.job, seen=results.seen()))
        except (FileError, CheckpointError) as error:
            # A full disk, for example: the terminal still shows the results.
            return replace(failure(error), results=results)
    return finished(results)
