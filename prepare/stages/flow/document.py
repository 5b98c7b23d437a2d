"""The document of a layout flow: whether the layout is kept, what loses it, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from prepare.core.document import (
    LAYOUT,
    NEVER_TAKEN,
    NOT_MEASURED,
    UNCLEAR,
    Advice,
    Answer,
    Document,
    Folded,
    Items,
    Part,
    ReportContext,
    Table,
    Text,
    columns,
)
from prepare.core.utils.numbers import doubt
from prepare.core.utils.text import capitalized, plural, printable, size, times
from prepare.core.utils.wording import step, words
from prepare.stages.flow.causes import breaks_text, event_name, layout_causes, named
from prepare.stages.flow.records import NOT_ASKED, Event, Flow

if TYPE_CHECKING:
    from prepare.stages.bench.records import Comparison

# A sentence names at most so many classes of modules, a page so many notes.
_NAMED, _NOTES = 3, 50
# The name for operators outside all submodules.
_ROOT = "the model itself"


def flow_document(shown: ReportContext) -> Document | None:
    """Return what is shown of the flow of a run; None if it has none."""
    flow, before = shown.found.get("flow"), shown.found.get("flow_before")
    if flow is None:
        if not shown.had("flow"):
            return None
        remark, sentence = shown.without("flow"), "Layout not measured"
        missing = Answer(LAYOUT, "plain", NOT_MEASURED, remark, sentence=sentence)
        return Document(name="flow", place=60, answers=(missing,))
    return Document(
        name="flow",
        title=LAYOUT,
        place=60,
        line=flow_sentence(flow),
        head=f"layout ({flow.mode})",
        answers=(_answer(flow, before, _elsewhere(flow, shown)),),
        advice=tuple(_advice(flow, before, shown.found.get("bench"))),
        parts=lambda: (
            *_in_terminal(flow),
            *_on_page(flow, before),
        ),
    )


def flow_sentence(flow: Flow) -> str:
    """Return one sentence: `13 breaks, all InstanceNorm3d, 4.3 MiB copied per forward; add ...`."""
    remedy = layout_remedy(flow) if flow.status == "ok" else ""
    return breaks_sentence(flow) + (f"; {remedy}" if remedy else "")


def breaks_sentence(flow: Flow) -> str:
    """Return one sentence without the remedy: `13 breaks, all InstanceNorm3d, 4.3 MiB copied per forward`."""
    if flow.status != "ok":
        return f"{doubt(flow.status)}: {printable(flow.reason)}"
    summary = flow.summary
    copied = f"{size(summary['copied_bytes'])} copied per forward"
    causes = layout_causes(flow)
    if summary["copied_bytes"] and not summary["breaks"]:
        # A copy without a break: the layout is the same before and after the operation.
        copied += f" inside {', '.join(cause.name for cause in causes[:_NAMED] if cause.copied)}"
    is_vacuous = NOT_ASKED in flow.notes and not summary["breaks"]
    parts = [NOT_ASKED if is_vacuous else breaks_text(causes), copied]
    backward = summary["backward"]
    if backward["breaks"] or backward["copied_bytes"]:
        parts.append(f"{breaks_text(layout_causes(flow, 'backward'))} in backward")
        parts.append(f"{size(backward['copied_bytes'])} copied per backward")
    return ", ".join(parts)


def layout_remedy(flow: Flow) -> str:
    """Return `add +steps.repair_layout={} (keeps the layout at 12 of 13 places)`; empty without a remedy."""
    if flow.remedy is None:
        return ""
    total = flow.summary["breaks"] + flow.summary["backward"]["breaks"]
    steps = words(cli=" ", python=", ").join(map(step, flow.remedy.steps))
    kept = f"{total - flow.remedy.breaks:,} of {plural(total, 'place')}"
    return f"add {steps} (keeps the layout at {kept})"


def _answer(flow: Flow, before: Flow | None, elsewhere: str = "") -> Answer:
    kind, answer, remark = _verdict(flow, before)
    if kind == "good" and elsewhere:
        remark += f"; {elsewhere}"
    sentence = f"Layout {answer[0].lower()}{answer[1:]}"
    if not answer.startswith("Lost"):
        return Answer(LAYOUT, kind, answer, remark, sentence=sentence)
    causes, _, rest = remark.partition("; ")
    lost = [event for event in flow.events if event.kind == "break"]
    if len(lost) == lost[0].count == 1 and lost[0].source:
        answer = answer.replace("1 place", printable(lost[0].source))
    line = f"LOST{answer[4:]} ({causes})" + (f": {rest}" if rest else "")
    return Answer(LAYOUT, kind, answer, remark, sentence=sentence, line=line)


def _verdict(flow: Flow, before: Flow | None) -> tuple[str, str, str]:
    """Return the kind, the answer and the remark."""
    summary = flow.summary
    if flow.status != "ok":
        return "warn", UNCLEAR, flow.reason
    outputs = _outputs(flow)
    if summary["breaks"]:
        remark = f"{named(layout_causes(flow))}; {size(summary['copied_bytes'])} copied per forward"
        if others := summary["convolutions"] - summary["in_layout"]:
            of = plural(summary["convolutions"], "convolution")
            remark += (
                f"; {others:,} of {of} {'returns' if others == 1 else 'return'} another layout"
            )
        back = summary["backward"]["breaks"]
        also = f" and {back:,} in backward" if back else ""
        return "bad", f"Lost at {plural(summary['breaks'], 'place')}{also}", remark
    if summary["backward"]["breaks"]:
        remark = named(layout_causes(flow, "backward"))
        lost = plural(summary["backward"]["breaks"], "place")
        return "bad", f"Lost at {lost} in backward", remark
    if set(flow.wanted.values()) <= {"contiguous"}:
        return "plain", "Contiguous", "channels-last was not requested"
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
        remark = "and time it: it costs time too" if verdict == "faster" else ""
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


def _elsewhere(flow: Flow, shown: ReportContext) -> str:
    """Return where the others are: `1 repaired to a matrix product`, `13 not called by decode`."""
    ran = {row.module for row in flow.convolutions}
    found: Counter[str] = Counter()
    for row in shown.audit.rows if shown.audit is not None else ():
        shape = row.shape or ()
        if row.tensor == "weight" and len(shape) in (4, 5) and row.module not in ran:
            repaired = row.type.startswith("Keeping") and prod(shape[2:]) == 1
            as_what = "" if row.operation.startswith("conv") else row.operation
            what = f"run as {as_what}" if as_what else f"not called by {shown.method}"
            found["repaired to a matrix product" if repaired else what] += 1
    return ", ".join(f"{n} {what}" for what, n in found.items())


def _in_terminal(flow: Flow) -> Iterator[Part]:
    summary = flow.summary
    yield Text(text=f"wanted: {_wanted(flow)}", where="terminal")
    if summary["convolutions"]:
        kinds = Counter(row.backend for row in flow.convolutions if row.backend)
        backends = ", ".join(f"{name} {count}" for name, count in sorted(kinds.items()))
        called = plural(summary["convolutions"], "convolution")
        text = f"{summary['in_layout']} of {called} returned it ({backends})"
        yield Text(text=text, where="terminal")
    breaks = sorted((e for e in flow.events if e.kind == "break"), key=lambda e: -e.bytes)
    yield Table(
        label="Breaks",
        columns=columns("lost in name, by text, at text, times number, size text"),
        rows=list(map(_break, breaks)),
        noun="place",
        where="terminal",
    )


def _break(event: Event) -> tuple[str, str, str, int, str]:
    cause = event_name(event) + ("" if event.phase == "forward" else ", backward")
    operand = event.operand.rpartition("; ")[2] if "; " in event.operand else ""
    place = ", ".join(filter(None, (event.source, operand)))
    return event.module or _ROOT, cause, place, event.count, size(event.bytes)


def _on_page(flow: Flow, before: Flow | None) -> Iterator[Part]:
    figures = [("After the repairs" if before else "", flow)]
    if before:
        figures.insert(0, ("Before the repairs", before))
    for label, each in figures:
        text = flow_sentence(each)
        yield Text(text=f"{label}: {text}" if label else capitalized(text), where="page")
    titles = columns(
        "Lost by head, Lost text, Copied there number, To bring it back number, First in code"
    )
    rows = [row for label, each in figures for row in _causes(each, label)]
    yield Table(label="Causes", columns=titles, rows=rows, where="page")
    if before:
        yield Table(
            label="Before and after",
            columns=columns("Per forward head, Before number, After number"),
            rows=_compared(before, flow),
            form="narrow",
            where="page",
        )
    how = "predicted without computing" if flow.mode == "predict" else "observed in a forward"
    how += f", for {flow.device}" if flow.device else ""
    text = f"Requested: {_wanted(flow)}; {how}. Bytes are those of one forward."
    yield Text(text=text, kind="note", where="page")
    notes = [note for note in flow.notes if note != NOT_ASKED]  # the sentence says it
    if len(notes) > _NOTES:
        more = plural(len(notes) - _NOTES, "more note")
        notes = [*notes[:_NOTES], f"{more}; flow.json has them all."]
    yield Items(texts=tuple(notes), kind="note")
    yield _events(flow, before)
    yield _copies(flow)
    yield _convolutions(flow)


def _wanted(flow: Flow) -> str:
    return ", ".join(f"{name} for {rank}-d tensors" for rank, name in flow.wanted.items())


def _causes(flow: Flow, label: str) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield cause, how often, bytes at the breaks, bytes to bring the layout back, and first module."""
    for phase in ("forward", "backward"):
        when = label.lower(), "" if phase == "forward" else phase
        for cause in layout_causes(flow, phase):
            name = ", ".join(filter(None, (cause.name, *when)))
            lost = times(cause.count) if cause.count else "copied only"
            copied, regained = (size(n) if n else "" for n in (cause.copied, cause.regained))
            yield name, lost, copied, regained, cause.first or _ROOT


def _compared(before: Flow, after: Flow) -> list[tuple[str, str, str]]:
    def figures(flow: Flow) -> list[str]:
        summary = flow.summary
        convolutions = f"{summary['in_layout']:,} of {summary['convolutions']:,}"
        events = [f"{summary['breaks']:,}", f"{summary['regains']:,}"]
        return [*events, size(summary["copied_bytes"]), convolutions]

    titles = ["Layout lost", "Regained", "Copied per forward", "Convolutions in the layout"]
    return list(zip(titles, figures(before), figures(after), strict=True))


def _events(flow: Flow, before: Flow | None) -> Folded:
    titles = (
        "Event word, Phase text, Module name, Type text, Operation code, Cause text, Times number, "
        "Output number, Shape number, Operands prose, Called at text"
    )
    kinds = {"break": "lost", "regain": "regained"}
    listed = [(kinds.get(e.kind, e.kind), e) for e in flow.events]
    if before is not None:
        lost = {(e.module, e.source, e.operation) for e in flow.events if e.kind == "break"}
        breaks = [e for e in before.events if e.kind == "break"]
        kept = [e for e in breaks if (e.module, e.source, e.operation) not in lost]
        listed += [("kept by the steps", e) for e in kept]
    rows = [
        (
            *(kind, e.phase, e.module or _ROOT, e.type, e.operation, e.cause),
            *(f"{e.count:,}", size(e.bytes), e.shape, e.operand, e.source),
        )
        for kind, e in listed
    ]
    return _folded("Layout lost, regained or kept", titles, rows)


def _copies(flow: Flow) -> Folded:
    titles = "Module name, Type text, Operation code, Times number, Bytes number, Cause prose, Phase text"
    rows = [
        (c.module or _ROOT, c.type, c.operation, f"{c.count:,}", size(c.bytes), c.why, c.phase)
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
    modules: dict[str, set[str]] = {}
    for row in flow.convolutions:
        modules.setdefault(row.backend or "an unknown kernel", set()).add(row.module)
    ranked = sorted(modules, key=lambda name: -len(modules[name]))
    by = ", ".join(f"{len(modules[name]):,} by {name}" for name in ranked[:4])
    return _folded("Layouts and kernel of each convolution", titles, rows, f"Convolutions: {by}")


def _folded(label: str, titles: str, rows: list[tuple], fold: str = "") -> Folded:
    table = Table(label=label, columns=columns(titles), rows=rows, file="flow.json")
    return Folded(title=fold or f"{label}: {plural(len(rows), 'place')}", parts=(table,))
