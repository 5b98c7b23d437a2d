"""What differs between two runs, two audits or two recipes: read from their files, as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare import recipe
from prepare.audit import Audit
from prepare.core.utils import files
from prepare.core.utils.text import counts, plural, size
from prepare.errors import ConfigError, FileError
from prepare.job.headline import CONVOLUTIONS, Headline, Timed, headline
from prepare.job.results import read_results
from prepare.report.sentences import time_text, verified_text

if TYPE_CHECKING:
    from prepare.job.results import SavedResults

# What a path on the command line may be, and how that is said.
_KINDS = {"run": "the folder of a run", "audit": "an audit", "recipe": "a recipe"}
_SAME_KIND = "give two folders of runs, two audit.json or two recipe.yaml"
# Of an environment; the date differs always.
_PLACE = ("python", "torch", "platform", "cpu", "cores", "threads", "devices", "git_commit")


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that differs: how it is in the first and in the second, empty where it is not there.

    `text` is another way to say so in a line, `note` what to bear in mind.
    """

    what: str
    ours: str
    theirs: str
    text: str = ""
    note: str = ""

    def __str__(self) -> str:
        text = self.text or f"{self.what}: {self.ours or 'nothing'} -> {self.theirs or 'nothing'}"
        return f"{text}; {self.note}" if self.note else text


@dataclass(frozen=True, slots=True)
class Differing:
    """One part of what was compared, and what differs in it."""

    title: str
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Differences:
    """Two things of one kind; `parts` are those that differ, `figures` those of both, side by side."""

    kind: str
    ours: str
    theirs: str
    parts: tuple[Differing, ...]
    figures: tuple[Change, ...] = ()

    @property
    def total(self) -> int:
        """How many things differ."""
        return sum(len(part.changes) for part in self.parts)


def read_differences(ours: Path, theirs: Path) -> Differences:
    """Compares two folders of runs, two audits or two recipes.

    Raises:
        ConfigError: they are of different kinds.
        PrepareError: one of them cannot be read, or is not what it looks like.
    """
    kind, other = _kind(ours), _kind(theirs)
    if kind != other:
        said = (
            f"{files.printable_path(p)} is {_KINDS[k]}" for p, k in ((ours, kind), (theirs, other))
        )
        raise ConfigError("diff", " and ".join(said), _SAME_KIND)
    parts, figures = _COMPARE[kind](ours, theirs)
    found = tuple(Differing(title, tuple(changes)) for title, changes in parts if changes)
    return Differences(kind, str(ours), str(theirs), found, tuple(figures))


_Parts = Iterable[tuple[str, list[Change]]]


def _kind(path: Path) -> str:
    if path.is_dir():
        if (path / "sweep.json").is_file():
            raise FileError(
                files.printable_path(path), "is the folder of a sweep", "give that of a row"
            )
        return "run"
    return "recipe" if path.suffix in (".yaml", ".yml") else "audit"


def _audits(ours: Path, theirs: Path) -> tuple[_Parts, list[Change]]:
    return [("audit", _audit_changes(Audit.load(ours), Audit.load(theirs)))], []


def _recipes(ours: Path, theirs: Path) -> tuple[_Parts, list[Change]]:
    return [("recipe", _recipe_changes(recipe.load(ours), recipe.load(theirs)))], []


def _runs(ours: Path, theirs: Path) -> tuple[_Parts, list[Change]]:
    runs, found = [_run(path) for path in (ours, theirs)], [headline(p) for p in (ours, theirs)]
    known = [_figures(run, one) for run, one in zip(runs, found, strict=True)]
    figures = [*_side_by_side(*known), *_times(*found)]
    steps = [recipe.loads(run.recipe) if run.recipe is not None else {} for run in runs]
    audits = [run.audit or Audit([], {}) for run in runs]
    asked = _changes(*(_asked(run) for run in runs))
    places = _changes(*(_place(run) for run in runs))
    return [
        ("recipe", _recipe_changes(*steps)),
        ("command line", asked),
        ("results", [change for change in figures if change.ours != change.theirs]),
        ("audit", _audit_changes(*audits)),
        ("environment", places),
    ], figures


_COMPARE: dict[str, Callable[[Path, Path], tuple[_Parts, list[Change]]]] = {
    "run": _runs,
    "audit": _audits,
    "recipe": _recipes,
}


def _run(folder: Path) -> SavedResults:
    """What a run left; an error where any of it cannot be read, for then the answer would be wrong."""
    run = read_results(folder)
    if run.problems:
        raise FileError(files.printable_path(folder), run.problems[0])
    return run


def _audit_changes(ours: Audit, theirs: Audit) -> list[Change]:
    found = []
    for one in ours.diff(theirs):
        sides = [
            "; ".join(f"{name} {_word(pair[side])}" for name, pair in one.fields.items())
            for side in (0, 1)
        ]
        if one.only_in:
            sides = ["is there" if one.only_in == side else "" for side in ("ours", "theirs")]
        found.append(Change(one.tensor, *sides, text=str(one)))
    return found


def _recipe_changes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Change]:
    found = []
    for name in dict.fromkeys([*ours, *theirs]):
        one, other = ours.get(name), theirs.get(name)
        if one and other:
            found += _changes(*(_options(name, options) for options in (one, other)))
        elif (name in ours) != (name in theirs) or one != other:
            sides = (_step(name, steps) for steps in (ours, theirs))
            found.append(Change(f"steps.{name}", *sides))
    common = [
        [name for name in steps if name in ours and name in theirs] for steps in (ours, theirs)
    ]
    if common[0] != common[1]:
        found.append(Change("the order of the steps", *(", ".join(names) for names in common)))
    return found


def _options(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    return {f"steps.{name}.{key}": _word(value) for key, value in options.items()}


def _step(name: str, steps: Mapping[str, Any]) -> str:
    """A step that only one of them has, or that one of them drops or leaves as it comes."""
    if name not in steps:
        return ""
    options = steps[name]
    return "dropped" if options is None else _word(options)


def _asked(run: SavedResults) -> dict[str, str]:
    """The overrides of the command line by key, and the options chosen in each group."""
    if run.job is None:
        return {}
    pairs = (str(word).partition("=") for word in run.job.overrides)
    given = {key: value for key, _, value in pairs if not key.startswith("hydra")}
    return {str(k): str(v) for k, v in run.job.choices.items() if v is not None} | given


def _place(run: SavedResults) -> dict[str, str]:
    found = run.environment or {}
    packages = {f"packages.{key}": value for key, value in (found.get("packages") or {}).items()}
    known = {key: found.get(key) for key in _PLACE} | packages
    return {key: _word(value) for key, value in known.items() if value not in (None, [])}


def _figures(run: SavedResults, found: Headline) -> dict[str, str]:
    """What the run came to, in words: result, convolutions, memory, flow, verification, times."""
    known = {"status": run.result.status if run.result else "not ended"}
    if run.result and run.result.error:
        known["why"] = run.result.error
    if found.convolutions:
        known["convolutions"] = counts(found.convolutions, CONVOLUTIONS)
    if found.bytes_before is not None and found.bytes_after is not None:
        before, after = size(found.bytes_before), size(found.bytes_after)
        known["memory of the tensors"] = f"{before} before, {after} after"
    if found.lost and found.lost.status != "ok":
        known["layout lost"] = found.lost.status
    elif found.lost:
        lost = found.lost
        known["layout lost"] = plural(lost.breaks, "time")
        known["copied for layouts"] = size(lost.copied_bytes)
        known["convolutions in the layout"] = f"{lost.in_layout} of {lost.convolutions}"
    known["verified"] = verified_text(found.verified)
    return known


def _times(ours: Headline, theirs: Headline) -> Iterator[Change]:
    """The times of both; where their intervals meet, one is not told to be faster than the other."""
    known = [{one.what: one for one in each.timed} for each in (ours, theirs)]
    for what in dict.fromkeys([*known[0], *known[1]]):
        one, other = (each.get(what) for each in known)
        sides = [_time(each) if each else "" for each in (one, other)]
        meet = one is not None and other is not None and one.meets(other)
        yield Change(f"time of one {what}", *sides, note="the intervals meet" if meet else "")


def _time(found: Timed) -> str:
    return time_text(found) + (f": {found.reason}" if found.reason else "")


def _side_by_side(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[Change]:
    for key in dict.fromkeys([*ours, *theirs]):
        if ours.get(key) or theirs.get(key):
            yield Change(key, ours.get(key, ""), theirs.get(key, ""))


def _changes(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[Change]:
    return [one for one in _side_by_side(ours, theirs) if one.ours != one.theirs]


def _word(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str, separators=(",", ":"))
