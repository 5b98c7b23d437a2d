"""The command line: the bare words, the flags, and everything else through Hydra; gives exit codes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from prepare.errors import ConfigError, PrepareError, Problem

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130
_WITH_VALUE = (
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn"),
    *("--config-dir", "-cd", "--experimental-rerun"),
)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line with `argv` (that of the process where it is None), and exits."""
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """Runs the command line; gives its exit code."""
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
        # Whoever read our output has gone (`| head`); there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _answer(argv: list[str]) -> int:
    word = argv[0] if argv else ""
    if word in COMMANDS:
        return COMMANDS[word](argv[1:])
    if "--version" in argv:
        return _versions()
    try:
        import hydra  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        remedy = "install the extra: pip install 'torch-prepare[cli]'"
        raise ConfigError("", f"the command line needs {error.name}", remedy) from error
    if word and re.fullmatch(r"[^=~+-][^=]*", word):
        return _unknown_word(word)
    return _run_hydra(argv)


def _steps(argv: list[str]) -> int:
    from prepare.report.steps import steps_text

    _takes(argv, 0, "steps")
    print(steps_text(min(shutil.get_terminal_size((100, 24)).columns, 100)))
    return DONE


def _diff(argv: list[str]) -> int:
    from prepare.audit import Audit
    from prepare.report.text import plural, printable

    _takes(argv, 2, "diff A B", "two audit.json files, or two folders of runs")
    paths = [Path(path) for path in argv]
    ours, theirs = (
        _wrong_if_unreadable(Audit.load, path / "audit.json" if path.is_dir() else path)
        for path in paths
    )
    found = ours.diff(theirs)
    for difference in found:
        print(printable(difference))
    print(f"{plural(len(found), 'tensor')} differ" if found else "no difference")
    return DONE


def _summary(argv: list[str]) -> int:
    from prepare.sweep import read_summary

    _takes(argv, 1, "summary FOLDER", "the folder of a sweep")
    folder = Path(argv[0])
    summary = _wrong_if_unreadable(read_summary, folder)
    from prepare.report.sweep import show_summary, write_summary

    write_summary(summary, folder)
    show_summary(summary, folder)
    return DONE


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "steps": _steps,
    "diff": _diff,
    "summary": _summary,
}


def _takes(argv: list[str], count: int, usage: str, what: str = "") -> None:
    if len(argv) != count:
        given = f"{len(argv)} given" if argv else "none given"
        remedy = f"{usage}: {what}" if what else usage
        raise ConfigError(usage.split()[0], f"takes {count or 'no'} arguments, {given}", remedy)


def _wrong_if_unreadable[T](read: Callable[[Path], T], path: Path) -> T:
    """A file that was named on the command line and cannot be read is a mistake in the command."""
    try:
        return read(path)
    except PrepareError as error:
        raise ConfigError.of(error.problems) from error


def _versions() -> int:
    for package in ("torch-prepare", "torch", "hydra-core", "omegaconf"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            print(package, metadata.version(package))
    print("python", sys.version.split()[0])
    return DONE


def _unknown_word(word: str) -> int:
    from prepare import hydra as ours
    from prepare.mistakes import not_an_override

    groups = ours.groups()
    _complain([not_an_override(word, groups, COMMANDS)])
    return WRONG


def _run_hydra(argv: list[str]) -> int:
    from prepare import hydra as ours

    flags, overrides = _sorted_arguments(argv)
    if {"--help", "-h"} & set(flags):
        return _help([*flags, *overrides])
    multirun = bool({"--multirun", "-m"} & set(flags))
    sweep = ours.Sweep()
    token = ours.SWEEP.set(sweep)
    code = FAILED
    try:
        with _arguments([*flags, *overrides]):
            code = _launched(ours, overrides, multirun=multirun)
    except KeyboardInterrupt:
        code = INTERRUPTED
        _complain([Problem("", "interrupted")])
    finally:
        ours.SWEEP.reset(token)
        if sweep.folder is not None:
            found = _show_sweep(sweep.folder)
            code = found if code == DONE else code
    return code


def _launched(ours, overrides: list[str], *, multirun: bool) -> int:
    try:
        ours.launch(ours.task)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else FAILED if stop.code else DONE
    except (*ours.ERRORS, ValueError) as error:
        problems = ours.diagnose(overrides, multirun=multirun)
        if not problems and not isinstance(error, ours.ERRORS):
            raise
        _complain(problems or [ours.generic(error)])
        return WRONG
    return DONE


def _help(argv: list[str]) -> int:
    """Hydra's help of our template, with the long lists of options folded to the terminal."""
    from prepare import hydra as ours

    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    page = io.StringIO()
    with _arguments(argv), contextlib.redirect_stdout(page):
        code = _launched(ours, [], multirun=False)
    for row in page.getvalue().rstrip().splitlines():
        group = re.match(r"(\w+): \w+(, \w+)*$", row)
        indent = " " * 13
        folded = textwrap.wrap(row, width, subsequent_indent=indent) if group else [row]
        print("\n".join(folded))
    return code


def _show_sweep(folder: Path) -> int:
    from prepare.report.sweep import show_summary, write_summary
    from prepare.sweep import read_summary

    summary = read_summary(folder)
    write_summary(summary, folder)
    show_summary(summary, folder)
    return summary.exit_code()


def _sorted_arguments(argv: list[str]) -> tuple[list[str], list[str]]:
    """The flags, and the overrides: Hydra 1.3 takes no flag after an override."""
    from hydra._internal.utils import get_args_parser

    from prepare.mistakes import unknown_flag

    known = [name for action in get_args_parser()._actions for name in action.option_strings]
    flags, overrides, problems = [], [], []
    rest = iter(argv)
    for word in rest:
        name = word.partition("=")[0]
        if not word.startswith("-"):
            overrides.append(word)
        elif name not in known:
            problems.append(unknown_flag(name, known))
        else:
            flags.append(word)
            if word in _WITH_VALUE:
                flags += [value for value in [next(rest, None)] if value is not None]
            elif word in ("--info", "-i"):
                flags += _info(argv, word)
    if problems:
        raise ConfigError.of(problems)
    return flags, overrides


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
    from prepare.report.text import printable

    for problem in problems:
        print(printable(problem), file=sys.stderr)
