"""Run the command line: commands, flags, and everything else through Hydra; return exit codes."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from prepare.app.cli.answer import answered, print_problems
from prepare.app.cli.commands import (
    COMMANDS,
    require_packages,
    show_help,
    show_sweep,
    show_usage,
    show_versions,
)
from prepare.app.cli.flags import USAGES
from prepare.app.job.outcome import DONE, FAILED, INTERRUPTED, WRONG
from prepare.core.utils.machine import limit_spinning
from prepare.core.utils.packages import switch_off_telemetry
from prepare.core.utils.process_state import stopped_by_sigterm
from prepare.core.utils.text import to_nobody
from prepare.core.utils.wording import command_line_words
from prepare.errors import ConfigError, PrepareError, Problem, SweepError, raise_problems
from prepare.pipeline.distributed import rank

if TYPE_CHECKING:
    from argparse import Namespace

    from prepare.app.cli.hydra_app import CommandState
    from prepare.app.report.terminal.sweep_progress import SweepProgress
    from prepare.app.sweep.leader import Leader


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with `argv` (None: that of the process), and exit."""
    if argv is not None:
        sys.exit(run(list(argv)))
    with contextlib.suppress(ValueError, AttributeError, OSError):  # stderr may be closed
        # A crash in native code then names the line that was running; nothing else could.
        faulthandler.enable(all_threads=False)
    atexit.register(_end_quietly)
    code = run(sys.argv[1:])
    _end_promptly()
    sys.exit(code)


def _end_promptly() -> None:
    """Leave the interpreter little to do at its end: collecting the garbage of torch takes seconds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is written; Ctrl-C would print a traceback
    gc.freeze()


def _end_quietly() -> None:
    """Drop what libraries write about frozen garbage after all handlers have run: Triton 3.9 lists it."""
    with contextlib.suppress(ValueError, AttributeError, OSError):  # stderr may be closed
        sys.stderr.flush()
        faulthandler.enable(os.dup(sys.stderr.fileno()), all_threads=False)  # a crash is told still
        to_nobody(sys.stderr)


def run(argv: list[str]) -> int:
    """Run the command line and return its exit code.

    Under torchrun only rank 0 runs it, with one folder and one record; the other ranks return 0.
    """
    if rank() > 0:
        return DONE
    switch_off_telemetry()
    limit_spinning()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names of modules may hold any character, also those that the terminal cannot show.
            stream.reconfigure(errors="backslashreplace")
    with command_line_words():
        code = answered(argv, _run)
    try:
        print(end="", flush=True)  # noqa: T201
    except BrokenPipeError:
        to_nobody(sys.stdout)
    return code


def _run(argv: list[str]) -> int:
    try:
        return _answer(argv)
    except PrepareError as error:
        print_problems(error.problems)
        return WRONG if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        print_problems([Problem("", "interrupted")])
        return INTERRUPTED


def _answer(argv: list[str]) -> int:
    if argv and argv[0] in USAGES and {"--help", "-h"} & set(argv):
        return show_usage(argv[0])
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](argv[1:])
    if "--version" in argv:
        return show_versions()
    if {"--help", "-h"} & set(argv):
        return show_help(argv)
    require_packages("hydra", "rich")
    return _through_hydra(argv)


def _through_hydra(argv: list[str]) -> int:
    from prepare.app.cli import hydra_app
    from prepare.app.cli.flags import flags_first, read_flags
    from prepare.app.cli.given_recipe import take_recipe

    argv = flags_first(argv)
    flags = read_flags(argv)
    _refuse_callback_overrides(flags)
    take_recipe(flags.overrides, flags.config_dir)
    if flags.cfg in ("job", "all"):
        _refuse_wrong_configuration(flags)
    state = hydra_app.CommandState()
    token = hydra_app.STATE.set(state)
    code = FAILED
    with stopped_by_sigterm(), _restored_logs():
        try:
            code = _launch(argv, flags, state)
        finally:
            hydra_app.STATE.reset(token)
            if state.held is not None:
                state.held.close()
            if state.leader is not None:
                code = _end_sweep(state.leader, state.progress, code)
    return code


def _end_sweep(leader: Leader, progress: SweepProgress | None, code: int) -> int:
    """Give every row of the sweep a result, show its table, and return the exit code."""
    try:
        leader.end(stopped=code != DONE)
    except KeyboardInterrupt:
        code = INTERRUPTED
        leader.end(stopped=True)
    if progress is not None:
        progress.stop()
    sweep_code = show_sweep(leader.folder)
    return code or sweep_code


@contextlib.contextmanager
def _restored_logs() -> Iterator[None]:
    """Close the logs of the run, and restore what Hydra has changed in the loggers of this process."""
    loggers = [logging.getLogger(name) for name in ("", "prepare", "hydra")]
    before = [(log, log.handlers[:], log.level, log.propagate) for log in loggers]
    try:
        yield
    finally:
        for log, handlers, level, propagate in before:
            for opened in set(log.handlers) - set(handlers):
                opened.close()
            log.handlers[:], log.propagate = handlers, propagate
            log.setLevel(level)


def _refuse_callback_overrides(flags: Namespace) -> None:
    """Refuse overrides that would switch off the checks before a run, with all other problems."""
    from prepare.app.cli.compose_config import composing
    from prepare.app.cli.override_errors import callback_problem

    refused = {word: callback_problem(word) for word in flags.overrides}
    if not any(refused.values()):
        return
    rest = [word for word, problem in refused.items() if problem is None]
    with composing(flags.config_dir) as composer:
        others = composer.diagnose(rest, multirun=flags.multirun)
    raise ConfigError.of([*filter(None, refused.values()), *others])


def _refuse_wrong_configuration(flags: Namespace) -> None:
    """Raise ConfigError where a run would refuse the configuration that `--cfg` is to print."""
    from prepare.app.cli import compose_config, hydra_app

    with compose_config.composing(flags.config_dir, flags.config_name) as composer:
        try:
            config = composer.compose(flags.overrides)
        except compose_config.ERRORS:
            return  # explained where Hydra composes it
        raise_problems(ConfigError, hydra_app.run_problems(config, composer))


def _launch(argv: list[str], flags: Namespace, state: CommandState) -> int:
    from prepare.app.cli import compose_config, hydra_app
    from prepare.app.cli.override_errors import first_sentence

    try:
        with _hydra_arguments(argv), _launcher_errors(state):
            hydra_app.launch()
    except KeyboardInterrupt:
        print_problems([Problem("", "interrupted")])
        return INTERRUPTED
    except SystemExit as stop:
        if flags.cfg and stop.code == FAILED:
            return WRONG  # Hydra has printed what it cannot show.
        return stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    except compose_config.ERRORS as error:
        if state.began:
            raise
        with compose_config.composing(flags.config_dir) as composer:
            problems = composer.diagnose(flags.overrides, multirun=flags.multirun)
        if not problems and isinstance(error, compose_config.BUILT_IN):
            raise
        print_problems(problems or [Problem("", first_sentence(str(error)))])
        return WRONG
    except OSError as error:
        if flags.cfg and isinstance(error, BrokenPipeError):
            to_nobody(sys.stdout)  # Hydra prints it
            return DONE
        # A job raises none; Hydra does if it cannot make the folder of a run, or write into it.
        if error.errno is None:
            raise
        from prepare.app.job.record import unusable

        key = "hydra.sweep.subdir" if state.leader else "hydra.run.dir"
        raise unusable(error.filename or "the folder of the run", error, key) from error
    return DONE


def _is_from_interrupt(error: BaseException) -> bool:
    """Return whether Ctrl-C caused an error, as in a library that then closes a file it has not opened."""
    from prepare.core.utils.user_code import causes

    # In a debugger, OmegaConf makes an error its own cause.
    return any(isinstance(each, KeyboardInterrupt) for each in causes(error, contexts=True))


@contextlib.contextmanager
def _launcher_errors(state: CommandState) -> Iterator[None]:
    """Turn an error in a sweep into a SweepError: no job raises, so the launcher did; its records stay."""
    try:
        yield
    except Exception as error:
        if _is_from_interrupt(error):
            raise KeyboardInterrupt from error
        if state.leader is None or isinstance(error, OSError):
            raise
        from prepare.app.cli.override_errors import first_sentence
        from prepare.core.utils import files

        path = state.leader.folder / "error.txt"
        files.write_text(path, traceback.format_exc())
        wrong = f"the launcher stopped: {type(error).__name__}: {first_sentence(str(error))}"
        remedy = (
            f"the traceback is in {files.printable_path(path)}; resume=true runs the missing runs"
        )
        raise SweepError("hydra/launcher", wrong, remedy) from error


@contextlib.contextmanager
def _hydra_arguments(argv: list[str]) -> Iterator[None]:
    """Set `sys.argv`, which Hydra reads, and the variable without which it hides errors; restore both."""
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
