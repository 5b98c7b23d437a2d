"""The command line: the bare words, the flags, and everything else through Hydra; gives exit codes."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from prepare.core.utils.signals import stopped_by_sigterm
from prepare.core.utils.text import line, plural, printable
from prepare.distributed import rank
from prepare.errors import ConfigError, PrepareError, Problem, SweepError
from prepare.job.outcome import DONE, FAILED, INTERRUPTED, WRONG

if TYPE_CHECKING:
    from argparse import Namespace

    from prepare.cli.hydra_app import Session

_WIDEST = 110
_Read = TypeVar("_Read")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line with `argv` (that of the process where it is None), and exits."""
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """Runs the command line; gives its exit code.

    Under torchrun the first process does it: one folder, one record, and the others end quietly.
    """
    if rank() > 0:
        return DONE
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
        return _versions()
    if {"--help", "-h"} & set(argv):
        return _help(argv)
    _require("hydra", "rich")
    return _through_hydra(argv)


def _require(*packages: str) -> None:
    for package in packages:
        try:
            found = importlib.import_module(package)
        except ImportError as error:
            remedy = "install the extra: pip install 'torch-prepare[cli]'"
            raise ConfigError("", f"the command line needs {error.name}", remedy) from error
        if package == "hydra" and sys.version_info >= (3, 14) and found.__version__ < "1.4":
            wrong = f"Hydra {found.__version__} does not start on Python 3.14"
            remedy = "pip install --pre 'hydra-core>=1.4.0rc3', or take an older Python"
            raise ConfigError("", wrong, remedy)


def _steps(argv: list[str]) -> int:
    from prepare.report.terminal.step_list import steps_text

    _takes(argv, 0, "steps")
    line(steps_text(_width()))
    return DONE


def _diff(argv: list[str]) -> int:
    from argparse import ArgumentParser

    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--page", nargs="?", const="")
    asked, paths = parser.parse_known_args(argv)
    _takes(paths, 2, "diff A B [--page FILE.html]", "two runs' folders, audits or recipes")
    if asked.page == "":
        raise ConfigError("diff", "--page names no file", "give one: --page FILE.html")
    from prepare.report.compare_runs import read_differences, show_differences

    found = _named(lambda ours: read_differences(ours, Path(paths[1])), Path(paths[0]))
    show_differences(found)
    if asked.page is not None:
        from prepare.report.pages.diff_page import write_diff_page

        write_diff_page(found, Path(asked.page))
        line(f"the page is in {printable(asked.page)}")
    return DONE


def _summary(argv: list[str]) -> int:
    _takes(argv, 1, "summary FOLDER", "the folder of a sweep")
    _require("rich")
    _show_sweep(Path(argv[0]))
    return DONE


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "steps": _steps,
    "diff": _diff,
    "summary": _summary,
}


def _takes(argv: list[str], count: int, usage: str, what: str = "") -> None:
    if len(argv) != count:
        wrong = f"takes {plural(count, 'argument') if count else 'no argument'}, got {len(argv)}"
        raise ConfigError(usage.partition(" ")[0], wrong, f"{usage}: {what}" if what else "")


def _named(read: Callable[[Path], _Read], path: Path) -> _Read:
    """What is read from a file named on the command line: if it cannot be, the command is wrong."""
    try:
        return read(path)
    except PrepareError as error:
        raise ConfigError.of(error.problems) from error


def _versions() -> int:
    import platform
    from importlib import metadata

    for package in ("torch-prepare", "torch", "hydra-core", "omegaconf"):
        try:
            line(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            line(f"{package} (not installed as a package)")
    line(f"python {platform.python_version()}")
    return DONE


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
            if session.lead is not None:
                code = _end_sweep(session, code)
    return code


def _end_sweep(session: Session, code: int) -> int:
    """Sees to it that every row has an end, and shows the table."""
    lead, progress = session.lead, session.progress
    try:
        if code == DONE and (others := lead.others()):
            line(f"waiting for {plural(others, 'run')} of another process", errors=True)
        lead.end(stopped=code != DONE)
    except KeyboardInterrupt:
        code = INTERRUPTED
        lead.end(stopped=True)
    progress.stop()
    found = _show_sweep(lead.folder)
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
        with _arguments(argv), _engine_errors(session):
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

        key = "hydra.sweep.subdir" if session.lead else "hydra.run.dir"
        raise unusable(error.filename, error, key) from error
    return DONE


def _of_an_interrupt(error: BaseException | None) -> bool:
    """Whether an error came of Ctrl-C: a library that closes a file it has not opened yet makes one of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


@contextlib.contextmanager
def _engine_errors(session: Session) -> Iterator[None]:
    """In a sweep no job raises: what does then is the engine, and what its jobs left is still there."""
    try:
        yield
    except Exception as error:
        if _of_an_interrupt(error):
            raise KeyboardInterrupt from error
        if session.lead is None or isinstance(error, OSError):
            raise
        from prepare.cli.override_errors import first_sentence
        from prepare.core.utils import files

        path = session.lead.folder / "error.txt"
        files.write_text(path, traceback.format_exc())
        wrong = f"the engine stopped: {type(error).__name__}: {first_sentence(str(error))}"
        remedy = f"the traceback is in {files.shown(path)}; resume=true does what is missing"
        raise SweepError("hydra/launcher", wrong, remedy) from error


def _help(argv: list[str]) -> int:
    from argparse import ArgumentParser

    from prepare.cli.help import help_page

    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", nargs="?")
    asked, _ = parser.parse_known_args(argv)
    line(help_page(_width(), asked.config_dir))
    return DONE


def _show_sweep(folder: Path) -> int:
    """Shows the table of the sweep in `folder`, and writes it down; the exit code that it stands for."""
    from prepare.sweep.summary import read_summary

    summary = _named(read_summary, folder)
    from prepare.report.pages.sweep_page import write_sweep_page
    from prepare.report.terminal.sweep import show_summary, show_where, write_summary

    # Shown before it is written: a folder that cannot be written to is read all the same.
    show_summary(summary)
    write_summary(summary, folder)
    write_sweep_page(summary, folder)
    show_where(summary, folder)
    return summary.exit_code()


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


def _width() -> int:
    return min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)


def _complain(problems: Sequence[Problem]) -> None:
    for problem in problems:
        line(printable(problem), errors=True)
