"""Run the command line: commands, flags, and everything else through Hydra; return exit codes."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from prepare.app.cli import commands
from prepare.app.cli.words import (
    USAGES,
    answered,
    first_sentence,
    print_problems,
    refused,
    split_words,
)
from prepare.core.utils import files
from prepare.core.utils.machine import limit_spinning
from prepare.core.utils.packages import causes, switch_off_telemetry
from prepare.core.utils.process_state import stopped_by_sigterm
from prepare.core.utils.text import to_nobody
from prepare.errors import ConfigError, FileError, PrepareError
from prepare.pipeline.distributed import rank
from prepare.stages.stage import DONE, FAILED, INTERRUPTED, WRONG

if TYPE_CHECKING:
    from prepare.app.cli.hydra_app import CommandState
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is written; Ctrl-C would print a traceback
    gc.freeze()  # collecting the garbage of torch takes seconds
    sys.exit(code)


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
    if argv[:1] == ["run"]:
        return _run(argv)  # the program is not changed: neither its environment nor its streams
    if rank() > 0:
        return DONE
    switch_off_telemetry()
    limit_spinning()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names of modules may hold any character, also those that the terminal cannot show.
            stream.reconfigure(errors="backslashreplace")
    code = answered(argv, _run)
    try:
        print(end="", flush=True)  # noqa: T201
    except BrokenPipeError:
        to_nobody(sys.stdout)
    return code


def _run(argv: list[str]) -> int:
    try:
        if argv and argv[0] in USAGES:
            wants_help = {"--help", "-h"} & {*(argv[1:2] if argv[0] == "run" else argv)}
            command = commands.COMMANDS[argv[0]]
            return commands.show_usage(argv[0]) if wants_help else command(argv[1:])
        if "--version" in argv:
            return commands.show_versions()
        if {"--help", "-h"} & {*argv}:
            return commands.show_help(argv)
        commands.require_packages("hydra", "rich")
        return _through_hydra(argv)
    except PrepareError as error:
        print_problems(error.problems)
        # A file that is named as an argument of a command and cannot be read is a wrong word too.
        named = bool(argv) and argv[0] in USAGES
        return WRONG if named or isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        print_problems(["interrupted"])
        return INTERRUPTED


def _through_hydra(argv: list[str]) -> int:
    words, flags = split_words(argv)
    from prepare.app.cli import hydra_app

    words = hydra_app.store_defaults(words)
    state = hydra_app.CommandState()
    token = hydra_app.STATE.set(state)
    code = FAILED
    before, sys.argv = sys.argv, [*(sys.argv[:1] or ["prepare"]), *words, *flags]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # without it Hydra hides errors, and ends the process
    with stopped_by_sigterm():
        try:
            hydra_app.launch()
            code = DONE
        except SystemExit as stop:
            if state.error is not None:
                raise state.error from None
            code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
            if {"--cfg", "-c"} & {*flags} and code == FAILED:
                code = WRONG  # Hydra has printed what it cannot show
        except BrokenPipeError:
            to_nobody(sys.stdout)  # the reader of --cfg has gone
            code = DONE
        except BaseException as error:
            raise _told(error, state, words)  # noqa: B904  the error itself, if it is none of these
        finally:
            sys.argv = before
            hydra_app.STATE.reset(token)
            if state.leader is not None:
                code = _end_sweep(state, state.leader, code)
    return code


def _told(error: BaseException, state: CommandState, words: list[str]) -> BaseException:
    """Return what ended Hydra as an error of one line; a fault of ours stays what it is."""
    from prepare.app.cli.hydra_app import ERRORS
    from prepare.app.job.record import unusable

    # Also behind another error, as of a library that then closes a file it has not opened.
    if any(isinstance(each, KeyboardInterrupt) for each in causes(error, contexts=True)):
        return KeyboardInterrupt()
    if isinstance(error, OSError) and error.errno is not None:
        # A job raises none; Hydra does if it cannot make the folder of a run, or write into it.
        key = "hydra.sweep.subdir" if state.leader else "hydra.run.dir"
        return unusable(error.filename or "the folder", error, key)
    if state.leader is not None and isinstance(error, Exception):
        # No job of a sweep raises, so the launcher did; the records of the jobs stay.
        path = state.leader.folder / "error.txt"
        files.write_text(path, "".join(traceback.format_exception(error)))
        wrong = f"the launcher stopped: {type(error).__name__}: {first_sentence(str(error))}"
        remedy = f"the traceback is in {files.printable_path(path)}; resume=true runs the rest"
        return FileError("hydra/launcher", wrong, remedy)
    if isinstance(error, ERRORS) and not state.began:
        return ConfigError.of([refused(error, words)])
    return error


def _end_sweep(state: CommandState, leader: Leader, code: int) -> int:
    """Give every row of the sweep a result, show its table, and return the exit code."""
    try:
        leader.end(stopped=code != DONE)
    except KeyboardInterrupt:
        code = INTERRUPTED
        leader.end(stopped=True)
    if state.progress is not None:
        state.progress.stop()
    sweep_code = commands.show_sweep(leader.folder)
    return code or sweep_code
