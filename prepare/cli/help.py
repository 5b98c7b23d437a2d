"""Build the page of --help from the configuration files, without Hydra."""

from __future__ import annotations

import textwrap
from pathlib import Path
from string import Template

import yaml

from prepare.core.utils.conf_folder import conf_dir
from prepare.job.settings import GROUPS


def help_page(width: int, config_dir: str | None = None) -> str:
    """Return the page, its lists folded to `width` columns; `config_dir` is a folder of more options."""
    text = (conf_dir() / "config.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    template = yaml.load(text, Loader=loader)["hydra"]["help"]["template"]  # noqa: S506  both are safe
    folders = [conf_dir(), *([Path(config_dir)] if config_dir else [])]
    groups = (f"{group}: {', '.join(_options(folders, group))}" for group in GROUPS)
    folded = (textwrap.fill(group, width, subsequent_indent="    ") for group in groups)
    return Template(template).safe_substitute(APP_CONFIG_GROUPS="\n".join(folded) + "\n").rstrip()


def _options(folders: list[Path], group: str) -> list[str]:
    names = (path.stem for folder in folders for path in (folder / group).glob("*.yaml"))
    return sorted(set(names))
