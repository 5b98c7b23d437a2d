"""The module tree in few rows: what has an event stands alone, the rest is folded and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prepare.flow.records import Event, Flow, ModuleLayout

# A tree of so many modules is shown as it is.
SMALL = 40
# Fewer rows than these of a long list of modules say nothing: it stays folded.
_LEAST = 8


@dataclass(slots=True)
class Sums:
    """What modules add up to: how many, times of each kind of event, bytes copied, layouts."""

    modules: int = 0
    events: Counter[str] = field(default_factory=Counter)
    copied: int = 0
    layouts: Counter[str] = field(default_factory=Counter)

    def add(self, other: Sums) -> None:
        """Adds the other's counts to these."""
        self.modules += other.modules
        self.events.update(other.events)
        self.copied += other.copied
        self.layouts.update(other.layouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row: a module, or where `folded` is true all the modules that `sums` counts.

    `label` is the name below the row above. `events` are the module's own; `holds` says whether rows
    below it show what is in it.
    """

    label: str
    module: ModuleLayout
    depth: int
    folded: bool
    holds: bool
    events: tuple[Event, ...]
    sums: Sums


def rows(flow: Flow, *, limit: int, beside: Flow | None = None) -> list[Row]:
    """At most `limit` rows, in the order of the tree; a module with an event in `beside` stands alone too.

    Where not all fit, regains are folded first; then the modules that lie deepest.
    """
    if not flow.modules:
        return []
    tree = _Tree(flow)
    known = {**tree.index, "": 0}
    events = [*flow.events, *(beside.events if beside else ())]
    copies = [*flow.copies, *(beside.copies if beside else ())]
    breaks = {known.get(event.module, 0) for event in events if event.kind == "break"}
    marked = breaks | {known.get(row.module, 0) for row in [*events, *copies]}
    attempts = [set(range(len(flow.modules)))] if len(flow.modules) <= SMALL else []
    for alone in (*attempts, marked, breaks):
        fold = _Fold(tree, alone, limit)
        if not fold.cut:
            break
    return list(fold.rows())


class _Tree:
    """The modules, which of them holds which, and what each adds up to."""

    def __init__(self, flow: Flow) -> None:
        self.modules = flow.modules
        self.index = {module.name: number for number, module in enumerate(flow.modules)}
        self.children: list[list[int]] = [[] for _ in flow.modules]
        self.parent = self._parents()
        self.events: dict[int, list[Event]] = {}
        self.own = [Sums(1, layouts=Counter([module.layout])) for module in flow.modules]
        for event in flow.events:
            number = self.index.get(event.module, 0)
            self.events.setdefault(number, []).append(event)
            self.own[number].events[event.kind] += event.count
        for copy in flow.copies:
            self.own[self.index.get(copy.module, 0)].copied += copy.bytes
        self.sums = [Sums() for _ in flow.modules]
        for number in reversed(range(len(flow.modules))):
            self.sums[number].add(self.own[number])
            if number:
                self.sums[self.parent[number]].add(self.sums[number])

    def _parents(self) -> list[int]:
        # By depth and not by name: the order is that of named_modules, and a name may hold anything.
        found, above = [0], [0]
        for number, module in enumerate(self.modules[1:], 1):
            while len(above) > 1 and self.modules[above[-1]].depth >= module.depth:
                above.pop()
            found.append(above[-1])
            self.children[above[-1]].append(number)
            above.append(number)
        return found

    def with_those_above(self, numbers: Iterable[int]) -> set[int]:
        found = {0}
        for number in numbers:
            at = number
            while at not in found:
                found.add(at)
                at = self.parent[at]
        return found


class _Fold:
    """Opens the tree level by level, as long as there is room."""

    def __init__(self, tree: _Tree, alone: set[int], limit: int) -> None:
        self.tree, self.room, self.cut = tree, limit - 1, False
        self.alone = tree.with_those_above(alone)
        self.groups: dict[int, list[list[int]]] = {}
        level = [0]
        while level:
            level = [below for number in level for below in self._opened(number)]

    def rows(self) -> Iterator[Row]:
        waiting = [(0, 0, [0])]
        while waiting:
            above, depth, group = waiting.pop()
            row = self._row(above, depth, group)
            yield row
            if row.holds:
                below = self.groups[group[0]]
                waiting += [(group[0], depth + 1, inner) for inner in reversed(below)]

    def _opened(self, number: int) -> list[int]:
        """Makes the rows below a module, where they fit; gives those that are to be opened next."""
        groups = self._grouped(self.tree.children[number])
        if len(groups) > self.room:
            self.cut = True
            if self.room < _LEAST:
                return []
            # Half of the room is for what the first of them hold: the culprit is to be seen.
            deeper = any(self.tree.children[group[0]] for group in groups if self._opens(group))
            kept = (self.room // 2 if deeper else self.room) - 1
            groups = [*groups[:kept], [number for group in groups[kept:] for number in group]]
        self.room -= len(groups)
        self.groups[number] = groups
        return [group[0] for group in groups if self._opens(group)]

    def _opens(self, group: list[int]) -> bool:
        return len(group) == 1 and group[0] in self.alone

    def _grouped(self, children: Sequence[int]) -> list[list[int]]:
        """Children that stand alone, each in a row; those between two of them, in one row together."""
        groups: list[list[int]] = []
        for child in children:
            if child in self.alone:
                groups.append([self._passed(child)])
            elif groups and groups[-1][-1] not in self.alone:
                groups[-1].append(child)
            else:
                groups.append([child])
        return groups

    def _passed(self, number: int) -> int:
        tree = self.tree
        while len(tree.children[number]) == 1 and len(tree.modules) > SMALL:
            below, own = tree.children[number][0], tree.own[number]
            if below not in self.alone or own.events or own.copied:
                break
            number = below
        return number

    def _row(self, above: int, depth: int, group: list[int]) -> Row:
        number, tree = group[0], self.tree
        holds = len(group) == 1 and bool(self.groups.get(number))
        folded = len(group) > 1 or bool(tree.children[number]) and not holds
        sums = tree.own[number]
        if folded:
            sums = Sums()
            for one in group:
                sums.add(tree.sums[one])
        label = _label(tree.modules[above].name, tree.modules[number].name) if number else ""
        if len(group) > 1:
            last = _label(tree.modules[above].name, tree.modules[group[-1]].name)
            label = f"{label} to {last}"
        events = () if folded else tuple(tree.events.get(number, ()))
        return Row(
            label=label,
            module=tree.modules[number],
            depth=depth,
            folded=folded,
            holds=holds,
            events=events,
            sums=sums,
        )


def _label(above: str, name: str) -> str:
    return name[len(above) + 1 :] if above and name.startswith(f"{above}.") else name
