"""Compare two runs, two audits or two recipes by their files: a table of the items that differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prepare import recipe
from prepare.app.job.record import Result, Results, overlap, read_results, without_result
from prepare.app.report.sweep_table import columns
from prepare.app.sweep.ranking import rank
from prepare.app.sweep.summary import Summary, SweepRow, choices_of
from prepare.audit import Audit
from prepare.core.utils import files
from prepare.errors import ConfigError, FileError

# Each kind of path on the command line, as messages name it.
_KINDS = {"run": "the record of a run", "audit": "an audit", "recipe": "a recipe"}
_SAME_KIND = "give two folders of runs, two audit.json or two recipe.yaml"
# The name of an item and its text on both sides, empty if a side has no such item.
Row = tuple[str, ...]


def differences(first: Path, second: Path) -> list[Row]:
    """Return each item that differs: of two runs the words, results, recipe, environment and tensors.

    Raises:
        ConfigError: the paths are of different kinds.
        PrepareError: a path cannot be read, or has another format.
    """
    paths = (first, second)
    kinds = [_kind(path) for path in paths]
    if kinds[0] != kinds[1]:
        sides = zip(paths, kinds, strict=True)
        texts = (f"{files.printable_path(path)} is {_KINDS[kind]}" for path, kind in sides)
        raise ConfigError("diff", " and ".join(texts), _SAME_KIND)
    if kinds[0] == "recipe":
        items = _both(*(_steps(recipe.load(path)) for path in paths))
    elif kinds[0] == "audit":
        items = _tensors(*map(Audit.load, paths))
    else:
        items = _of_runs(*map(_read_run, paths))
    return [item for item in items if item[1] != item[2]]


def _kind(path: Path) -> str:
    if not path.is_dir():
        files.read_bytes(path)  # says what is wrong with one that does not exist
        return "recipe" if path.suffix in (".yaml", ".yml") else "audit"
    if (path / "sweep.json").is_file():
        remedy = "give the folder of one of its rows"
        raise FileError(files.printable_path(path), "is the folder of a sweep", remedy)
    return "run"


def _read_run(folder: Path) -> Results:
    if (error := without_result(folder)) and not (folder / "audit.json").is_file():
        raise error
    return read_results(folder)


def _of_runs(*runs: Results) -> Iterator[Row]:
    rows = [_row(number, run) for number, run in enumerate(runs)]
    summary = Summary(rows, [*{key: 0 for row in rows for key in row.choices}])
    for column in columns(summary, rank(summary)):
        if column.title not in ("#", "run time"):
            yield column.title, *map(column.text, rows)
    yield "error", *(row.reason or "" for row in rows)
    before, after = (row.figures for row in rows)
    if before.get("timed") == after.get("timed") and overlap(before, after):
        same = before == after
        yield "which is faster", "", "" if same else "unclear, the intervals overlap"
    yield from _both(*(_steps(recipe.loads(run.recipe)) if run.recipe else {} for run in runs))
    # The date always differs.
    yield from _both(*(_flat({**(run.environment or {}), "date": ""}) for run in runs))
    yield from _tensors(*(run.audit or Audit([], {}) for run in runs))


def _row(number: int, run: Results) -> SweepRow:
    """Return a run as a row of a sweep."""
    chosen = {key: str(value) for key, value in run.job.choices.items() if value}
    chosen |= choices_of(run.job.overrides)
    result = run.result or Result("not finished")
    figures = result.figures or {}
    return SweepRow(number, chosen, result.status, None, result.error, figures=figures)


def _both(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[Row]:
    """Yield each item of two flat sides."""
    for name in {**first, **second}:
        yield name, first.get(name, ""), second.get(name, "")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested values by their dotted names, as texts."""
    found: dict[str, str] = {}
    for key, value in values.items():
        nested = isinstance(value, dict) and value
        found |= _flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": _text(value)}
    return found


def _text(value: Any) -> str:
    """Return a value as text: a word as it is, all else as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str, separators=(",", ":"))


def _steps(steps: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the steps in their order, and each of their options."""
    return {"steps": ", ".join(steps), **_flat(steps, "steps.")}


def _tensors(first: Audit, second: Audit) -> Iterator[Row]:
    """Yield each tensor that differs, with the fields that do."""
    for each in first.diff(second):
        if each.only_in:
            sides = ("present", "") if each.only_in == "ours" else ("", "present")
        else:
            pairs = [[f"{key} {_text(v)}" for v in pair] for key, pair in each.fields.items()]
            sides = ("; ".join(pair[0] for pair in pairs), "; ".join(pair[1] for pair in pairs))
        yield each.tensor, *sides
