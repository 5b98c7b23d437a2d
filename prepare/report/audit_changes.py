"""The differences of two audits: tensor by tensor, and equal ones together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prepare.core.utils.text import plural

if TYPE_CHECKING:
    from prepare.audit import Audit, AuditRow, Difference

# Fields whose values differ with the shape of a tensor: a group names them without values.
_OWN = ("stride", "before", "shape", "shared_with")
# A class of this prefix replaces the class of torch that follows it.
_REPAIRED = "Keeping"


@dataclass(frozen=True, slots=True)
class Change:
    """One difference: the value of the first side and of the second, empty if it is absent.

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
    def is_same(self) -> bool:
        """Return whether this is not a difference."""
        return self.same or self.first == self.second

    def __str__(self) -> str:
        sides = f"{self.first or 'absent'} -> {self.second or 'absent'}"
        text = self.text or f"{self.name}: {sides}"
        return f"{text}; {self.note}" if self.note else text


def audit_changes(first: Audit, second: Audit) -> list[Change]:
    """Return one change for each tensor that differs."""
    return [_change(difference) for difference in first.diff(second)]


def audit_groups(first: Audit, second: Audit) -> list[Change]:
    """Return the same changes with equal ones together, by class of module; a single one as it is."""
    rows = {row.path: row for audit in (second, first) for row in audit.rows}
    groups: dict[tuple[str, ...], list[Difference]] = {}
    for difference in first.diff(second):
        key = (rows[difference.tensor].type, *_sides(difference, own=False))
        groups.setdefault(key, []).append(difference)
    return [
        _change(members[0]) if len(members) == 1 else _group(key[0], members, rows)
        for key, members in groups.items()
    ]


def text_of(value: Any) -> str:
    """Return a value as text: a word as it is, all else as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str, separators=(",", ":"))


def _change(difference: Difference) -> Change:
    first, second = _sides(difference, own=True)
    return Change(difference.tensor, first, second, text=str(difference))


def _group(kind: str, members: list[Difference], rows: Mapping[str, AuditRow]) -> Change:
    first, second = _sides(members[0], own=False)
    modules = {_module(rows[member.tensor]) for member in members}
    name, note = f"{len(modules):,} {kind}", plural(len(members), "tensor")
    types = members[0].fields.get("type")
    if types and members[0].fields.keys() <= {"type", *_OWN}:
        kind, other = types
        name, first, second = f"{len(modules):,} {kind}", kind, _explained(kind, other)
        return Change(name, first, second, text=f"{name} -> {second}", note=note)
    if members[0].only_in:
        return Change(name, first, second, f"{name}: only in {members[0].only_in}", note)
    texts = _fields(members[0])
    return Change(name, first, second, text=f"{name}: {', '.join(texts)}", note=note)


def _explained(kind: str, other: str) -> str:
    return f"{other} (repaired: keeps the layout)" if other == _REPAIRED + kind else other


def _module(row: AuditRow) -> str:
    """Return one name for a module that is registered under several."""
    return min((row.path, *row.shared_with)).rpartition(".")[0]


def _sides(difference: Difference, *, own: bool) -> tuple[str, str]:
    if difference.only_in:
        ours, theirs = ("present" if difference.only_in == s else "" for s in ("ours", "theirs"))
        return ours, theirs
    return _side(difference.fields, 0, own=own), _side(difference.fields, 1, own=own)


def _side(fields: Mapping[str, tuple[Any, Any]], side: int, *, own: bool) -> str:
    return "; ".join(_values(fields, side, own=own))


def _values(fields: Mapping[str, tuple[Any, Any]], side: int, *, own: bool) -> Iterator[str]:
    for name, pair in fields.items():
        yield f"{name} {text_of(pair[side])}" if own or name not in _OWN else name


def _fields(difference: Difference) -> Iterable[str]:
    for name, (first, second) in difference.fields.items():
        values = f" {text_of(first)} -> {text_of(second)}"
        yield name if name in _OWN else f"{name}{values}"
