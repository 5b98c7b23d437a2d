"""One job: what is sent to the process that executes it, and its execution, which writes its record."""

from __future__ import annotations

import logging.config
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare.app.job.outcome import Outcome, failure, finished, write_result
from prepare.app.job.record import Job, Record, Result
from prepare.app.job.results import write_record
from prepare.app.job.settings import Settings, read_settings
from prepare.core.utils.machine import environment
from prepare.core.utils.packages import quiet_torchao, switch_off_telemetry
from prepare.core.utils.process_state import held_interrupts
from prepare.core.utils.wording import command_line_words
from prepare.errors import CheckpointError, ConfigError, FileError, Problem

if TYPE_CHECKING:
    from prepare.app.job.results import Show
    from prepare.core.utils.text import Progress

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One job: its configuration and its folder; can be pickled.

    Attributes:
        config: the resolved configuration, as plain data.
        unresolved: the problems of the interpolations in it that have no value.
        job: what its record says of the job.
        folder: where its record is written.
        logging: the configuration of the logs of a child process, as for `logging.config`.
        current: the working directory of a child process; None is that of its parent.
        path: `sys.path` of a child process.
        environ: the environment variables of a child process.
    """

    config: dict[str, Any]
    unresolved: tuple[Problem, ...] = ()
    job: Job
    folder: Path
    logging: dict[str, Any] | None = None
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
            logging.config.dictConfig(self.logging)


@dataclass
class _Course:
    """The stages that a job has completed, and the innermost stage that an error ended."""

    done: list[str] = field(default_factory=list)
    during: str = ""


@command_line_words()  # a job of a sweep runs in a process that the command line has not begun
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
    record, course, start = Record(spec.folder), _Course(), time.perf_counter()
    progress, results = _logged(stage, course), None
    switch_off_telemetry()
    quiet_torchao()
    try:
        if not begun:
            record.begin(spec.job)
            begun = True
        settings = spec.settings()
        # The import of torch swallows an interrupt, and then fails with an unrelated error.
        with progress("starting torch"), held_interrupts():
            from prepare.app.job.build_model import import_plugins, save
            from prepare.app.job.run_stages import run_stages
            from prepare.core.forward.torch_state import isolated
        _log.debug("configuration: %s", settings)
        with isolated():
            import_plugins(settings.plugins)
            results, work = run_stages(settings, progress=progress, show=show)
            if results.audit is not None and not results.stopped:
                work.notes += save(settings, work.model, work.pipeline, progress)
            with progress("writing the record"):
                write_record(record, spec.job, results, work.pipeline)
        outcome = finished(results, settings.fail_on)
    except (FileError, CheckpointError) as error:
        # A full disk, for example: the terminal still shows the results.
        outcome = replace(failure(error), results=results)
    except BaseException as error:  # an error of one job may not end the sweep
        outcome = failure(error)
    told: dict[str, Any] = {"seconds": round(time.perf_counter() - start, 3)}
    if failed := outcome.results is None:
        told |= {"done": course.done, "during": course.during}
    outcome = replace(outcome, result=replace(outcome.result, **told))
    result = outcome.result
    _log.info("%s after %.1f s, in %s", result.status, result.seconds, spec.folder)
    if result.error:
        _log.error("%s", result.error)
    if result.traceback:
        _log.debug("%s", result.traceback)
    try:
        # Without figures its record could not be written, and that error matters.
        if begun and (failed or result.figures is not None):
            _write_page(spec, record, result, failed=failed)
    except BaseException as error:
        if not failed:  # the error of the job matters, not one of its page
            late = replace(failure(error).result, seconds=result.seconds)
            outcome = replace(failure(error), result=late, results=results)
    return write_result(outcome, record)


def _write_page(spec: JobSpec, record: Record, result: Result, *, failed: bool) -> None:
    from prepare.app.report.pages import page  # Jinja is slow to import

    if failed:  # as far as it can be written
        record.write_job(spec.job)
        if result.done:  # torch was started
            record.write_environment(environment())
    page.write_page(spec.folder, result=result)


def _logged(stage: Progress, course: _Course) -> Progress:
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
