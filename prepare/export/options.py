"""The group `export` of the command line: the exporter and its options, checked without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prepare.core.utils.options import as_written
from prepare.core.utils.suggest import choose_option
from prepare.errors import ConfigError, Problem
from prepare.export.exporter import EXPORTERS, Exporter

TASK = "export"


def exporter_of(options: Mapping[str, Any]) -> Exporter:
    """Return the exporter that the options name.

    Raises:
        ConfigError: with one problem for every error in them.
    """
    rest = dict(options)
    name = rest.pop("exporter", None)
    if not isinstance(name, str):
        wrong = f"{as_written(name)} is not an exporter"
        remedy = choose_option("", "export", list(EXPORTERS), noun="exporters")
        raise ConfigError("export.exporter", wrong, remedy)
    return EXPORTERS[name].from_options(rest)


def export_problems(
    options: Mapping[str, Any], *, task: str, mode: str, amp: str, plugins: bool
) -> Iterator[Problem]:
    """Yield the problems of the options, and of what they need of the rest of the configuration."""
    if task != TASK:
        if options:
            remedy = "write task=export to export, or drop it"
            yield Problem("export", f"is for task=export, and this is task={task}", remedy)
        return
    if not options:
        names = ", ".join(EXPORTERS)
        yield Problem("export", "no format is chosen", f"choose export=NAME; formats: {names}")
        return
    if mode == "train":
        yield Problem("mode", "an artefact is for inference", "drop mode=train")
    if amp != "none":
        remedy = "choose precision=bfloat16, or drop amp"
        yield Problem("amp", "an artefact holds no autocast", remedy)
    if plugins and options.get("exporter") not in EXPORTERS:
        return  # A plugin may register it; plugins are imported only in the job.
    try:
        exporter_of(options)
    except ConfigError as error:
        yield from error.problems
