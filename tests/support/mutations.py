"""Wrong values in the files of a record: each value replaced, each key left out, each file cut."""

import copy
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

WRONG = ("x", "", 3, -1, 0, 1.5, 10**400, 1 << 80, float("nan"), float("inf"), None, True, [], ["x"], {}, {"x": 1})  # fmt: skip
# Of a long list only the first and the last item: the others are read by the same code.
_ENDS = (0, -1)


class Mutation(NamedTuple):
    """A change of one file; `text` returns its new content."""

    file: str
    what: str
    text: Callable[[], str]


def mutations(folder: Path) -> Iterator[Mutation]:
    """Yield every mutation of the JSON and YAML files in a folder."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".json", ".yaml") and ".hydra" not in path.parts:
            name, text = path.relative_to(folder).as_posix(), path.read_text()
            read, write = _FORMATS[path.suffix]
            tree = read(text)
            for place in places(tree, ()):
                yield from _changed(name, tree, place, write)
            for cut in {0, 1, len(text) // 4, len(text) // 2, len(text) - 3}:
                yield Mutation(name, f"cut at {cut}", partial(text.__getitem__, slice(cut)))


def places(tree: Any, above: tuple) -> Iterator[tuple]:
    """Yield the keys that lead to each value."""
    items = tree.items() if isinstance(tree, dict) else ()
    if isinstance(tree, list):
        items = [(index, tree[index]) for index in _ENDS[: len(tree)]]
    for key, value in items:
        yield (*above, key)
        yield from places(value, (*above, key))


def _changed(name: str, tree: Any, place: tuple, write: Any) -> Iterator[Mutation]:
    for value in (*WRONG, ...):
        what = "left out" if value is ... else repr(value)[:20]
        text = partial(_with_value, tree, place, value, write)
        yield Mutation(name, f"{'.'.join(map(str, place))}: {what}", text)


def _with_value(tree: Any, place: tuple, value: Any, write: Any) -> str:
    new = copy.deepcopy(tree)
    inner = new
    for key in place[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return write(new)


def _dumped(tree: Any) -> str:
    # As the audit is written, whose head is read without its rows.
    rows = "rows" in tree and "winner" not in tree
    return json.dumps(tree, separators=(",", ":") if rows else None)


_FORMATS = {
    ".json": (json.loads, _dumped),
    ".yaml": (yaml.safe_load, lambda tree: yaml.safe_dump(tree, sort_keys=False)),
}
