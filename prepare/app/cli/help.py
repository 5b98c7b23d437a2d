"""Build the pages of --help: the first, the whole, one topic, and the steps; without Hydra."""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from prepare.app.cli.flags import USAGES
from prepare.app.job.record import shown_files
from prepare.app.job.settings import ADDED_GROUP, group_names, key_names, level_names
from prepare.core.utils.folders import conf_dir
from prepare.core.utils.options import describe, plain
from prepare.core.utils.suggest import listed, nearest
from prepare.errors import ConfigError, PrepareError
from prepare.registry import STEPS
from prepare.stages.registry import ordered_stages, tasks

if TYPE_CHECKING:
    from prepare.step import Step

# The command as the template and the files of options write it.
_FROM_A_CHECKOUT = "python run.py"
# The width of a key with its value.
_KEY = 23


def first_page(width: int, config_dir: str | None = None) -> str:
    """Return the page of --help, folded to `width` columns; `config_dir` is a folder of more options."""
    groups = {group: _options(group, config_dir) for group in group_names()}
    choices = ((_written(group), listed(list(names))) for group, names in groups.items())
    levels = (row for row in _stage_rows() if row[0].partition("=")[0] in level_names())
    return _filled(
        "help_first.txt",
        GROUPS="\n".join(_rows(choices, width, max(map(len, groups)) + 1)),
        TASKS="\n".join(_rows(_task_rows(), width)),
        LEVELS="\n".join(_rows(levels, width)),
        COMMANDS=", ".join(
            usage.partition("\n")[0].partition(" [")[0] for usage in USAGES.values()
        ),
    )


def whole_page(width: int, config_dir: str | None = None) -> str:
    """Return the page of `--help all`: every group, key, command and flag."""
    names = [
        f"{_written(group)}: {', '.join(_options(group, config_dir))}" for group in group_names()
    ]
    names.append(f"hydra/launcher: {', '.join(['basic', *_options('launcher', None)])}")
    folded = (textwrap.fill(text, width, subsequent_indent="    ") for text in names)
    files = f"A run writes a folder: {', '.join(shown_files())}, prepare.log, .hydra/."
    return _filled(
        "help_all.txt",
        APP_CONFIG_GROUPS="\n".join(folded) + "\n",
        TASKS="\n".join(_rows(_task_rows(), width)),
        STAGES="\n".join(_rows(_stage_rows(), width)),
        FILES=textwrap.fill(files, width),
    )


def topic_page(topic: str, width: int, config_dir: str | None = None) -> str:
    """Return what there is to say of a group, a task, a key or a step.

    Raises:
        ConfigError: there is nothing of that name.
    """
    if topic == "all":
        return whole_page(width, config_dir)
    if topic == "steps":
        return steps_text(width)
    parts = [*_group(topic, width, config_dir), *_keys(topic, width)]
    if topic in STEPS:
        parts.append("\n".join(_step(topic, width)))
    if not parts:
        topics = dict.fromkeys([*key_names(), *tasks(), *STEPS, *USAGES, "all"])
        wrong = "is not a group, task, key or step"
        near = nearest(topic, [name for name in topics if name != "hydra"])[:1]
        meant = f"did you mean --help {near[0]}? " if near else ""
        raise ConfigError(topic, wrong, f"{meant}--help all shows every name")
    return as_called("\n".join(parts))


def _group(group: str, width: int, config_dir: str | None) -> Iterator[str]:
    """Yield one line for each option of a group: its name, and the first sentence of its file."""
    if group not in (*group_names(), *level_names()):
        return
    options = _options(group, config_dir)
    texts = ((name, _sentence(path)) for name, path in options.items())
    yield f"{group}: choose one with {_written(group)}=OPTION"
    yield from _rows(texts, width, max(map(len, options)))


def _written(group: str) -> str:
    """Return a group as an override of it begins."""
    return f"+{group}" if group == ADDED_GROUP else group


def _keys(topic: str, width: int) -> Iterator[str]:
    """Yield the rows of the whole page on a key and the keys below it, or a task."""
    key = re.compile(rf"  (task={re.escape(topic)} |{re.escape(topic)}[.=])")
    shown = False
    for row in whole_page(width).splitlines():
        # The lines of a row that follow the first begin in the column of its text.
        shown = bool(key.match(row)) or (shown and row.startswith("      "))
        if shown:
            yield row


def _filled(name: str, **parts: str) -> str:
    text = (conf_dir() / name).read_text(encoding="utf-8")
    return as_called(Template(text).substitute(parts).rstrip())


def steps_text(width: int, names: Iterable[str] = ()) -> str:
    """Return the text of these steps, or of all, for a terminal of `width` columns."""
    return "\n\n".join("\n".join(_step(name, width)) for name in names or STEPS)


def _step(name: str, width: int) -> Iterator[str]:
    try:
        cls = STEPS[name]
    except PrepareError as error:
        yield f"{name}: {error.problems[0].wrong}"
        return
    yield f"{name}  ({cls.phase})"
    for paragraph in _card(cls):
        wrapped = textwrap.wrap(paragraph, width - 2, subsequent_indent="    ")
        yield from (f"  {text}" for text in wrapped)
    hints = get_type_hints(cls, include_extras=True)
    options = {f"steps.{name}.{each.name}={_default(each)}": each.name for each in fields(cls)}
    longest = max(map(len, options), default=0)
    for option, key in options.items():
        yield f"    {option.ljust(longest)}  {describe(hints[key])}"


def _card(cls: type[Step]) -> list[str]:
    """Return the paragraphs of the docstring: summary, `Helps`, `Hurts`, `Source`."""
    text = inspect.getdoc(cls) or ""
    if text.startswith(f"{cls.__name__}("):
        return []  # the docstring that dataclass generates
    paragraphs: list[str] = []
    for text_line in text.splitlines():
        starts = text_line.partition(":")[0] in ("Helps", "Hurts", "Source")
        if starts or not text_line.strip() or not paragraphs:
            paragraphs.append(text_line.strip())
        else:
            paragraphs[-1] = f"{paragraphs[-1]} {text_line.strip()}".strip()
    return [paragraph for paragraph in paragraphs if paragraph]


def _default(field: Field[Any]) -> str:
    """Return the default as the command line writes it."""
    if field.default is not MISSING:
        return _as_text(plain(field.default))
    if field.default_factory is not MISSING:
        return _as_text(plain(field.default_factory()))
    return "... (required)"


def _task_rows() -> Iterator[tuple[str, str]]:
    """Yield each word of `task=` with what it does."""
    for word, task in tasks().items():
        yield f"task={word}", task.help


def _stage_rows() -> Iterator[tuple[str, str]]:
    """Yield each key of the stages with what it is for, and its default."""
    for cls in ordered_stages():
        hints = get_type_hints(cls)
        for each in fields(cls):
            if not (about := each.metadata.get("help")):
                continue
            default = getattr(cls, each.name, None)
            name = cls.name if each.name == "level" else f"{cls.name}.{each.name}"
            words = get_args(hints[each.name]) if each.name == "level" else ()
            example = "|".join(words) or each.metadata["example"] or _as_text(default)
            shown = "" if default is None else f" ({_as_text(default)})"
            yield f"{name}={example}", f"{about}{shown}"


def _as_text(value: Any) -> str:
    """Return a default as a user writes it: `null`, `true`, `[]`, `60`."""
    if isinstance(value, tuple | list):
        return f"[{','.join(map(str, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def _rows(rows: Iterable[tuple[str, str]], width: int, column: int = _KEY) -> Iterator[str]:
    """Yield a line for each name and text, folded to `width`; names take a column."""
    for name, text in rows:
        yield (
            textwrap.fill(
                text or " ",
                width,
                initial_indent=f"  {name.ljust(column)}  ",
                subsequent_indent=" " * (column + 4),
                break_on_hyphens=False,
            ).rstrip()
            or f"  {name}"
        )


def _options(group: str, config_dir: str | None) -> dict[str, Path]:
    """Return the file of each option of a group, by name."""
    folders = [conf_dir(), *([Path(config_dir)] if config_dir else [])]
    paths = {path.stem: path for folder in folders for path in (folder / group).glob("*.yaml")}
    return dict(sorted(paths.items()))


def _sentence(path: Path) -> str:
    """Return the first sentence of the comment at the top of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [
        line[1:].strip() for line in lines if line[:1] == "#" and not line.startswith("# @package")
    ]
    return re.split(r"(?<=[.:])\s+(?=[A-Z]|python )", " ".join(comments), maxsplit=1)[0].rstrip(":")


def as_called(text: str) -> str:
    """Return the text with the command by which this process was called."""
    called = Path(sys.argv[0])
    if called.suffix == ".py" and called.name != "__main__.py":
        return text
    as_module = called.parts[-2:] == ("prepare", "__main__.py")
    command = "python -m prepare" if as_module else "prepare"
    # The text beside a command stays in its column.
    pad = " " * (len(_FROM_A_CHECKOUT) - len(command))
    text = re.sub(rf"{_FROM_A_CHECKOUT} (\w[^\n]*?)(?=  )", rf"{command} \1{pad}", text)
    return text.replace(_FROM_A_CHECKOUT, command)
