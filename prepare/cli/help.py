"""Build the page of --help, or of one group, from the configuration files, without Hydra."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from string import Template
from typing import Any, get_args, get_type_hints

import yaml

from prepare.core.utils.folders import conf_dir
from prepare.core.utils.suggest import choose
from prepare.errors import ConfigError
from prepare.job.record import shown_files
from prepare.job.settings import group_names, level_names
from prepare.registry import ordered_stages, tasks

# The command as the template and the files of options write it.
_FROM_A_CHECKOUT = "python run.py"
# The width of a key with its value.
_KEY = 23


def help_page(width: int, config_dir: str | None = None) -> str:
    """Return the page, its lists folded to `width` columns; `config_dir` is a folder of more options."""
    text = (conf_dir() / "config.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    template = yaml.load(text, Loader=loader)["hydra"]["help"]["template"]  # noqa: S506  both are safe
    names = [f"{group}: {', '.join(_options(group, config_dir))}" for group in group_names()]
    names.append(f"hydra/launcher: {', '.join(['basic', *_options('launcher', None)])}")
    folded = (textwrap.fill(text, width, subsequent_indent="    ") for text in names)
    files = f"A run writes a folder: {', '.join(shown_files())}, prepare.log, .hydra/."
    page = Template(template).safe_substitute(
        APP_CONFIG_GROUPS="\n".join(folded) + "\n",
        TASKS="\n".join(_key_rows(_task_rows(), width)),
        STAGES="\n".join(_key_rows(_stage_rows(), width)),
        FILES=textwrap.fill(files, width),
    )
    return as_called(page.rstrip())


def group_page(group: str, width: int, config_dir: str | None = None) -> str:
    """Return one line for each option of a group: its name, and the first sentence of its file.

    Raises:
        ConfigError: there is no such group.
    """
    names = (*group_names(), *level_names())
    if group not in names:
        raise ConfigError(group, "no such group", choose(group, names, noun="groups"))
    options = _options(group, config_dir)
    column = max(map(len, options)) + 2
    rows = [
        textwrap.fill(
            _sentence(path),
            width,
            initial_indent=f"  {name.ljust(column)}",
            subsequent_indent=" " * (column + 2),
        )
        for name, path in options.items()
    ]
    return as_called("\n".join([f"{group}: choose one with {group}=OPTION", *rows]))


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
            example = "|".join(words) or each.metadata["example"] or as_text(default)
            yield f"{name}={example}", f"{about} ({as_text(default)})"


def as_text(value: Any) -> str:
    """Return a default as a user writes it: `null`, `true`, `[]`, `60`."""
    if isinstance(value, tuple | list):
        return f"[{','.join(map(str, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def _key_rows(rows: Iterable[tuple[str, str]], width: int) -> Iterator[str]:
    for key, text in rows:
        start = f"  {key.ljust(_KEY)}  "
        yield textwrap.fill(
            text,
            width,
            initial_indent=start,
            subsequent_indent=" " * (_KEY + 4),
            break_on_hyphens=False,
        )


def _options(group: str, config_dir: str | None) -> dict[str, Path]:
    """Return the file of each option of a group, by name."""
    folders = [conf_dir(), *([Path(config_dir)] if config_dir else [])]
    paths = {path.stem: path for folder in folders for path in (folder / group).glob("*.yaml")}
    return dict(sorted(paths.items()))


def _sentence(path: Path) -> str:
    """Return the first sentence of the comment at the top of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line[1:].strip() for line in lines if line[:1] == "#" and "@package" not in line]
    return re.split(r"(?<=[.:])\s+(?=[A-Z]|python )", " ".join(comments), maxsplit=1)[0].rstrip(":")


def as_called(text: str) -> str:
    """Return the text with the command by which this process was called."""
    if sys.argv[0].endswith(".py"):
        return text
    # The text beside a command stays in its column.
    pad = " " * (len(_FROM_A_CHECKOUT) - len("prepare"))
    text = re.sub(rf"{_FROM_A_CHECKOUT} (\w[^\n]*?)(?=  )", rf"prepare \1{pad}", text)
    return text.replace(_FROM_A_CHECKOUT, "prepare")
