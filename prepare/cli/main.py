"""The command line: the bare words, the flags, and everything else through Hydra; gives exit codes."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from prepare.cli.commands import COMMANDS, require_packages, show_help, show_sweep, show_versions
from prepare.core.utils.signals import stopped_by_sigterm
from prepare.core.utils.telemetry import switch_off_telemetry
from prepare.core.utils.text import line, plural, printable
from prepare.distributed import rank
from prepare.errors import ConfigError, PrepareError, Problem, SweepError
from prepare.job.outcome import DONE, FAILED, INTERRUPTED, WRONG

if TYPE_CHECKING:
    from argparse import Namespace

    from prepare.cli.hydra_app import Session


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line with `argv` (that of the process where it is None), and exits."""
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """Runs the command line; gives its exit code.

    Under torchrun the first process does it: one folder, one record, and the others end quietly.
    """
    if rank() > 0:
        return DONE
    switch_off_telemetry()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A module may be named by anything; a terminal that cannot show it is no failure.
            stream.reconfigure(errors="backslashreplace")
    try:
        return _answer(argv)
    except PrepareError as error:
        _complain(error.problems)
        return WRONG if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        _complain([Problem("", "interrupted")])
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`): what is left in the buffer must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _answer(argv: list[str]) -> int:
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](argv[1:])
    if "--version" in argv:
        return show_versions()
    if {"--help", "-h"} & set(argv):
        return show_help(argv)
    require_packages("hydra", "rich")
    return _through_hydra(argv)


def _through_hydra(argv: list[str]) -> int:
    from prepare.cli import hydra_app as ours
    from prepare.cli.flags import flags_first, read_flags

    argv = flags_first(argv)
    asked = read_flags(argv)
    _keep_the_checks(asked)
    session = ours.Session()
    token = ours.SESSION.set(session)
    code = FAILED
    with stopped_by_sigterm():
        try:
            code = _launch(argv, asked, session)
        finally:
            ours.SESSION.reset(token)
            if session.coordinator is not None:
                code = _end_sweep(session, code)
    return code


def _end_sweep(session: Session, code: int) -> int:
    """Sees to it that every row has an end, and shows the table."""
    coordinator, progress = session.coordinator, session.progress
    try:
        if code == DONE and (elsewhere := coordinator.running_elsewhere()):
            line(f"waiting for {plural(elsewhere, 'run')} of another process", errors=True)
        coordinator.end(stopped=code != DONE)
    except KeyboardInterrupt:
        code = INTERRUPTED
        coordinator.end(stopped=True)
    progress.stop()
    found = show_sweep(coordinator.folder)
    return code or found


def _keep_the_checks(asked: Namespace) -> None:
    """Refuses what would switch off the checks before a run; what else is wrong is said with it."""
    from prepare.cli import compose_config
    from prepare.cli import override_errors as mistakes

    found = {word: mistakes.of_our_checks(word) for word in asked.overrides}
    if not any(found.values()):
        return
    rest = [word for word, problem in found.items() if problem is None]
    with compose_config.composing(asked.config_dir) as composer:
        others = composer.diagnose(rest, multirun=asked.multirun)
    raise ConfigError.of([*filter(None, found.values()), *others])


def _launch(argv: list[str], asked: Namespace, session: Session) -> int:
    from prepare.cli import compose_config
    from prepare.cli import hydra_app as ours
    from prepare.cli import override_errors as mistakes

    try:
        with _arguments(argv), _launcher_errors(session):
            ours.launch()
    except KeyboardInterrupt:
        _complain([Problem("", "interrupted")])
        return INTERRUPTED
    except SystemExit as stop:
        if asked.cfg and stop.code == FAILED:
            return WRONG  # Hydra has said what there is nothing of to show.
        return stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    except compose_config.ERRORS as error:
        if session.began:
            raise
        with compose_config.composing(asked.config_dir) as composer:
            problems = composer.diagnose(asked.overrides, multirun=asked.multirun)
        if not problems and isinstance(error, compose_config.BUILT_IN):
            raise
        _complain(problems or [Problem("", mistakes.first_sentence(str(error)))])
        return WRONG
    except OSError as error:
        # A run of ours raises none; Hydra does where it cannot make a run's folder.
        if error.filename is None:
            raise
        from prepare.job.record import unusable

        key = "hydra.sweep.subdir" if session.coordinator else "hydra.run.dir"
        raise unusable(error.filename, error, key) from error
    return DONE


def _of_an_interrupt(error: BaseException | None) -> bool:
    """Whether an error came of Ctrl-C: a library that closes a file it has not opened yet makes one of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


@contextlib.contextmanager
def _launcher_errors(session: Session) -> Iterator[None]:
    """In a sweep no job raises: an exception comes from the launcher; keep what the jobs have written."""
    try:
        yield
    except Exception as error:
        if _of_an_interrupt(error):
            raise KeyboardInterrupt from error
        if session.coordinator is None or isinstance(error, OSError):
            raise
        from prepare.cli.override_errors import first_sentence
        from prepare.core.utils import files

        path = session.coordinator.folder / "error.txt"
        files.write_text(path, traceback.format_exc())
        wrong = f"the launcher stopped: {type(error).__name__}: {first_sentence(str(error))}"
        remedy = (
            f"the traceback is in {files.printable_path(path)}; resume=true does what is missing"
        )
        raise SweepError("hydra/launcher", wrong, remedy) from error


@contextlib.contextmanager
def _arguments(argv: list[str]) -> Iterator[None]:
    """Hydra reads `sys.argv`, and hides errors unless this variable is set; both as before afterwards."""
    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [before[0] if before else "prepare", *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = before
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


def _complain(problems: Sequence[Problem]) -> None:
    for problem in problems:
        line(printable(problem), errors=True)
