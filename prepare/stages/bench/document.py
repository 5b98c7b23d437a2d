"""The document of a timing: whether the prepared model is faster, by how much, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prepare.core.document import (
    FASTER,
    NOT_MEASURED,
    UNCHANGED,
    Advice,
    Answer,
    Bar,
    Bars,
    Charts,
    Document,
    Folded,
    Items,
    Part,
    ReportContext,
    Table,
    Text,
    columns,
)
from prepare.core.utils.machine import disturbed_times
from prepare.core.utils.numbers import (
    digits,
    doubt,
    interval_text,
    is_wide,
    noise_text,
    seconds,
    span,
    speed_text,
    verdict_text,
)
from prepare.core.utils.text import capitalized, plural, printable
from prepare.stages.bench.records import PREPARED, Bench, Case, Comparison, Control, VariantResult

if TYPE_CHECKING:
    from prepare.stages.verify.records import Verification

_SECTION = "bench"
_MARKS = {"baseline": "baseline", "faster": "better", "slower": "worse"}
_SAYS = {"unclear": "Speed unclear", "no difference": "No faster"}
_KINDS = {"faster": "good", "slower": "bad", "unclear": "warn"}


def bench_document(shown: ReportContext) -> Document | None:
    """Return what is shown of the timing of a run; None if it was to have none."""
    bench, verification = shown.found.get("bench"), shown.found.get("verify")
    if bench is None:
        if not shown.had("bench"):
            return None
        remark = UNCHANGED if shown.unchanged else shown.without("bench")
        sentence = "Speed not measured"
        missing = Answer(FASTER, "plain", NOT_MEASURED, remark, sentence=sentence)
        return Document(name=_SECTION, place=50, answers=(missing,))
    if isinstance(bench, Comparison):
        return comparison_document(bench)
    wrong, busy = is_wrong(verification), bench.busy
    return Document(
        name=_SECTION,
        title=FASTER,
        place=50,
        line="; ".join(map(case_sentence, bench.cases)),
        head="faster",
        answers=(_answer(bench, busy, wrong=wrong),),
        advice=tuple(_advice(bench)),
        notes=(
            *((busy,) if busy and busy.partition(";")[0] not in _row_line(bench) else ()),
            *_repeats(bench),
        ),
        parts=lambda: (
            *(Text(text=case_sentence(case), where="terminal") for case in bench.cases[1:]),
            *_on_page(bench, verification),
        ),
    )


def comparison_document(comparison: Comparison) -> Document:
    """Return what is shown of a comparison of variants."""
    titles = columns("variant name, time text, ratio text, interval text, verdict text")
    rows = [
        (
            row.name,
            "" if row.seconds is None else seconds(row.seconds),
            "" if row.ratio is None else f"{row.ratio:.3f}",
            span(row.ratio_interval, "{:.3f}".format),
            doubt(row.verdict),
        )
        for row in comparison.rows
    ]
    verdicts = ", ".join(f"{row.name} {doubt(row.verdict)}" for row in comparison.rows)
    table = Table(label="Times", columns=titles, rows=rows, most=len(rows), where="terminal")
    return Document(
        name=_SECTION,
        title="Times",
        line=f"{verdicts}; {plural(comparison.repeats, 'round')}",
        head="compared",
        parts=lambda: (
            table,
            *(Text(text=f"note: {note}", where="terminal") for note in comparison.notes),
            *_on_page(comparison.as_bench(), None),
        ),
    )


def case_sentence(case: Case) -> str:
    """Return one sentence: `inference 1.2x faster, 38.1 instead of 46.0 ms (95 % interval: ...)`."""
    row, what = case.row, case.what
    if case.comparison is None or row.ratio is None:
        return printable(f"{what} {doubt(row.verdict)}: {row.reason}")
    text = _speed(case, _confidence(case))
    if row.verdict == "unclear":
        text += f", as {row.reason or 'the interval is too wide'}"
    elif row.ratio_interval and is_wide(row.ratio_interval):
        disturbed = disturbed_times(case.comparison.settings, case.comparison.noise)
        text += f", as {disturbed}" if disturbed else ""
    return printable(f"{what} {text}")


def _row_line(bench: Bench) -> str:
    return f"{bench.headline.reason} {case_sentence(bench.cases[0])}"


def _confidence(case: Case) -> float:
    settings = case.comparison.settings if case.comparison else {}
    return float(settings.get("confidence", 0.95))


def _speed(case: Case, confidence: float | None) -> str:
    """Return the verdict on the prepared model with its times, and with a confidence their interval."""
    row = case.row
    return speed_text(
        row.verdict, row.ratio, row.ratio_interval, time=case.seconds, confidence=confidence
    )


def _repeats(bench: Bench) -> Iterator[str]:
    """Yield which models returned other values for the same input, of the first case that shows any."""
    cases = [case.comparison for case in bench.cases if case.comparison]
    found = ([f"the {r.name} model: {r.repeats}" for r in c.rows if r.repeats] for c in cases)
    yield from next(filter(None, found), [])


def is_wrong(verification: Verification | None) -> bool:
    """Return true if verification found wrong outputs."""
    return verification is not None and verification.status == "fail"


def _answer(bench: Bench, busy: str, *, wrong: bool) -> Answer:
    """Return whether it is faster; that of a wrong model is not a success."""
    row, comparison = bench.headline, bench.cases[0].comparison
    if row.ratio is None or comparison is None:
        kind, answer = ("bad", "Failed") if row.verdict == "failed" else ("plain", NOT_MEASURED)
        remark, sentence, line = row.reason, f"Speed {answer.lower()}", ""
    else:
        text = _speed(bench.cases[0], confidence=None)
        answer = capitalized(text)
        kind, remark = _KINDS.get(row.verdict, "plain"), f"{_remark(row)} ({bench.cases[0].what})"
        line = case_sentence(bench.cases[0]).removeprefix("inference").lstrip(", ")
        if kind == "good" and wrong:
            kind, remark = "plain", f"{remark}; but the outputs are wrong"
        line += "; but its outputs are wrong" if wrong else ""
        sentence = _SAYS.get(row.verdict, answer)
        sentence += f". {capitalized(busy)}" if busy else ""
    return Answer(FASTER, kind, answer, remark, sentence=sentence, line=line)


def _remark(row: VariantResult) -> str:
    """Return the interval of the change of the time, or why the verdict is unclear."""
    if row.verdict == "unclear":
        return row.reason or "the interval is too wide"
    return f"95 % interval: {interval_text(row.ratio_interval, row.verdict) or 'not known'}"


def _advice(bench: Bench) -> Iterator[Advice]:
    row = bench.headline
    found = {
        "slower": (60, "bad", "Leave the model unprepared", "it is slower"),
        "unclear": (70, "warn", "Time it longer with bench=full", "best on an idle machine"),
        "no difference": (75, "plain", "Leave the model unprepared", "it is not faster"),
        "not compared": (75, "warn", "Time it before you use it", printable(row.reason)),
        "failed": (75, "warn", "Time it before you use it", printable(row.reason)),
    }.get(row.verdict)
    if found:
        rank, kind, answer, remark = found
        yield Advice(rank, kind, answer, remark)


def _on_page(bench: Bench, verification: Verification | None) -> Iterator[Part]:
    for case in bench.cases:
        text = case_sentence(case)
        yield Text(text=capitalized(text), where="page")
    if is_wrong(verification):
        text = "The outputs of the prepared model are wrong, so its time is that of another computation."
        yield Text(text=text, kind="error", where="page")
    charts = bench_charts(bench, verification)
    yield Charts(charts=tuple(charts))
    titles = columns(
        "Case text, Model head, Time number, Interval number, Speed prose, Interval number, "
        "Items/s number"
    )
    rows = [row for case in bench.cases for row in _rows(case)]
    parts: list[Part] = [Table(label="Times", columns=titles, rows=rows)]
    if charts:
        compared = [case.comparison for case in bench.cases if case.comparison]
        confidence = f"{100 * float(compared[0].settings.get('confidence', 0.95)):g}% confidence"
        text = f"A whisker is the interval of the median with {confidence}. The speed is the median over "
        text += "rounds in which both models ran, so it may differ from that of the two medians."
        parts.append(Text(text=text, kind="note"))
    yield Folded(title="All figures", parts=tuple(parts))
    yield Items(texts=tuple(_notes(bench)), kind="note", where="page")


def bench_charts(bench: Bench, verification: Verification | None) -> list[Bars]:
    """Return bars of the times of each case."""
    wrong = is_wrong(verification)
    return [
        Bars(title=f"Time of one {case.what}", rows=tuple(_times(case, wrong=wrong)))
        for case in bench.cases
        if case.comparison
    ]


def _times(case: Case, *, wrong: bool) -> Iterator[Bar]:
    for row in case.comparison.rows if case.comparison else ():
        yield Bar(
            label=row.name,
            value=row.seconds,
            interval=row.seconds_interval,
            text=doubt(row.verdict) if row.seconds is None else seconds(row.seconds),
            mark=_mark(row, wrong=wrong),
        )


def _mark(row: VariantResult, *, wrong: bool) -> str:
    if wrong and row.name == PREPARED:
        return "wrong"
    return _MARKS.get(row.verdict, "same")


def _rows(case: Case) -> Iterator[tuple[str, ...]]:
    for row in case.comparison.rows if case.comparison else ():
        yield (
            case.what,
            row.name,
            "" if row.seconds is None else seconds(row.seconds),
            span(row.seconds_interval, seconds),
            verdict_text(row.verdict, row.ratio, row.ratio_interval),
            interval_text(row.ratio_interval, row.verdict),
            "" if row.throughput is None else digits(row.throughput),
        )


def _notes(bench: Bench) -> Iterable[str]:
    for case in bench.cases:
        comparison = case.comparison
        if comparison is None:
            continue
        settings = comparison.settings
        threads = plural(int(settings.get("threads", 0)), "thread")
        rounds = f"{plural(comparison.repeats, 'round')} in {seconds(comparison.seconds)}"
        batch = plural(int(settings.get("batch_size") or 0), "sample")
        yield f"{case.what}: {rounds}, {batch} a call, {threads}{_control(comparison.aa)}"
        for row in comparison.rows:
            if row.reason:
                yield f"{case.what}: {row.name}: {row.reason}"
        yield from (f"{case.what}: {note}" for note in comparison.notes)


def _control(control: Control | None) -> str:
    """Return the clause on the baseline against itself, which follows the number of rounds."""
    if control is None:
        return "; the baseline failed, so nothing was compared"
    noise = noise_text(control.noise)
    return f"; the baseline against itself: {noise or 'too few rounds for an interval'}"
