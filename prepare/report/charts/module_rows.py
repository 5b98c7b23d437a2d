"""The module tree in few rows: a row for each module with an event; the others are folded and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prepare.flow.records import Event, Flow, ModuleLayout

# A tree with at most so many modules is not folded.
SMALL = 40
# Keep a long list of modules folded if fewer rows than these are left.
_MIN_ROWS = 8


@dataclass(slots=True)
class ModuleTotals:
    """The totals of modules: their number, the number of each kind of event, copied bytes, layouts."""

    modules: int = 0
    events: Counter[str] = field(default_factory=Counter)
    copied: int = 0
    layouts: Counter[str] = field(default_factory=Counter)

    def add(self, other: ModuleTotals) -> None:
        """Add the counts of `other`."""
        self.modules += other.modules
        self.events.update(other.events)
        self.copied += other.copied
        self.layouts.update(other.layouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """One row: a module, or, if `folded`, all modules that `totals` counts.

    `label` is the name relative to the parent row. `events` are the module's own; `holds` is true if
    the rows below show its children.
    """

    label: str
    module: ModuleLayout
    depth: int
    folded: bool
    holds: bool
    events: tuple[Event, ...]
    totals: ModuleTotals


def rows(flow: Flow, *, limit: int, beside: Flow | None = None) -> list[ModuleRow]:
    """Return at most `limit` rows, in the order of the tree.

    Modules with an event in `flow` or in `beside` have their own row. If there are too many rows, fold
    the regains first, then the deepest modules.
    """
    if not flow.modules:
        return []
    tree = _Tree(flow)
    index = {**tree.index, "": 0}
    events = [*flow.events, *(beside.events if beside else ())]
    copies = [*flow.copies, *(beside.copies if beside else ())]
    breaks = {index.get(event.module, 0) for event in events if event.kind == "break"}
    marked = breaks | {index.get(event.module, 0) for event in events}
    marked |= {index.get(copy.module, 0) for copy in copies}
    attempts = [set(range(len(flow.modules)))] if len(flow.modules) <= SMALL else []
    for alone in (*attempts, marked, breaks):
        fold = _Fold(tree, alone, limit)
        if not fold.cut:
            break
    return list(fold.rows())


class _Tree:
    """The modules with their parents, children and totals."""

    def __init__(self, flow: Flow) -> None:
        self.modules = flow.modules
        self.index = {module.name: number for number, module in enumerate(flow.modules)}
        self.children: list[list[int]] = [[] for _ in flow.modules]
        self.parent = self._parents()
        self.events: dict[int, list[Event]] = {}
        self.own = [ModuleTotals(1, layouts=Counter([module.layout])) for module in flow.modules]
        for event in flow.events:
            number = self.index.get(event.module, 0)
            self.events.setdefault(number, []).append(event)
            self.own[number].events[event.kind] += event.count
        for copy in flow.copies:
            self.own[self.index.get(copy.module, 0)].copied += copy.bytes
        self.totals = [ModuleTotals() for _ in flow.modules]
        for number in reversed(range(len(flow.modules))):
            self.totals[number].add(self.own[number])
            if number:
                self.totals[self.parent[number]].add(self.totals[number])

    def _parents(self) -> list[int]:
        # Use the depth, as a name may contain anything; the order is that of named_modules.
        parents, above = [0], [0]
        for number, module in enumerate(self.modules[1:], 1):
            while len(above) > 1 and self.modules[above[-1]].depth >= module.depth:
                above.pop()
            parents.append(above[-1])
            self.children[above[-1]].append(number)
            above.append(number)
        return parents

    def with_parents(self, numbers: Iterable[int]) -> set[int]:
        opened = {0}
        for number in numbers:
            while number not in opened:
                opened.add(number)
                number = self.parent[number]  # noqa: PLW2901
        return opened


class _Fold:
    """Open the tree level by level while there is room."""

    def __init__(self, tree: _Tree, alone: set[int], limit: int) -> None:
        self.tree, self.room, self.cut = tree, limit - 1, False
        self.alone = tree.with_parents(alone)
        self.groups: dict[int, list[list[int]]] = {}
        level = [0]
        while level:
            level = [below for number in level for below in self._opened(number)]

    def rows(self) -> Iterator[ModuleRow]:
        waiting = [(0, 0, [0])]
        while waiting:
            above, depth, group = waiting.pop()
            row = self._row(above, depth, group)
            yield row
            if row.holds:
                below = self.groups[group[0]]
                waiting += [(group[0], depth + 1, inner) for inner in reversed(below)]

    def _opened(self, number: int) -> list[int]:
        """Make the rows below a module if they fit; return those to open next."""
        groups = self._grouped(self.tree.children[number])
        if len(groups) > self.room:
            self.cut = True
            if self.room < _MIN_ROWS:
                return []
            # Keep half of the room for the children of the first rows, which show the culprit.
            deeper = any(self.tree.children[group[0]] for group in groups if self._opens(group))
            own = (self.room // 2 if deeper else self.room) - 1
            groups = [*groups[:own], [number for group in groups[own:] for number in group]]
        self.room -= len(groups)
        self.groups[number] = groups
        return [group[0] for group in groups if self._opens(group)]

    def _opens(self, group: list[int]) -> bool:
        return len(group) == 1 and group[0] in self.alone

    def _grouped(self, children: Sequence[int]) -> list[list[int]]:
        """Give each child in `alone` its own row; group the children between two of these."""
        groups: list[list[int]] = []
        for child in children:
            if child in self.alone:
                groups.append([self._first_branch(child)])
            elif groups and groups[-1][-1] not in self.alone:
                groups[-1].append(child)
            else:
                groups.append([child])
        return groups

    def _first_branch(self, number: int) -> int:
        """Skip modules with a single child and no event of their own."""
        tree = self.tree
        while len(tree.children[number]) == 1 and len(tree.modules) > SMALL:
            below, own = tree.children[number][0], tree.own[number]
            if below not in self.alone or own.events or own.copied:
                break
            number = below
        return number

    def _row(self, above: int, depth: int, group: list[int]) -> ModuleRow:
        number, tree = group[0], self.tree
        holds = len(group) == 1 and bool(self.groups.get(number))
        folded = len(group) > 1 or bool(tree.children[number]) and not holds
        totals = tree.own[number]
        if folded:
            totals = ModuleTotals()
            for member in group:
                totals.add(tree.totals[member])
        label = _label(tree.modules[above].name, tree.modules[number].name) if number else ""
        if len(group) > 1:
            last = _label(tree.modules[above].name, tree.modules[group[-1]].name)
            label = f"{label} to {last}"
        events = () if folded else tuple(tree.events.get(number, ()))
        return ModuleRow(
            label=label,
            module=tree.modules[number],
            depth=depth,
            folded=folded,
            holds=holds,
            events=events,
            totals=totals,
        )


def _label(above: str, name: str) -> str:
    return name[len(above) + 1 :] if above and name.startswith(f"{above}.") else name
