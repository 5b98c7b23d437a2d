"""Build the page of --help, or of one group, from the configuration files, without Hydra."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from string import Template

import yaml

from prepare.core.utils.conf_folder import conf_dir
from prepare.core.utils.suggest import choose
from prepare.errors import ConfigError
from prepare.job.settings import GROUPS, LEVELS

# The command as the template and the files of options write it.
_FROM_A_CHECKOUT = "python run.py"


def help_page(width: int, config_dir: str | None = None) -> str:
    """Return the page, its lists folded to `width` columns; `config_dir` is a folder of more options."""
    text = (conf_dir() / "config.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    template = yaml.load(text, Loader=loader)["hydra"]["help"]["template"]  # noqa: S506  both are safe
    groups = [f"{group}: {', '.join(_options(group, config_dir))}" for group in GROUPS]
    groups.append(f"hydra/launcher: {', '.join(['basic', *_options('launcher', None)])}")
    folded = (textwrap.fill(group, width, subsequent_indent="    ") for group in groups)
    page = Template(template).safe_substitute(APP_CONFIG_GROUPS="\n".join(folded) + "\n")
    return as_called(page.rstrip())


def group_page(group: str, width: int, config_dir: str | None = None) -> str:
    """Return one line for each option of a group: its name, and the first sentence of its file.

    Raises:
        ConfigError: there is no such group.
    """
    groups = (*GROUPS, *LEVELS)
    if group not in groups:
        raise ConfigError(group, "no such group", choose(group, groups, noun="groups"))
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
