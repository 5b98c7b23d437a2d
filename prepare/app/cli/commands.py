"""Answer the commands and flags beside those of a run: steps, diff, summary, --help, --version."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from prepare.app.cli.answer import tell
from prepare.app.cli.words import USAGES, split_words
from prepare.core.utils.text import line, plural
from prepare.errors import ConfigError, FileError
from prepare.stages.stage import DONE

_WIDEST = 110
# A table in the terminal has at most so many rows; --json has them all.
_ROWS = 100


def require_packages(*packages: str) -> None:
    """Raise ConfigError if a package of the command line is missing, or too old for this Python."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            remedy = "install the extra: pip install 'torch-prepare[cli]'"
            raise ConfigError("", f"the command line needs {error.name}", remedy) from error


def _steps(argv: list[str]) -> int:
    from prepare.app.cli.help import steps_text
    from prepare.registry import STEPS

    if unknown := [name for name in argv if name not in STEPS]:
        raise ConfigError.of([STEPS.problem(unknown[0])])
    line(steps_text(argv))
    tell(steps=argv or list(STEPS))
    return DONE


def _diff(argv: list[str]) -> int:
    _check_count(argv, 2, "diff A B", "two runs' folders, audits or recipes")
    require_packages("rich")
    from prepare.app.report.compare_runs import differences
    from prepare.app.report.terminal import part_lines
    from prepare.core.document import Table, columns

    rows = differences(Path(argv[0]), Path(argv[1]))
    titles = columns("item name, A text, B text")
    for text in part_lines(Table(label="Differences", columns=titles, rows=rows, most=_ROWS)):
        line(text)
    line(plural(len(rows), "difference") if rows else "no difference")
    tell(differences=rows)
    return DONE


def _summary(argv: list[str]) -> int:
    _check_count(argv, 1, "summary FOLDER", "the folder of a sweep")
    require_packages("rich")
    from prepare.app.sweep.summary import read_summary

    read_summary(Path(argv[0]))
    try:
        show_sweep(Path(argv[0]))
    except FileError as error:
        # The table has been printed, and that is what was asked for.
        line(f"not written: {error}")
    return DONE


def _run(argv: list[str]) -> int:
    from prepare.frameworks.run_program import run_program

    code, session, folder = run_program(argv)
    if folder:
        from prepare.app.model_report import Report

        for index, found in enumerate(session.found):
            records = {"flow": found.flow} if found.flow is not None else {}
            report = Report(
                audit=found.audit,
                found=records,
                model=found.name,
                steps=session.pipeline.to_config(),
            )
            report.save(Path(folder) / f"{index}-{found.name}")
    return code


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "steps": _steps,
    "diff": _diff,
    "summary": _summary,
    "run": _run,
}


def show_usage(command: str) -> int:
    """Print what follows a command, and what it does."""
    from prepare.app.cli.help import as_called

    line(as_called(f"usage: python run.py {USAGES[command]}"))
    return DONE


def _check_count(argv: list[str], count: int, usage: str, what: str) -> None:
    if len(argv) != count:
        wrong = f"takes {plural(count, 'argument')}, got {len(argv)}"
        raise ConfigError(usage.partition(" ")[0], wrong, f"{usage}: {what}")


def show_versions() -> int:
    """Print the versions of prepare and the packages it builds on."""
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
    """Print the page of --help, or of one topic: `--help model`."""
    from prepare.app.cli.help import page, topic_page

    topics = [word for word in split_words(argv)[0] if "=" not in word]
    texts = [topic_page(topic, _width()) for topic in topics] or [page("help_first.txt", _width())]
    for text in texts:
        line(text)
    tell(help="\n".join(texts))
    return DONE


def show_sweep(folder: Path) -> int:
    """Print and write the table of the sweep in `folder`; return the exit code of the sweep."""
    from prepare.app.report.pages import write_sweep_page
    from prepare.app.report.sweep_table import write_summary
    from prepare.app.report.terminal import show_summary, show_where
    from prepare.app.sweep.summary import read_summary

    summary = read_summary(folder)
    # Printed before it is written: the table of a read-only folder shall be shown too.
    show_summary(summary)
    write_summary(summary, folder)
    write_sweep_page(summary, folder)
    show_where(summary, folder)
    written = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    tell(folder=str(folder), rows=written["rows"])
    return summary.exit_code()


def _width() -> int:
    return min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
