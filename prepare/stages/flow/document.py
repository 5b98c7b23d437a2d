"""The document of a layout flow: whether the layout is kept, what loses it, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from prepare.core.document import (
    LAYOUT,
    NEVER_TAKEN,
    NOT_MEASURED,
    UNCLEAR,
    Advice,
    Answer,
    Document,
    Folded,
    Part,
    ReportContext,
    Table,
    Text,
    columns,
)
from prepare.core.utils.text import capitalized, doubt, plural, printable, size
from prepare.stages.flow.records import NOT_ASKED, Flow

if TYPE_CHECKING:
    from prepare.stages.bench.records import Comparison

# A sentence names at most so many classes of modules.
_NAMED = 3
# The name for operators outside all submodules.
_ROOT = "the model itself"


@dataclass(slots=True)
class LayoutCause:
    """A class of modules and the operator in it that loses the layout, over one forward.

    `count` is the number of breaks, `copied` the bytes that are copied there, `first` the first module.
    """

    name: str
    count: int = 0
    copied: int = 0
    first: str = ""


def source_name(kind: str, operator: str) -> str:
    """Return the name of a cause: `InstanceNorm2d`, or `cat in UNetDecoder` if the class does not say it."""
    said = operator.replace("_", "").replace("convolution", "conv").lower() in kind.lower()
    return printable(kind if said or not operator else f"{operator} in {kind}")


def layout_causes(flow: Flow) -> list[LayoutCause]:
    """Return the causes of breaks, the most frequent first; a copy at no break has a `count` of 0."""
    causes: dict[str, LayoutCause] = {}
    broken_at: dict[tuple[str, str], str] = {}
    for event in flow.events:
        name = source_name(event.type, event.cause)
        broken_at[event.module, event.operation] = name
        causes.setdefault(name, LayoutCause(name, first=event.module)).count += event.count
    for copy in flow.copies:
        own = source_name(copy.type, copy.operation.rpartition(".")[2])
        name = broken_at.get((copy.module, copy.operation), own)
        causes.setdefault(name, LayoutCause(name, first=copy.module)).copied += copy.bytes
    return sorted(causes.values(), key=lambda cause: (-cause.count, cause.name))


def breaks_text(causes: Iterable[LayoutCause]) -> str:
    """Return `13 breaks, all InstanceNorm3d`, or `16 breaks (13 InstanceNorm3d, 3 cat in UNet3d)`."""
    causes = [cause for cause in causes if cause.count]
    total = sum(cause.count for cause in causes)
    if not total:
        return "no breaks"
    if len(causes) == 1:
        return f"{plural(total, 'break')}, {'all ' if total > 1 else ''}{causes[0].name}"
    return f"{plural(total, 'break')} ({named(causes)})"


def named(causes: Iterable[LayoutCause]) -> str:
    """Return `13 InstanceNorm3d, 3 cat in UNet3d`, at most three and the number of the others."""
    causes = [cause for cause in causes if cause.count]
    texts = [f"{cause.count:,} {cause.name}" for cause in causes[:_NAMED]]
    if len(causes) > _NAMED:
        texts.append(f"{sum(cause.count for cause in causes[_NAMED:]):,} more")
    return ", ".join(texts)


def flow_document(shown: ReportContext) -> Document | None:
    """Return what is shown of the flow of a run; None if it has none."""
    flow, before = shown.found.get("flow"), shown.found.get("flow_before")
    if flow is None:
        if not shown.had("flow"):
            return None
        missing = Answer(LAYOUT, "plain", NOT_MEASURED, shown.without("flow"))
        return Document(name="flow", place=60, answers=(missing,))
    return Document(
        name="flow",
        title=LAYOUT,
        place=60,
        line=flow_sentence(flow),
        head=f"layout ({flow.mode})",
        answers=(_answer(flow, before, shown.elsewhere),),
        advice=tuple(_advice(flow, before, shown.found.get("bench"))),
        parts=lambda: (*_in_terminal(flow), *_on_page(flow, before)),
    )


def flow_sentence(flow: Flow) -> str:
    """Return one sentence: `13 breaks, all InstanceNorm3d, 4.3 MiB copied per forward; add ...`."""
    if flow.status != "ok":
        return f"{doubt(flow.status)}: {printable(flow.reason)}"
    causes, summary = layout_causes(flow), flow.summary
    copied = f"{size(summary['copied_bytes'])} copied per forward"
    if summary["copied_bytes"] and not summary["breaks"]:
        # A copy without a break: the layout is the same before and after the operation.
        copied += f" inside {', '.join(cause.name for cause in causes[:_NAMED] if cause.copied)}"
    is_vacuous = NOT_ASKED in flow.notes and not summary["breaks"]
    found = f"{NOT_ASKED if is_vacuous else breaks_text(causes)}, {copied}"
    return "; ".join(filter(None, (found, layout_remedy(flow))))


def layout_remedy(flow: Flow) -> str:
    """Return `add the step repair_layout (keeps the layout at 12 of 13 places)`; empty without a remedy."""
    if flow.remedy is None:
        return ""
    total = flow.summary["breaks"]
    steps = " and ".join(f"the step {name}" for name in flow.remedy.steps)
    kept = f"{total - flow.remedy.breaks:,} of {plural(total, 'place')}"
    return f"add {steps} (keeps the layout at {kept})"


def _answer(flow: Flow, before: Flow | None, elsewhere: str = "") -> Answer:
    kind, answer, remark = _verdict(flow, before, elsewhere)
    if not answer.startswith("Lost"):
        return Answer(LAYOUT, kind, answer, remark)
    causes, _, rest = remark.partition("; ")
    first, *more = flow.events
    if first.count == 1 and first.source and not more:
        answer = answer.replace("1 place", printable(first.source))
    line = f"LOST{answer[4:]} ({causes})" + (f": {rest}" if rest else "")
    return Answer(LAYOUT, kind, answer, remark, line=line)


def _verdict(flow: Flow, before: Flow | None, rest: str) -> tuple[str, str, str]:
    """Return the kind, the answer and the remark."""
    summary = flow.summary
    if flow.status != "ok":
        return "warn", UNCLEAR, flow.reason
    if summary["breaks"]:
        remark = f"{named(layout_causes(flow))}; {size(summary['copied_bytes'])} copied per forward"
        if others := summary["convolutions"] - summary["in_layout"]:
            of = plural(summary["convolutions"], "convolution")
            verb = "returns" if others == 1 else "return"
            remark += f"; {others:,} of {of} {verb} another layout"
        return "bad", f"Lost at {plural(summary['breaks'], 'place')}", remark
    if set(flow.wanted.values()) <= {"contiguous"}:
        return "plain", "Contiguous", "no step asks for channels-last"
    outputs = _outputs(flow) + rest
    if before is not None and before.summary["breaks"]:
        outputs += f"; lost at {plural(before.summary['breaks'], 'place')} without the repairs"
    return ("bad", NEVER_TAKEN, outputs) if _is_never_kept(flow) else ("good", "Kept", outputs)


def why_not_kept(flow: Flow | None) -> str:
    """Return why a flow does not show that the layout is kept; empty if it does."""
    if flow is None:
        return "layout not measured, without an example input or with flow=none"
    answer = _answer(flow, None)
    said = answer.line or f"{answer.answer}: {answer.remark}"
    return "" if answer.kind == "good" else f"layout {said}"


def _advice(flow: Flow, before: Flow | None, bench: Comparison | None) -> Iterator[Advice]:
    verdict = bench.headline.verdict if bench else ""
    contiguous = "Leave it contiguous here"
    if flow.status != "ok":
        return
    if before and before.summary["breaks"] and verdict in ("slower", "no difference"):
        remark = "the repairs cost what the layout wins"
        yield Advice(18, "bad", contiguous, remark, section="bench")
    elif remedy := layout_remedy(flow):
        remark = "and time it again" if verdict == "faster" else ""
        yield Advice(20, "warn", capitalized(remedy), remark)
    elif _is_never_kept(flow):
        yield Advice(69, "warn", contiguous, _outputs(flow))


def _is_never_kept(flow: Flow) -> bool:
    """Return True if no convolution returned the layout that was asked for."""
    summary, was_asked = flow.summary, set(flow.wanted.values()) - {"contiguous"}
    return bool(was_asked and summary["convolutions"] and not summary["in_layout"])


def _outputs(flow: Flow) -> str:
    """Return `all 18 convolutions return channels_last_3d`, or `16 of 18 convolutions return ...`."""
    gave, of = flow.summary["in_layout"], flow.summary["convolutions"]
    formats = " and ".join(dict.fromkeys(flow.wanted.values()))
    counted = "all" if gave == of > 1 else f"{gave:,} of"
    return f"{counted} {plural(of, 'convolution')} {'returns' if of == 1 else 'return'} {formats}"


def _in_terminal(flow: Flow) -> Iterator[Part]:
    summary = flow.summary
    yield Text(text=f"wanted: {_wanted(flow)}", where="terminal")
    if summary["convolutions"]:
        kinds = Counter(row.backend for row in flow.convolutions if row.backend)
        backends = ", ".join(f"{name} {count}" for name, count in sorted(kinds.items()))
        called = plural(summary["convolutions"], "convolution")
        text = f"{summary['in_layout']} of {called} returned it ({backends})"
        yield Text(text=text, where="terminal")
    yield _breaks(flow, "terminal")


def _breaks(flow: Flow, where: Literal["terminal", "page"]) -> Table:
    rows = []
    for event in sorted(flow.events, key=lambda event: -event.bytes):
        decides = event.operand.rpartition("; ")[2] if "; " in event.operand else ""
        place = ", ".join(filter(None, (event.source, decides)))
        cause = source_name(event.type, event.cause)
        rows.append((event.module or _ROOT, cause, place, event.count, size(event.bytes)))
    titles = columns("lost in name, by text, at text, times number, size text")
    return Table(label="Breaks", columns=titles, rows=rows, noun="place", where=where)


def _on_page(flow: Flow, before: Flow | None) -> Iterator[Part]:
    figures = [("After the repairs" if before else "", flow)]
    if before:
        figures.insert(0, ("Before the repairs", before))
    for label, each in figures:
        text = flow_sentence(each)
        yield Text(text=f"{label}: {text}" if label else capitalized(text), where="page")
    titles = columns("Lost by head, Lost text, Copied there number, First in code")
    rows = [row for label, each in figures for row in _causes(each, label)]
    yield Table(label="Causes", columns=titles, rows=rows, where="page")
    how = "predicted without computing" if flow.mode == "predict" else "observed in a forward"
    how += f", for {flow.device}" if flow.device else ""
    text = f"Requested: {_wanted(flow)}; {how}. Bytes are those of one forward."
    yield Text(text=text, kind="note", where="page")
    notes = tuple(note for note in flow.notes if note != NOT_ASKED)  # the sentence says it
    yield Text(text=notes, kind="note")
    yield _breaks(flow, "page")
    yield _copies(flow)
    yield _convolutions(flow)


def _wanted(flow: Flow) -> str:
    return ", ".join(f"{name} for {rank}-d tensors" for rank, name in flow.wanted.items())


def _causes(flow: Flow, label: str) -> Iterator[tuple[str, str, str, str]]:
    for cause in layout_causes(flow):
        name = ", ".join(filter(None, (cause.name, label.lower())))
        lost = plural(cause.count, "time") if cause.count else "copied only"
        yield name, lost, size(cause.copied) if cause.copied else "", cause.first or _ROOT


def _copies(flow: Flow) -> Folded:
    titles = "Module name, Type text, Operation code, Times number, Bytes number, Cause prose"
    rows = [
        (c.module or _ROOT, c.type, c.operation, f"{c.count:,}", size(c.bytes), c.why)
        for c in sorted(flow.copies, key=lambda copy: -copy.bytes)
    ]
    return _folded("Copied because of layouts", titles, rows)


def _convolutions(flow: Flow) -> Folded:
    titles = (
        "Module name, Type text, Input text, Weight text, Output text, Kernel text, Calls number"
    )
    rows = [
        (c.module or _ROOT, c.type, c.input, c.weight, c.output, c.backend, f"{c.calls:,}")
        for c in flow.convolutions
    ]
    return _folded("Layouts and kernel of each convolution", titles, rows)


def _folded(label: str, titles: str, rows: list[tuple]) -> Folded:
    table = Table(label=label, columns=columns(titles), rows=rows, file="flow.json")
    return Folded(title=f"{label}: {plural(len(rows), 'place')}", parts=(table,))
