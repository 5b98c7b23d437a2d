"""The document of a tuning: the fastest correct recipe, and why each other one lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from prepare.core import document as parts
from prepare.core.document import FASTER, RIGHT, UNCLEAR, USE_RECIPE, Advice, Answer, Document, Text
from prepare.core.utils import numbers
from prepare.core.utils.machine import disturbed_times
from prepare.core.utils.numbers import doubt, interval_text
from prepare.core.utils.text import capitalized, plural, printable
from prepare.stages.tune.records import UNPREPARED, CandidateResult, Tuning

# More bars do not fit on the first screen.
_BARS = 6
_NONE = "no recipe was shown to be correct and faster"


def tune_document(shown: parts.ReportContext) -> Document | None:
    """Return what is shown of the tuning of a run; None if it had none."""
    tuning = shown.found.get("tune")
    if tuning is None:
        return None
    return Document(
        name="tune",
        title="Recipes",
        place=10,
        line=tune_sentence(tuning),
        head=f"tune ({tuning.last.what})",
        answers=(_faster(tuning), _right(tuning)),
        advice=(_advice(tuning),),
        parts=lambda: (*_in_terminal(tuning), *_on_page(tuning)),
        # As many bars as fit on the first screen; the section has them all.
        lead=(_bars(tuning, _BARS),),
    )


def tune_sentence(tuning: Tuning) -> str:
    """Return one sentence: `channels_last is 1.3x faster, 163 instead of 214 ms; 3 of 6 recipes timed`."""
    timed = sum(row.rounds > 0 for row in tuning.rows)
    counted = f"{timed} of {plural(len(tuning.rows), 'recipe')} timed"
    if tuning.winner != UNPREPARED:
        remark = f"; {clock}" if (clock := tuning.last.clock_remark) else ""
        return f"{tuning.winner} is {_speed(tuning)}{remark}; {counted}"
    if tuning.is_clear:
        return f"{tuning.winner}, as no correct recipe is faster; {counted}"
    disturbed = disturbed_times(tuning.last.settings, tuning.last.noise)
    return f"unclear, as {_NONE}; {counted}; {disturbed or 'give it more time (tune.budget)'}"


def _speed(tuning: Tuning, *, confidence: float | None = 0.95) -> str:
    """Return how fast the winner is: `1.3x faster, 163 instead of 214 ms (95 % interval: ...)`."""
    row, before = tuning.row(tuning.winner), tuning.row(UNPREPARED).seconds
    time = None if row.ratio is None or before is None else row.ratio * before
    interval = row.ratio_interval
    return numbers.speed_text(row.verdict, row.ratio, interval, time=time, confidence=confidence)


def _faster(tuning: Tuning) -> Answer:
    row, sentence, line = tuning.row(tuning.winner), "", ""
    if row.name != UNPREPARED:
        answer = f"{row.name} is {_speed(tuning, confidence=None)}"
        between = interval_text(row.ratio_interval, row.verdict)
        clock = tuning.last.clock_remark
        kind, remark = "good", "; ".join(filter(None, (f"95 % interval: {between}", clock)))
        line = "; ".join(filter(None, (f"{_speed(tuning)}, with {row.name}", clock)))
    elif tuning.is_clear:
        kind, answer, remark = "plain", "No recipe is faster", row.reason
    else:
        kind, answer, remark, sentence = "warn", UNCLEAR, _NONE, "Speed unclear"
    if busy := tuning.last.busy:
        sentence = f"{sentence or answer}. {capitalized(busy)}"
    return Answer(FASTER, kind, answer, remark, sentence=sentence, line=line)


def _right(tuning: Tuning) -> Answer:
    if tuning.winner == UNPREPARED:
        return Answer(RIGHT, "plain", "Unchanged", "the model as it is")
    return Answer(RIGHT, "good", "Yes", _outputs(tuning.row(tuning.winner)), sentence="Right")


def _advice(tuning: Tuning) -> Advice:
    if tuning.winner != UNPREPARED:
        return replace(USE_RECIPE, rank=65)
    if tuning.is_clear:
        return Advice(90, "plain", "Leave the model as it is", "no correct recipe is faster")
    return Advice(80, "warn", "Tune it longer with tune.budget", "best on an idle machine")


def _in_terminal(tuning: Tuning) -> Iterator[parts.Part]:
    table = _table(tuning, timed_only=True)
    columns = tuple((title.lower(), kind) for title, kind in table.columns)
    yield replace(table, columns=columns, where="terminal")
    for text in _lost(tuning):
        yield Text(text=text, where="terminal")
    for note in (_measured(tuning), *(f"note: {note}" for note in tuning.notes)):
        yield Text(text=note, where="terminal")


def _on_page(tuning: Tuning) -> Iterator[parts.Part]:
    yield Text(text=f"{tune_sentence(tuning)}.", where="page")
    yield _table(tuning, timed_only=False)
    if sum(row.ratio is not None for row in tuning.rows) > _BARS:
        yield parts.Folded(title="Bars of all recipes", parts=(_bars(tuning),))
    lost = parts.Items(texts=tuple(_lost(tuning)), kind="note")
    yield parts.Folded(title="Why the other recipes lost", parts=(lost,))
    yield parts.Items(texts=(_measured(tuning), *tuning.notes), kind="note", where="page")


def _ranked(tuning: Tuning) -> list[CandidateResult]:
    """Return the winner, then the others from the fastest to the slowest, then those without a time."""
    return sorted(
        tuning.rows, key=lambda row: (row.name != tuning.winner, row.ratio is None, row.ratio or 0)
    )


def _bars(tuning: Tuning, most: int | None = None) -> parts.Charts:
    """Return bars of the times against the unprepared model, with their intervals."""
    rows = [_bar(row, tuning) for row in _ranked(tuning) if row.ratio is not None]
    title = f"Time of one {tuning.last.what}, against the unprepared model"
    return parts.Charts(charts=(parts.Bars(title=title, rows=tuple(rows[:most])),))


def _bar(row: CandidateResult, tuning: Tuning) -> parts.Bar:
    mark = "worse" if row.verdict == "slower" else "same"
    marks = {UNPREPARED: "baseline", tuning.winner: "better"}
    return parts.Bar(
        label=row.name,
        value=row.ratio,
        interval=row.ratio_interval,
        text=_verdict(row),
        mark="wrong" if row.status == "wrong" else marks.get(row.name, mark),
    )


def _verdict(row: CandidateResult) -> str:
    """Return the verdict on a recipe against the unprepared model: `1.3x faster`."""
    return numbers.verdict_text(row.verdict, row.ratio, row.ratio_interval)


def _table(tuning: Tuning, *, timed_only: bool) -> parts.Table:
    rows = [row for row in _ranked(tuning) if row.ratio is not None or not timed_only]
    titles = "Recipe head, Result text, Time number, Speed text, Interval text, Outputs text"
    compiled = any("compile" in row.steps and row.first_seconds for row in rows)
    return parts.Table(
        label="Timed recipes" if timed_only else "All recipes",
        columns=parts.columns(titles + (", First call number" if compiled else "")),
        rows=[_cells(row)[: 6 + compiled] for row in rows],
        most=len(rows),
        where="page",
    )


def _cells(row: CandidateResult) -> tuple[str, ...]:
    results = {"dropped": row.reason, "timed": "in the last comparison"}
    return (
        row.name,
        printable(results.get(row.status, doubt(row.status))),
        "" if row.seconds is None else numbers.seconds(row.seconds),
        "" if row.name == UNPREPARED else _verdict(row),
        interval_text(row.ratio_interval, row.verdict),
        _outputs(row),
        "" if row.first_seconds is None else numbers.seconds(row.first_seconds),
    )


def _outputs(row: CandidateResult) -> str:
    """Return what the verification found: `outputs at 2 % of the tolerance`."""
    part = numbers.part_of_tolerance(row.error, row.allowed)
    return doubt(row.verified) if part is None else f"outputs at {numbers.tolerance_text(part)}"


def _lost(tuning: Tuning) -> list[str]:
    """Return why recipes lost, those with one reason in one line."""
    names: dict[str, list[str]] = {}
    for row in _ranked(tuning):
        if row.status not in ("winner", "dropped") and row.reason:
            word = "" if row.status == "timed" else f"{doubt(row.status)}: "
            names.setdefault(f"{word}{row.reason}", []).append(row.name)
    return [f"{', '.join(each)}: {reason}" for reason, each in names.items()]


def _measured(tuning: Tuning) -> str:
    last = tuning.last
    rounds = f"{plural(last.repeats, 'round')} at last, {numbers.seconds(tuning.seconds)} in all"
    return "; ".join(filter(None, (rounds, numbers.noise_text(last.noise))))
