"""Answer the commands and flags beside those of a run: steps, diff, summary, --version, --help."""

from __future__ import annotations

import importlib
import inspect
import json
import platform
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from string import Template
from typing import Any, get_args, get_type_hints

from prepare.app.cli.words import USAGES, options_of, tell
from prepare.app.job.record import shown_files
from prepare.app.job.settings import ADDED_GROUP, group_names, key_names, level_names
from prepare.core.utils.files import conf_dir
from prepare.core.utils.machine import program
from prepare.core.utils.options import describe, plain
from prepare.core.utils.packages import version_of
from prepare.core.utils.suggest import listed, nearest
from prepare.core.utils.text import line, plural
from prepare.errors import ConfigError, FileError, PrepareError
from prepare.registry import STEPS
from prepare.stages.stage import DONE, FAILED, ordered_stages, tasks

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
    show_sweep(Path(argv[0]))
    return DONE


def _run(argv: list[str]) -> int:
    from prepare.frameworks.run_program import run_program

    run_program(argv or [""], "prepare.app.model_report:write_pages")


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "steps": _steps,
    "diff": _diff,
    "summary": _summary,
    "run": _run,
}


def show_usage(command: str) -> int:
    """Print what follows a command, and what it does."""
    line(as_called(f"usage: python run.py {USAGES[command]}"))
    return DONE


def _check_count(argv: list[str], count: int, usage: str, what: str) -> None:
    if len(argv) != count:
        wrong = f"takes {plural(count, 'argument')}, got {len(argv)}"
        raise ConfigError(usage.partition(" ")[0], wrong, f"{usage}: {what}")


def show_versions() -> int:
    """Print the versions of prepare and the packages it builds on."""
    for package in ("torch-prepare", "torch", "hydra-core", "omegaconf"):
        line(f"{package} {version_of(package) or '(not installed as a package)'}")
    line(f"python {platform.python_version()}")
    return DONE


def show_help(argv: list[str]) -> int:
    """Print the page of --help, or of one topic: `--help model`."""
    topics = [word for word in argv if "=" not in word and not word.startswith("-")]
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
    try:
        tell(folder=str(folder), rows=write_summary(summary, folder))
        write_sweep_page(summary, folder)
    except FileError as error:
        line(f"not written: {error}")
        return FAILED
    show_where(summary, folder)
    return summary.exit_code()


def _width() -> int:
    return min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)


# ------------------------------------------------------------ help, without Hydra
# The command as the template and the files of options write it.
_FROM_A_CHECKOUT = "python run.py"
# The width of a key with its value.
_KEY = 23


def page(name: str, width: int) -> str:
    """Return the page of a template, folded to `width` columns: the first of --help, or the whole."""
    groups = {_written(group): options_of(group) for group in group_names()}
    launchers = {"hydra/launcher": ["basic", *options_of("launcher")]}
    short = [(group, listed(options)) for group, options in groups.items()]
    whole = [f"{group}: {', '.join(options)}" for group, options in (groups | launchers).items()]
    known_tasks = ((f"task={word}", task.help) for word, task in tasks().items())
    levels = [row for row in _stage_rows() if row[0].partition("=")[0] in level_names()]
    commands = [usage.partition("\n")[0].partition(" [")[0] for usage in USAGES.values()]
    files = f"A run writes a folder: {', '.join(shown_files())}, prepare.log, .hydra/."
    text = Template((conf_dir() / name).read_text(encoding="utf-8")).substitute(
        GROUPS="\n".join(_rows(short, width, max(map(len, groups)))),
        TASKS="\n".join(_rows(known_tasks, width)),
        LEVELS="\n".join(_rows(levels, width)),
        STAGES="\n".join(_rows(_stage_rows(), width)),
        COMMANDS=", ".join(commands),
        APP_CONFIG_GROUPS="\n".join(_folded(text, width) for text in whole) + "\n",
        FILES=_folded(files, width),
    )
    return as_called(text.rstrip())


def _folded(text: str, width: int) -> str:
    return textwrap.fill(text, width, subsequent_indent="    ")


def topic_page(topic: str, width: int) -> str:
    """Return what there is to say of a group, a task, a key or a step.

    Raises:
        ConfigError: there is nothing of that name.
    """
    if topic in ("all", "steps"):
        return page("help_all.txt", width) if topic == "all" else steps_text()
    parts = [*_group(topic, width), *_keys(topic, width)]
    if topic in STEPS:
        parts += _step(topic)
    if not parts:
        topics = dict.fromkeys([*key_names(), *tasks(), *STEPS, *USAGES, "all"])
        near = nearest(topic, [name for name in topics if name != "hydra"])[:1]
        meant = f"did you mean --help {near[0]}? " if near else ""
        remedy = f"{meant}--help all shows every name"
        raise ConfigError(topic, "is not a group, task, key or step", remedy)
    return as_called("\n".join(parts))


def _group(group: str, width: int) -> Iterator[str]:
    """Yield one line for each option of a group: its name, and the first sentence of its file."""
    if group in (*group_names(), *level_names()):
        options = options_of(group)
        paths = (conf_dir() / group / f"{option}.yaml" for option in options)
        yield f"{group}: choose one with {_written(group)}=OPTION"
        texts = zip(options, map(_sentence, paths), strict=True)
        yield from _rows(texts, width, max(map(len, options)))


def _written(group: str) -> str:
    """Return a group as an override of it begins."""
    return f"+{group}" if group == ADDED_GROUP else group


def _keys(topic: str, width: int) -> Iterator[str]:
    """Yield the rows of the whole page on a key and the keys below it, or a task."""
    key = re.compile(rf"  (task={re.escape(topic)} |{re.escape(topic)}[.=])")
    shown = False
    for row in page("help_all.txt", width).splitlines():
        # The lines of a row that follow the first begin in the column of its text.
        shown = bool(key.match(row)) or (shown and row.startswith("      "))
        if shown:
            yield row


def steps_text(names: Iterable[str] = ()) -> str:
    """Return the text of these steps, or of all: the card of each, and its options."""
    return "\n\n".join("\n".join(_step(name)) for name in names or STEPS)


def _step(name: str) -> Iterator[str]:
    try:
        cls = STEPS[name]
    except PrepareError as error:
        yield f"{name}: {error.problems[0].wrong}"
        return
    yield f"{name}  ({cls.phase})"
    card = inspect.getdoc(cls) or ""
    if not card.startswith(f"{cls.__name__}("):  # the docstring that dataclass generates
        yield from (f"  {row}" for row in card.splitlines() if row)
    hints = get_type_hints(cls, include_extras=True)
    options = {}
    for each in fields(cls):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        text = "... (required)" if default is MISSING else _as_text(plain(default))
        options[f"steps.{name}.{each.name}={text}"] = describe(hints[each.name])
    longest = max(map(len, options), default=0)
    yield from (f"    {option.ljust(longest)}  {about}" for option, about in options.items())


def _stage_rows() -> Iterator[tuple[str, str]]:
    """Yield each key of the stages with what it is for, and its default."""
    for cls in ordered_stages():
        hints = get_type_hints(cls)
        for each in fields(cls):
            if not (about := each.metadata.get("help")):
                continue
            default = getattr(cls, each.name, None)
            name, words = f"{cls.name}.{each.name}", ""
            if each.name == "level":
                name, words = cls.name, "|".join(get_args(hints["level"]))
            example = words or each.metadata["example"] or _as_text(default)
            shown = "" if default is None else f" ({_as_text(default)})"
            yield f"{name}={example}", f"{about}{shown}"


def _as_text(value: Any) -> str:
    """Return a default as a user writes it: `null`, `true`, `[]`, `60`."""
    return json.dumps(value, separators=(",", ":")).replace('"', "").removesuffix(".0")


def _rows(rows: Iterable[tuple[str, str]], width: int, column: int = _KEY) -> Iterator[str]:
    """Yield a line for each name and text, folded to `width`; names take a column."""
    fold = textwrap.TextWrapper(width, break_on_hyphens=False, subsequent_indent=" " * (column + 4))
    for name, text in rows:
        fold.initial_indent = f"  {name.ljust(column)}  "
        yield fold.fill(text) or fold.initial_indent.rstrip()


def _sentence(path: Path) -> str:
    """Return the first sentence of the comment at the top of a file."""
    rows = path.read_text(encoding="utf-8").splitlines()
    comments = [row[1:].strip() for row in rows if re.match(r"#(?! @package)", row)]
    return re.split(r"(?<=[.:])\s+(?=[A-Z]|python )", " ".join(comments), maxsplit=1)[0].rstrip(":")


def as_called(text: str) -> str:
    """Return the text with the command by which this process was called."""
    command = program()
    # The text beside a command stays in its column.
    pad = " " * (len(_FROM_A_CHECKOUT) - len(command))
    text = re.sub(rf"{_FROM_A_CHECKOUT} (\w[^\n]*?)(?=  )", rf"{command} \1{pad}", text)
    return text.replace(_FROM_A_CHECKOUT, command)
