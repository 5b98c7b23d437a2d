"""The bare words and flags that are answered before Hydra: steps, diff, summary, --help, --version."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from prepare.core.utils.text import line, plural, printable
from prepare.errors import ConfigError, PrepareError
from prepare.job.outcome import DONE

_WIDEST = 110


_Read = TypeVar("_Read")


def require_packages(*packages: str) -> None:
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
    from prepare.report.compare_runs import read_differences
    from prepare.report.terminal.diff import show_differences

    found = _named(lambda ours: read_differences(ours, Path(paths[1])), Path(paths[0]))
    show_differences(found)
    if asked.page is not None:
        from prepare.report.pages.diff_page import write_diff_page

        write_diff_page(found, Path(asked.page))
        line(f"the page is in {printable(asked.page)}")
    return DONE


def _summary(argv: list[str]) -> int:
    _takes(argv, 1, "summary FOLDER", "the folder of a sweep")
    require_packages("rich")
    show_sweep(Path(argv[0]))
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


def show_versions() -> int:
    import platform
    from importlib import metadata

    for package in ("torch-prepare", "torch", "hydra-core", "omegaconf"):
        try:
            line(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            line(f"{package} (not installed as a package)")
    line(f"python {platform.python_version()}")
    return DONE


def show_help(argv: list[str]) -> int:
    from argparse import ArgumentParser

    from prepare.cli.help import help_page

    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", nargs="?")
    asked, _ = parser.parse_known_args(argv)
    line(help_page(_width(), asked.config_dir))
    return DONE


def show_sweep(folder: Path) -> int:
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


def _width() -> int:
    return min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
