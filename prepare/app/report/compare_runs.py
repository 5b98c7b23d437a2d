"""Compare two runs, two audits or two recipes by their files, and describe the differences."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prepare import recipe
from prepare.app.job.headline import CONVOLUTIONS, BenchFigures, Headline, headline
from prepare.app.job.record import without_result
from prepare.app.job.results import SavedResults, read_results
from prepare.app.report.sentences import timing_text, verified_text
from prepare.audit import Audit, AuditRow, Difference
from prepare.core.document import Document, Folded, Table, Text, columns
from prepare.core.utils import files
from prepare.core.utils.text import counts, plural, size
from prepare.errors import ConfigError, FileError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

# Each kind of path on the command line, as messages name it.
_KINDS = {"run": "the record of a run", "audit": "an audit", "recipe": "a recipe"}
_SAME_KIND = "give two folders of runs, two audit.json or two recipe.yaml"
# Fields of an environment; the date always differs.
_ENVIRONMENT = (
    *("python", "torch", "platform", "cpu", "cores", "threads", "waiting", "devices", "git_commit"),
)
# Fields whose values differ with the shape of a tensor: a group names them without values.
_OWN = ("stride", "before", "shape", "shared_with")
# A class of this prefix replaces the class of torch that follows it.
_REPAIRED = "Keeping"


@dataclass(frozen=True, slots=True)
class Change:
    """One item of both sides as text, empty if it is absent.

    `text` replaces the default line for the terminal; `note` is a remark; `same` says that the values are
    the same for a reader, though their texts differ.
    """

    name: str
    first: str
    second: str
    text: str = ""
    note: str = ""
    same: bool = field(default=False, kw_only=True)

    @property
    def word(self) -> str:
        """Return `same`, `differs`, `only in A` or `only in B`."""
        if self.same or self.first == self.second:
            return "same"
        return "only in B" if not self.first else "only in A" if not self.second else "differs"

    def __str__(self) -> str:
        sides = f"{self.first or 'absent'} -> {self.second or 'absent'}"
        text = self.text or f"{self.name}: {sides}"
        return f"{text}; {self.note}" if self.note else text


@dataclass(frozen=True, slots=True)
class ComparedPart:
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
    parts: tuple[ComparedPart, ...]
    figures: tuple[Change, ...] = ()
    gist: str = ""

    @property
    def total(self) -> int:
        """Return the number of differences."""
        return sum(len(part.changes) for part in self.parts)

    def lines(self, *, all_changes: bool = False) -> Iterator[str]:
        """Yield the gist and a line for each difference; `all_changes` does not group equal ones."""
        if self.gist:
            yield self.gist
        indent = "  " if self.kind == "run" else ""
        hidden = False
        for part in self.parts:
            if indent:
                yield f"{part.title}: {plural(len(part.changes), 'difference')}"
            shown = part.changes if all_changes else part.groups
            hidden = hidden or len(shown) < len(part.changes)
            yield from (f"{indent}{change}" for change in shown)
        yield f"{self.count}; --all prints each tensor" if hidden else self.count

    @property
    def count(self) -> str:
        """Return `3 differences`, or `no difference`."""
        return plural(self.total, "difference") if self.total else "no difference"

    def documents(self) -> Iterator[Document]:
        """Yield the sections of a page: both sides, then a table for each part."""
        if not self.total:
            text = Text(text=f"The two {self.kind}s do not differ in any compared item.")
            yield Document(name="nothing", title="No difference", parts=lambda: (text,))
        if self.figures:
            yield _document("figures", "Side by side", self.figures)
        for part in self.parts:
            if part.title != "results":  # those are side by side
                title = f"{part.title.capitalize()}: {plural(len(part.changes), 'difference')}"
                every = part.changes if len(part.groups) < len(part.changes) else ()
                yield _document(part.title.replace(" ", "-"), title, part.groups, every)


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
    figures: tuple[Change, ...] = ()
    gist = ""
    if kind == "run":
        records = [_read_record(path) for path in (first, second)]
        headlines = [headline(r.result.figures if r.result else None) for r in records]
        results = list(map(_results, records, headlines))
        figures = (*_items(*results), *_times(*headlines))
        gist = _gist(headlines, [each["status"] for each in results])
        parts = [
            _recipe_part(
                *(recipe.loads(r.recipe) if r.recipe is not None else {} for r in records)
            ),
            _part("command line", _items(*map(_choices, records))),
            _part("results", figures),
            _audit_part(*(record.audit or Audit([], {}) for record in records)),
            _part("environment", _items(*map(_environment, records))),
        ]
    elif kind == "audit":
        parts = [_audit_part(Audit.load(first), Audit.load(second))]
    else:
        parts = [_recipe_part(recipe.load(first), recipe.load(second))]
    parts = [part for part in parts if part.changes]
    return Differences(kind, str(first), str(second), tuple(parts), figures, gist)


def _kind(path: Path) -> str:
    if path.is_dir():
        if (path / "sweep.json").is_file():
            remedy = "give the folder of one of its rows"
            raise FileError(files.printable_path(path), "is the folder of a sweep", remedy)
        return "run"
    return "recipe" if path.suffix in (".yaml", ".yml") else "audit"


def _read_record(folder: Path) -> SavedResults:
    """Read the record of a run; raise FileError if any file is unreadable, as the result would be wrong."""
    if (error := without_result(folder)) and not (folder / "audit.json").is_file():
        raise error
    record = read_results(folder)
    if record.problems:
        raise FileError(files.printable_path(folder), record.problems[0])
    return record


def _items(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Change]:
    """Yield each item of two flat sides."""
    for name in {**first, **second}:
        sides = [_text_of(side[name]) if name in side else "" for side in (first, second)]
        if any(sides):
            yield Change(name, *sides)


def _part(title: str, items: Iterable[Change]) -> ComparedPart:
    changes = tuple(item for item in items if item.word != "same")
    return ComparedPart(title, changes, changes)


def _recipe_part(first: Mapping[str, Any], second: Mapping[str, Any]) -> ComparedPart:
    both = {name for name in first if first[name] and second.get(name)}
    sides = (dict(_options(steps, both)) for steps in (first, second))
    orders = (
        ", ".join(n for n in steps if n in first and n in second) for steps in (first, second)
    )
    return _part("recipe", [*_items(*sides), Change("the order of the steps", *orders)])


def _options(steps: Mapping[str, Any], both: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield each step, and of a step that both sides have, each of its options."""
    for name, options in steps.items():
        if name in both:
            yield from ((f"steps.{name}.{key}", value) for key, value in options.items())
        else:
            yield f"steps.{name}", "dropped" if options is None else options


def _choices(record: SavedResults) -> dict[str, str]:
    """Return the overrides by key, and the choices of the groups."""
    if record.job is None:
        return {}
    pairs = (str(override).partition("=") for override in record.job.overrides)
    overrides = {key: value for key, _, value in pairs if not key.startswith("hydra")}
    groups = {str(k): str(v) for k, v in record.job.choices.items() if v is not None}
    return groups | overrides


def _environment(record: SavedResults) -> dict[str, Any]:
    environment = record.environment or {}
    versions = environment.get("packages") or {}
    values = {key: environment.get(key) for key in _ENVIRONMENT}
    values |= {f"packages.{name}": version for name, version in versions.items()}
    values |= {f"accelerator.{key}": v for key, v in (environment.get("accelerator") or {}).items()}
    return {key: value for key, value in values.items() if value not in (None, [])}


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
    texts["right"] = verified_text(figures.verified)
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


def _gist(headlines: Sequence[Headline], statuses: Sequence[str]) -> str:
    """Return the most important differences of two runs and their statuses; empty if they are equal."""
    first, second = headlines
    parts = [f"status {' -> '.join(statuses)}"] if len(set(statuses)) > 1 else []
    return "; ".join([*parts, *_changed_figures(first, second)])


def _changed_figures(first: Headline, second: Headline) -> Iterator[str]:
    lost, lost_then = first.lost, second.lost
    if lost and lost_then and lost != lost_then and lost.status == lost_then.status == "ok":
        copied = f"{size(lost.copied_bytes)} -> {size(lost_then.copied_bytes)} copied"
        yield f"layout lost {lost.breaks:,} -> {lost_then.breaks:,} times, {copied}"
    verified, verified_then = first.verified, second.verified
    if verified and verified_then and verified.status != verified_then.status:
        yield f"verified {verified.status} -> {verified_then.status}"
    timed = {figures.what: figures for figures in first.timed}
    for figures in second.timed[:1]:
        if speed := _speed(timed.get(figures.what), figures):
            yield speed
    if first.bytes_after != second.bytes_after and first.bytes_after and second.bytes_after:
        yield f"memory {size(first.bytes_after)} -> {size(second.bytes_after)}"


def _speed(first: BenchFigures | None, second: BenchFigures) -> str:
    """Return how much faster the second is; both are timed against the unprepared model."""
    if first is None or first.ratio is None or second.ratio is None or first.where != second.where:
        return ""
    if first.interval is None or second.interval is None or first.overlaps(second):
        return "" if first == second else "speed: the difference is unclear"
    ratio = second.ratio / first.ratio
    return f"{1 / ratio:.2g}x faster" if ratio < 1 else f"{ratio:.2g}x slower"


def _document(
    name: str, title: str, changes: Iterable[Change], every: Sequence[Change] = ()
) -> Document:
    titles = columns("Item name, A prose, B prose, Difference word, Note prose")
    shown, each = (
        Table(
            label=label,
            columns=titles,
            rows=[(c.name, c.first, c.second, c.word, c.note) for c in listed],
            form="stacked sides",
        )
        for label, listed in ((title, changes), ("Each difference", every))
    )
    fold = f"Each tensor: {plural(len(every), 'difference')}"
    parts = (shown, Folded(title=fold, parts=(each,)))
    return Document(name=name, title=title, parts=lambda: parts)


def _text_of(value: Any) -> str:
    """Return a value as text: a word as it is, all else as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str, separators=(",", ":"))


def _audit_part(first: Audit, second: Audit) -> ComparedPart:
    """Return a change for each tensor, and equal ones together by the class of their module."""
    rows = {row.path: row for audit in (second, first) for row in audit.rows}
    differences = first.diff(second)
    changes = {d.tensor: Change(d.tensor, *_sides(d), text=str(d)) for d in differences}
    groups: dict[tuple[str, ...], list[Difference]] = {}
    for difference in differences:
        key = (rows[difference.tensor].type, *_sides(difference, without=_OWN))
        groups.setdefault(key, []).append(difference)
    grouped = (
        changes[members[0].tensor] if len(members) == 1 else _group(key, members, rows)
        for key, members in groups.items()
    )
    return ComparedPart("audit", tuple(changes.values()), tuple(grouped))


def _group(key: tuple[str, ...], members: list[Difference], rows: Mapping[str, AuditRow]) -> Change:
    (kind, first, second), fields = key, members[0].fields
    # A module that is registered under several names has one.
    paths = (rows[member.tensor] for member in members)
    modules = {min((row.path, *row.shared_with)).rpartition(".")[0] for row in paths}
    name, note = f"{len(modules):,} {kind}", plural(len(members), "tensor")
    if members[0].only_in:
        return Change(name, first, second, f"{name}: only in {members[0].only_in}", note)
    if "type" in fields and fields.keys() <= {"type", *_OWN}:
        kind, other = fields["type"]
        repaired = " (repaired: keeps the layout)" if other == _REPAIRED + kind else ""
        name, second = f"{len(modules):,} {kind}", f"{other}{repaired}"
        return Change(name, kind, second, f"{name} -> {second}", note)
    pairs = (f"{key} {_text_of(a)} -> {_text_of(b)}" for key, (a, b) in fields.items())
    texts = (key if key in _OWN else pair for key, pair in zip(fields, pairs, strict=True))
    return Change(name, first, second, f"{name}: {', '.join(texts)}", note)


def _sides(difference: Difference, without: Collection[str] = ()) -> tuple[str, str]:
    """Return the fields of both sides as texts, those of `without` by name only."""
    fields, only_in = difference.fields.items(), difference.only_in
    first, second = (
        "; ".join(key if key in without else f"{key} {_text_of(pair[at])}" for key, pair in fields)
        or ("present" if only_in == side else "")
        for at, side in enumerate(("ours", "theirs"))
    )
    return first, second
