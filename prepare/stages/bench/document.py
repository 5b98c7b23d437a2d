"""The document of a comparison: whether the prepared model is faster, by how much, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from prepare.core import document as parts
from prepare.core.document import FASTER, NOT_MEASURED, UNCHANGED, Advice, Answer, Document, Text
from prepare.core.utils import text as numbers
from prepare.core.utils.text import capitalized, doubt, interval_text, plural, printable
from prepare.stages.bench.records import PREPARED, UNPREPARED, Comparison, VariantResult

_MARKS = {"baseline": "baseline", "faster": "better", "slower": "worse"}
_KINDS = {"faster": "good", "slower": "bad", "unclear": "warn"}
_WRONG = "The outputs of the prepared model are wrong, so its time is that of another computation."


def bench_document(shown: parts.ReportContext) -> Document | None:
    """Return what is shown of the timing of a run, or of a comparison alone; None if there was to be none."""
    found, verification = shown.found.get("bench"), shown.found.get("verify")
    if found is None:
        if not shown.had("bench"):
            return None
        remark = UNCHANGED if shown.unchanged else shown.without("bench")
        missing = Answer(FASTER, "plain", NOT_MEASURED, remark)
        return Document(name="bench", place=50, answers=(missing,))
    if found.baseline != UNPREPARED:
        return _of_variants(found)
    wrong = verification is not None and verification.status == "fail"
    line, busy = speed_sentence(found), found.busy
    is_new = busy.partition(";")[0] not in f"{found.headline.reason} {line}"
    return Document(
        name="bench",
        title=FASTER,
        place=50,
        line=line,
        head="faster",
        answers=(_answer(found, wrong=wrong),),
        advice=tuple(_advice(found)),
        notes=(busy,) if busy and is_new else (),
        parts=lambda: tuple(_on_page(found, wrong=wrong)),
    )


def _of_variants(found: Comparison) -> Document:
    """Return what is shown of a comparison of other variants."""
    verdicts = ", ".join(f"{row.name} {doubt(row.verdict)}" for row in found.rows)
    return Document(
        name="bench",
        title="Times",
        line=f"{verdicts}; {plural(found.repeats, 'round')}",
        head="compared",
        parts=lambda: (
            replace(_table(found), where="terminal"),
            *(Text(text=f"note: {note}", where="terminal") for note in _notes(found)),
            *_on_page(found, wrong=False),
        ),
    )


def speed_sentence(found: Comparison) -> str:
    """Return one sentence: `inference 1.2x faster, 38.1 instead of 46.0 ms (95 % interval: ...)`."""
    row = found.headline
    if row.ratio is None:
        return printable(f"{found.what} {doubt(row.verdict)}: {row.reason}")
    text = _speed(found, float(found.settings.get("confidence", 0.95)))
    if row.verdict == "unclear":
        text += f", as {row.reason or 'the interval is too wide'}"
    return printable("; ".join(filter(None, (f"{found.what} {text}", found.clock_remark))))


def _speed(found: Comparison, confidence: float | None) -> str:
    """Return the verdict on the prepared model with its times, and with a confidence their interval."""
    row, time = found.headline, found.prepared_seconds
    figures = row.verdict, row.ratio, row.ratio_interval
    return numbers.speed_text(*figures, time=time, confidence=confidence)


def _answer(found: Comparison, *, wrong: bool) -> Answer:
    """Return whether it is faster; that of a wrong model is not a success."""
    row = found.headline
    if row.ratio is None:
        kind, answer = ("bad", "Failed") if row.verdict == "failed" else ("plain", NOT_MEASURED)
        return Answer(FASTER, kind, answer, row.reason)
    answer, kind = capitalized(_speed(found, None)), _KINDS.get(row.verdict, "plain")
    between = interval_text(row.ratio_interval, row.verdict) or "not known"
    remark = f"95 % interval: {between}"
    if row.verdict == "unclear":
        remark = row.reason or "the interval is too wide"
    remark = "; ".join(filter(None, (f"{remark} ({found.what})", found.clock_remark)))
    line = speed_sentence(found).removeprefix("inference").lstrip(", ")
    if wrong:
        line += "; but its outputs are wrong"
        if kind == "good":
            kind, remark = "plain", f"{remark}; but the outputs are wrong"
    return Answer(FASTER, kind, answer, remark, line=line)


def _advice(found: Comparison) -> Iterator[Advice]:
    row = found.headline
    if row.verdict in ("slower", "no difference"):
        rank, kind = (60, "bad") if row.verdict == "slower" else (75, "plain")
        why = "it is slower" if kind == "bad" else "it is not faster"
        yield Advice(rank, kind, "Leave the model unprepared", why)
    elif row.verdict == "unclear":
        yield Advice(70, "warn", "Time it longer with bench.seconds=60", "best on an idle machine")
    elif row.verdict != "faster":
        yield Advice(75, "warn", "Time it before you use it", printable(row.reason))


def _on_page(found: Comparison, *, wrong: bool) -> Iterator[parts.Part]:
    yield Text(text=capitalized(speed_sentence(found)), where="page")
    if wrong:
        yield Text(text=_WRONG, where="page")
    bars = tuple(_bar(row, wrong=wrong) for row in _as_said(found))
    yield parts.Bars(title=f"Time of one {found.what}", rows=bars)
    yield parts.Folded(title="All figures", parts=(_table(found),))
    yield Text(text=tuple(_notes(found)), kind="note", where="page")


def _table(found: Comparison) -> parts.Table:
    rows = [
        (
            row.name,
            _time(row),
            numbers.verdict_text(row.verdict, row.ratio, row.ratio_interval),
            interval_text(row.ratio_interval, row.verdict),
        )
        for row in _as_said(found)
    ]
    titles = parts.columns("Model head, Time number, Speed prose, Interval number")
    return parts.Table(label="Times", columns=titles, rows=rows, most=len(rows))


def _as_said(found: Comparison) -> list[VariantResult]:
    """Return the rows, the prepared one with the time of all sentences: its ratio times the baseline."""
    time = found.prepared_seconds
    return [replace(row, seconds=time) if row.name == PREPARED else row for row in found.rows]


def _bar(row: VariantResult, *, wrong: bool) -> parts.Bar:
    return parts.Bar(
        label=row.name,
        value=row.seconds,
        interval=row.seconds_interval,
        text=_time(row) or doubt(row.verdict),
        mark="wrong" if wrong and row.name == PREPARED else _MARKS.get(row.verdict, "same"),
    )


def _time(row: VariantResult) -> str:
    return "" if row.seconds is None else numbers.seconds(row.seconds)


def _notes(found: Comparison) -> Iterator[str]:
    settings = found.settings
    if found.repeats:
        control = "the baseline failed, so nothing was compared"
        if found.aa:
            noise = numbers.noise_text(found.noise) or "too few rounds for an interval"
            control = f"the baseline against itself: {noise}"
        rounds = f"{plural(found.repeats, 'round')} in {numbers.seconds(found.seconds)}"
        threads = plural(int(settings.get("threads") or 0), "thread")
        yield f"{rounds}, {threads}, {settings.get('timer') or 'wall clock'}; {control}"
    yield from (f"{row.name}: {row.reason}" for row in found.rows if row.reason)
    yield from found.notes
