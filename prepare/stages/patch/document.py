"""The document of a patch: the changed calls, what they save, and the breaks that stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prepare.core.document import (
    Advice,
    Answer,
    Code,
    Document,
    Folded,
    Part,
    ReportContext,
    Table,
    Text,
    columns,
)
from prepare.core.utils.numbers import speed_text
from prepare.core.utils.text import capitalized, plural, size

if TYPE_CHECKING:
    from prepare.stages.patch.records import Patch

_DIFF = "patch.diff"
# The most characters of a diff that are shown; the file has all.
_SHOWN = 50_000
_RESULTS = {"pass": "right", "fail": "wrong", "cannot tell": "unclear"}


def patch_document(shown: ReportContext) -> Document | None:
    """Return what is shown of the patch of a run; None if it had none."""
    patch = shown.found.get("patch")
    if patch is None:
        return None
    return Document(
        name="patch",
        title="Patch",
        place=70,
        line=patch_sentence(patch),
        head="patch",
        answers=(_answer(patch),),
        advice=tuple(_advice(patch, shown)),
        parts=lambda: _parts(patch, shown),
    )


def _answer(patch: Patch) -> Answer:
    line = patch_sentence(patch)
    kind = "good" if patch.calls and patch.verified == "pass" else "plain"
    answer = f"{plural(len(patch.calls), 'call')} changed" if patch.calls else "Nothing to change"
    return Answer("Patch", kind, answer, line=line)


def _advice(patch: Patch, shown: ReportContext) -> Iterator[Advice]:
    if patch.diff and patch.verified != "fail":
        remark = "in the folder that holds the package"
        yield Advice(8, "good", f"git apply {shown.file(_DIFF)}", remark)


def patch_sentence(patch: Patch) -> str:
    """Return `4 calls changed: 1.1 MiB -> 0 bytes copied per forward, 16 -> 0 breaks, results right`."""
    breaks = plural(patch.before[1], "break")
    if not patch.calls:
        none = f"none of {breaks} can be removed" if patch.before[1] else "there is no break"
        return f"nothing to change, as {none}"
    sizes = f"{size(patch.before[0])} -> {size(patch.after[0])} copied per forward"
    parts = [
        f"{plural(len(patch.calls), 'call')} changed: {sizes}",
        f"{patch.before[1]:,} -> {plural(patch.after[1], 'break')}",
        f"results {_RESULTS.get(patch.verified, 'not measured')}",
    ]
    speed = speed_text(patch.verdict or "not compared", patch.ratio, patch.interval)
    parts.append(f"speed {speed}" if speed in ("unclear", "not measured") else speed)
    return ", ".join(parts)


def _parts(patch: Patch, shown: ReportContext) -> Iterator[Part]:
    text = patch_sentence(patch)
    yield Text(text=capitalized(text), where="page")
    titles = columns("changed at text, saves text, breaks number, call name")
    rows = [(call.source, size(call.copied_bytes), call.breaks, call.name) for call in patch.calls]
    yield Table(label="Changed calls", columns=titles, rows=rows, noun="place")
    left = columns("stays at name, by text, breaks number, because prose")
    rows = [(each.source, each.cause, each.breaks, each.reason) for each in patch.left]
    yield Table(label="Breaks that stay", columns=left, rows=rows, noun="place")
    if patch.diff:
        text = f"git apply {shown.file(_DIFF)}, in the folder that holds the package"
        yield Text(text=text, where="terminal")
        yield Folded(title=_DIFF, parts=(Code(text=patch.diff[:_SHOWN]),))
