"""Compare two runs, two audits or two recipes by their files, and describe the differences."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare import recipe
from prepare.audit import Audit
from prepare.core.utils import files
from prepare.core.utils.text import counts, plural, size
from prepare.errors import ConfigError, FileError
from prepare.job.headline import CONVOLUTIONS, BenchFigures, Headline, headline
from prepare.job.record import without_result
from prepare.job.results import read_results
from prepare.report.audit_changes import Change, audit_changes, audit_groups, text_of
from prepare.report.gist import gist_of
from prepare.report.sentences import timing_text, verified_text

if TYPE_CHECKING:
    from prepare.job.results import SavedResults

# Each kind of path on the command line, as messages name it.
_KINDS = {"run": "the record of a run", "audit": "an audit", "recipe": "a recipe"}
_SAME_KIND = "give two folders of runs, two audit.json or two recipe.yaml"
# Fields of an environment; the date always differs.
_ENVIRONMENT = (
    *("python", "torch", "platform", "cpu", "cores", "threads", "waiting", "devices", "git_commit"),
)


@dataclass(frozen=True, slots=True)
class Part:
    """One compared part, and its differences; `groups` are these with equal ones together."""

    title: str
    changes: tuple[Change, ...]
    groups: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Differences:
    """The parts in which two paths of one kind differ; `figures` compares the results of two runs.

    `gist` says in a line what the results of two runs differ in; empty if they do not.
    """

    kind: str
    first: str
    second: str
    parts: tuple[Part, ...]
    figures: tuple[Change, ...] = ()
    gist: str = ""

    @property
    def total(self) -> int:
        """Return the number of differences."""
        return sum(len(part.changes) for part in self.parts)


def read_differences(first: Path, second: Path) -> Differences:
    """Compare the records of two runs, two audits or two recipes.

    Raises:
        ConfigError: The paths are of different kinds.
        PrepareError: A path cannot be read, or has another format.
    """
    kind, second_kind = _kind(first), _kind(second)
    if kind != second_kind:
        sides = ((first, kind), (second, second_kind))
        wrong = " and ".join(
            f"{files.printable_path(path)} is {_KINDS[name]}" for path, name in sides
        )
        raise ConfigError("diff", wrong, _SAME_KIND)
    parts, figures, gist = _COMPARE[kind](first, second)
    parts = tuple(part for part in parts if part.changes)
    return Differences(kind, str(first), str(second), parts, tuple(figures), gist)


def _kind(path: Path) -> str:
    if path.is_dir():
        if (path / "sweep.json").is_file():
            remedy = "give the folder of one of its rows"
            raise FileError(files.printable_path(path), "is the folder of a sweep", remedy)
        return "run"
    return "recipe" if path.suffix in (".yaml", ".yml") else "audit"


_Compared = tuple[Iterable[Part], list[Change], str]


def _compare_audits(first: Path, second: Path) -> _Compared:
    return [_audit_part(Audit.load(first), Audit.load(second))], [], ""


def _compare_recipes(first: Path, second: Path) -> _Compared:
    return [_part("recipe", _recipe_changes(recipe.load(first), recipe.load(second)))], [], ""


def _compare_runs(first: Path, second: Path) -> _Compared:
    records = [_read_record(path) for path in (first, second)]
    headlines = [headline(r.result.figures if r.result else None) for r in records]
    results = [_results(*pair) for pair in zip(records, headlines, strict=True)]
    figures = [*_side_by_side(*results), *_times(*headlines)]
    recipes = [
        recipe.loads(record.recipe) if record.recipe is not None else {} for record in records
    ]
    audits = [record.audit or Audit([], {}) for record in records]
    parts = [
        _part("recipe", _recipe_changes(*recipes)),
        _part("command line", _changes(*map(_choices, records))),
        _part("results", [change for change in figures if not change.is_same]),
        _audit_part(*audits),
        _part("environment", _changes(*map(_environment, records))),
    ]
    statuses = [result["status"] for result in results]
    return parts, figures, gist_of(headlines, statuses)


_COMPARE: dict[str, Callable[[Path, Path], _Compared]] = {
    "run": _compare_runs,
    "audit": _compare_audits,
    "recipe": _compare_recipes,
}


def _part(title: str, changes: list[Change]) -> Part:
    return Part(title, tuple(changes), tuple(changes))


def _audit_part(first: Audit, second: Audit) -> Part:
    return Part("audit", tuple(audit_changes(first, second)), tuple(audit_groups(first, second)))


def _read_record(folder: Path) -> SavedResults:
    """Read the record of a run; raise FileError if any file is unreadable, as the result would be wrong."""
    if (error := without_result(folder)) and not (folder / "audit.json").is_file():
        raise error
    record = read_results(folder)
    if record.problems:
        raise FileError(files.printable_path(folder), record.problems[0])
    return record


def _recipe_changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Change]:
    changes = []
    for name in dict.fromkeys([*first, *second]):
        options = [steps.get(name) for steps in (first, second)]
        if all(options):
            changes += _changes(*(_options(name, values) for values in options))
        elif (name in first) != (name in second) or options[0] != options[1]:
            changes.append(Change(f"steps.{name}", _step(name, first), _step(name, second)))
    orders = [
        [name for name in steps if name in first and name in second] for steps in (first, second)
    ]
    if orders[0] != orders[1]:
        changes.append(Change("the order of the steps", *map(", ".join, orders)))
    return changes


def _options(name: str, options: Mapping[str, Any] | None) -> dict[str, str]:
    return {f"steps.{name}.{key}": text_of(value) for key, value in (options or {}).items()}


def _step(name: str, steps: Mapping[str, Any]) -> str:
    """Return the options of a step as text: `dropped` for null, empty without the step."""
    if name not in steps:
        return ""
    options = steps[name]
    return "dropped" if options is None else text_of(options)


def _choices(record: SavedResults) -> dict[str, str]:
    """Return the overrides by key, and the choices of the groups."""
    if record.job is None:
        return {}
    pairs = (str(override).partition("=") for override in record.job.overrides)
    overrides = {key: value for key, _, value in pairs if not key.startswith("hydra")}
    groups = {str(k): str(v) for k, v in record.job.choices.items() if v is not None}
    return groups | overrides


def _environment(record: SavedResults) -> dict[str, str]:
    environment = record.environment or {}
    versions = environment.get("packages") or {}
    values = {key: environment.get(key) for key in _ENVIRONMENT}
    values |= {f"packages.{name}": version for name, version in versions.items()}
    values |= {f"accelerator.{key}": v for key, v in (environment.get("accelerator") or {}).items()}
    return {key: text_of(value) for key, value in values.items() if value not in (None, [])}


def _results(record: SavedResults, figures: Headline) -> dict[str, str]:
    """Return the results of a job as texts; the times are apart, in `_times`."""
    result, lost = record.result, figures.lost
    texts = {"status": result.status if result else "not finished"}
    if result and result.error:
        texts["error"] = result.error
    if figures.convolutions:
        texts["convolutions"] = counts(figures.convolutions, CONVOLUTIONS)
    if figures.bytes_before is not None and figures.bytes_after is not None:
        before, after = size(figures.bytes_before), size(figures.bytes_after)
        texts["memory of the tensors"] = f"{before} before, {after} after"
    if lost and lost.status != "ok":
        texts["layout lost"] = lost.status
    elif lost:
        texts["layout lost"] = plural(lost.breaks, "time")
        texts["copied for layouts"] = size(lost.copied_bytes)
        texts["convolutions in the layout"] = f"{lost.in_layout} of {lost.convolutions}"
    texts["verified"] = verified_text(figures.verified)
    return texts


def _times(first: Headline, second: Headline) -> Iterator[Change]:
    """Yield the times of both; if their intervals overlap, neither is known to be faster."""
    timed = [{entry.what: entry for entry in side.timed} for side in (first, second)]
    for what in dict.fromkeys([*timed[0], *timed[1]]):
        before, after = timed[0].get(what), timed[1].get(what)
        name = f"time of one {what}"
        if before is None or after is None:
            yield Change(name, _time(before), _time(after))
            continue
        note = "unclear which is faster, the intervals overlap" if before.overlaps(after) else ""
        # The figures in the reason of a missing comparison are never the same twice.
        same = (before.verdict, after.verdict) == ("not compared", "not compared")
        same = same and _without_numbers(before.reason) == _without_numbers(after.reason)
        yield Change(name, _time(before), _time(after), note=note, same=same)


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "", text)


def _time(timed: BenchFigures | None) -> str:
    if timed is None:
        return ""
    return timing_text(timed) + (f": {timed.reason}" if timed.reason else "")


def _side_by_side(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[Change]:
    for key in dict.fromkeys([*first, *second]):
        if first.get(key) or second.get(key):
            yield Change(key, first.get(key, ""), second.get(key, ""))


def _changes(first: Mapping[str, str], second: Mapping[str, str]) -> list[Change]:
    return [change for change in _side_by_side(first, second) if change.first != change.second]
