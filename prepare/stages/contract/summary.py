"""The text of a check: one screen for a terminal, and Markdown for the comment on a pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prepare.core.utils.numbers import doubt
from prepare.core.utils.text import plural, printable
from prepare.stages.contract.records import BETTER, BROKEN, KINDS, ContractChange, ContractCheck

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Changes of each kind that one screen shows.
_SHOWN = 8


def check_lines(check: ContractCheck, *, file: str, update: str) -> Iterator[str]:
    """Yield the lines of a check; `update` is the command or option that records the model of today."""
    yield from change_lines(check)
    yield f"{verdict_text(check)}: {file}"
    if check.status == BROKEN:
        yield f"if that is intended, record it again: {update}"
    elif check.status == BETTER:
        yield f"to hold the model to what it keeps now, record it again: {update}"


def change_lines(check: ContractCheck, most: int = _SHOWN) -> Iterator[str]:
    """Yield a line for each change, at most so many of each kind."""
    for kind in KINDS:
        changes = check.of(kind)
        yield from (f"{doubt(kind)}: {printable(_text(change))}" for change in changes[:most])
        if len(changes) > most:
            yield f"{doubt(kind)}: {plural(len(changes) - most, 'more change')}"


def markdown(name: str, check: ContractCheck) -> str:
    """Return one check as an item of a list in Markdown."""
    changes = [f"    - {change.kind}: {_escaped(_text(change))}" for change in check.changes]
    code = printable(name).replace("`", "'")
    return "\n".join([f"- `{code}`: {verdict_text(check)}", *changes])


def page(results: Iterable[dict[str, str]]) -> str:
    """Return the checks, each with its `status` and its `text` in Markdown, the worst first."""
    order = (BROKEN, BETTER, "kept")
    ranked = sorted(results, key=lambda each: (order.index(each["status"]), each["text"]))
    counts = (sum(each["status"] == status for each in ranked) for status in order)
    head = ", ".join(f"{count} {status}" for count, status in zip(counts, order, strict=True))
    return "\n".join([f"### Layout contracts: {head}", "", *(each["text"] for each in ranked), ""])


def verdict_text(check: ContractCheck) -> str:
    """Return `the contract is broken (2 broken, 1 note)`."""
    counts = {kind: len(check.of(kind)) for kind in KINDS[:3]}
    parts = [f"{count} {kind}" for kind, count in counts.items() if count]
    return f"the contract is {check.status}" + (f" ({', '.join(parts)})" if parts else "")


def _text(change: ContractChange) -> str:
    more = f" and {change.count - 1} more" if change.count > 1 else ""
    source = f" ({change.source})" if change.source else ""
    where = f"{change.where}{more}: " if change.where else ""
    return f"{change.what}: {where}{change.text}{source}"


def _escaped(text: str) -> str:
    return "".join(
        f"\\{letter}" if letter in "\\`*_<>[]#|" else letter for letter in printable(text)
    )
