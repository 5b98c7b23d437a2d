"""The terminal: it shows the answers of a run, the sentence and tables of a record, the table of a sweep."""

from __future__ import annotations

import os
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table as RichTable

from prepare.app.report import sentences
from prepare.app.report.answers import advice, by_question, one_line, stage_documents
from prepare.app.report.sweep_table import columns, conclusions, in_words, numbered, reasons
from prepare.app.sweep.ranking import rank
from prepare.core.document import FASTER, LAYOUT, NEXT, RIGHT, Answer, Document, Facts, Table, Text
from prepare.core.utils.text import first_line, line, plural, printable

if TYPE_CHECKING:
    from prepare.app.job.execute import Outcome
    from prepare.app.job.record import Results
    from prepare.app.sweep.summary import Summary, SweepRow
    from prepare.core.document import Part, Row
    from prepare.stages.stage import Column

# The width of the longest label, and the spaces between two columns of a sweep.
_LABEL, _GAP = 8, 2
# The lines of a run.
_MOST = 10
# Names are copied: those of at most so many letters are not folded.
_NAME = 40
_ORDER = (LAYOUT, RIGHT, FASTER)
# A remark that begins so goes on with the sentence of an advice.
_JOINED = ("or", "and", "as", "in", "with", "without", "best")


def console(*, errors: bool = False) -> Console:
    """Return a console that prints `[red]` in a name as text, not as a colour."""
    file = sys.stderr if errors else sys.stdout
    width = None if has_width(file) else 100
    return Console(file=file, markup=False, highlight=False, emoji=False, width=width)


def has_width(file: TextIO) -> bool:
    """Return whether lines have a limit: that of a terminal, or of the variable `COLUMNS`."""
    return file.isatty() or bool(os.environ.get("COLUMNS"))


@contextmanager
def stage(what: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner in a terminal until the stage ends, and nothing in a pipe.

    Yield a function that replaces the text beside the spinner.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    # The spinner `line` is plain ASCII; others cannot be shown everywhere.
    with console(errors=True).status(printable(what), spinner="line") as status:
        yield lambda text: status.update(printable(text))


def shown_folder(folder: Path) -> str:
    """Return a path that can be copied; relative if it is below the current folder."""
    relative = os.path.relpath(folder)
    # A run with hydra.job.chdir=true is in its folder, and the user is not.
    outside = relative == os.curdir or relative.startswith(os.pardir)
    return printable(folder.absolute() if outside else relative)


class RunOutput:
    """The output of a single run, each line as soon as it is known: a title and a line for each answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = shown_folder(folder)
        self._shown: list[Row] = []

    def show(self, results: Results) -> None:
        """Print what these results add to those that were shown."""
        if results.audit is not None:
            self._show_answers(results, stage_documents(results, self._folder), ended=False)

    def end(self, outcome: Outcome) -> None:
        """Print the rest, or the errors of the run."""
        results, result = outcome.results, outcome.result
        if results is not None:
            self._show_rest(results)
        for each in outcome.asked:
            line(printable(f"{each.reason}: {each.error}"), errors=True)
        if results is None or result.status in ("failed", "interrupted"):
            for problem in result.problems or (result.error or "").splitlines():
                if not any(str(problem) in text for _, text in self._shown):
                    line(printable(problem), errors=True)
            if result.traceback:
                line(f"the traceback is in {self._folder}{os.sep}traceback.txt", errors=True)

    def _show_answers(self, run: Results, documents: Sequence[Document], *, ended: bool) -> None:
        """Print the title, and the answers that were not shown yet."""
        rows = answer_rows(documents, ended=ended)
        if run.audit is None and not run.found and run.plan:
            rows.append(("memory", sentences.bytes_text(run.plan["summary"], "now")))
        if not self._shown:
            line(printable(_title(run)))
        # A stage that ends later may stand before one that was shown.
        _show_rows([row for row in rows if row not in self._shown])
        self._shown = rows or [("", "")]
        sys.stdout.flush()

    def _show_rest(self, run: Results) -> None:
        """Print the answers that are missing, what to do, the first warning or note, and the page."""
        documents = stage_documents(run, self._folder)
        self._show_answers(run, documents, ended=True)
        advised = "" if run.stopped else _advised(run, documents)
        rows = run.audit.rows if run.audit else ()
        missed = sentences.missed_notes(row for row in rows if row.status == "ineffective")
        notes = [*missed, *run.notes, *(note for each in documents for note in each.notes)]
        # A stage that follows a model without preparing it says itself what is slow there.
        told = run.audit is not None or not run.found
        warnings = sentences.problems_of(run.plan, "warnings") if told else []
        right = any(a.kind == "good" and a.question == RIGHT for d in documents for a in d.answers)
        if right and not run.is_training:  # what is an error in training only is on the page
            errors = sentences.problems_of(run.plan, "training_errors")
            warnings = [each for each in warnings if each not in errors]
        # A warning whose remedy is what to do anyway is on the page.
        first = [f"warning: {w}" for w in warnings if not sentences.is_told(w.remedy, advised)]
        shown = [(NEXT.lower(), advised)] if advised else []
        if notes and not first:
            note = ("note", _first(notes))
            if len(_lines([*self._shown, *shown, note])) > _MOST - 2:  # the title, and the page
                note = ("note", f"{plural(len(notes), 'note')} on the page")
            shown.append(note)
        _show_rows(shown)
        if first:
            line(printable(_first([*first, *notes])), errors=True)
        # Users copy the path, so do not wrap it.
        line(f"  {'details'.ljust(_LABEL)}  {self._folder}{os.sep}report.html")


def report_lines(run: Results) -> list[str]:
    """Return a report on a model as a run is: a title, its answers, what to do, and the first note."""
    documents = stage_documents(run)
    notes = [note for each in documents for note in each.notes]
    rows = [*answer_rows(documents, ended=True), (NEXT.lower(), _advised(run, documents))]
    return [printable(_title(run)), *_lines([*rows, *([("note", _first(notes))] if notes else [])])]


def answer_rows(documents: Iterable[Document], *, ended: bool) -> list[Row]:
    """Return a row for each answer, in the order of all outputs.

    Until the run has `ended`, an answer waits for those that stand before it.
    """
    found = by_question(each for each in documents if each.title or ended)
    ranked = [*_ORDER, *(word for word in found if word not in _ORDER)]
    known = ranked if ended else takewhile(found.__contains__, ranked)
    return [(word.lower(), _line(found[word])) for word in known if word in found]


def _title(run: Results) -> str:
    """Return what was made of the model, or would be."""
    if run.audit is not None:
        return sentences.title_text(run.model, run.steps, run.audit, run.amp)
    device = (run.steps.get("device") or {}).get("device")
    title = sentences.declared_text(run.model, run.steps, [device] if device else [], run.amp)
    if run.found:
        return f"{title}, looked at only"
    planned = sentences.changes_text(run.plan["summary"]) if run.plan else "nothing was planned"
    return f"{title}: {planned}, and nothing was changed"


def _line(answer: Answer) -> str:
    """Return the line of an answer; that of `Kept` and a remark is `kept: all 18 convolutions ...`."""
    text = _lower(answer.answer)
    return answer.line or (f"{text}: {answer.remark}" if answer.remark else text)


def _lower(text: str) -> str:
    return f"{text[0].lower()}{text[1:]}"


def _advised(run: Results, documents: Iterable[Document]) -> str:
    """Return what to do as one sentence; for a recipe to use, the call that applies it."""
    documents = list(documents)
    found = advice(run, documents)
    if run.task and found.section == "reproduce":
        call, short = one_line(run), "; " not in one_line(run)
        return f"{call}, with the file beside the page" if short else call
    given = [each for document in documents for each in document.answers]
    said = [text for each in given for text in (each.remark, each.line)]
    if not found.remark or any(
        t in each for each in said for t in (found.answer[1:], found.remark)
    ):
        return _lower(found.answer)
    joint = ", " if found.remark.partition(" ")[0].strip(",") in _JOINED else "; "
    return f"{_lower(found.answer)}{joint}{found.remark}"


def _first(texts: Sequence[str]) -> str:
    """Return the first of some texts, and how many more there are."""
    more = len(texts) - 1
    return f"{texts[0]} (and {more} more on the page)" if more else texts[0]


def _show_rows(rows: Sequence[Row]) -> None:
    for text in _lines(rows):
        line(text)


def _lines(rows: Sequence[Row]) -> list[str]:
    """Return rows of label and text as lines; in a pipe these end at a space only, as calls are copied."""
    width = max([_LABEL, *(len(label) for label, _ in rows)])
    room = max(console().width - width - 4, 20)
    long, found = has_width(sys.stdout), []
    for label, text in rows:
        options: Any = {"break_long_words": long, "break_on_hyphens": False}
        for at, part in enumerate(textwrap.wrap(printable(text), room, **options) or [""]):
            found.append(f"  {('' if at else label).ljust(width)}  {part}".rstrip())
    return found


def document_lines(document: Document) -> Iterator[str]:
    """Yield the sentence of a document, and below it its parts."""
    yield printable(f"{document.head}: {document.line}" if document.head else document.line)
    for part in document.shown("terminal"):
        yield from part_lines(part)


def part_lines(part: Part) -> Iterator[str]:
    """Yield the lines of a part; bars and code are for pages."""
    if isinstance(part, Text):
        said = (part.text,) if isinstance(part.text, str) else part.text
        yield from (f"  {printable(text)}" for text in said)
    elif isinstance(part, Facts):
        width = max((len(name) for name, _ in part.rows), default=0)
        yield from (f"  {name.ljust(width)}  {printable(text)}" for name, text in part.rows)
    elif isinstance(part, Table) and part.rows:
        yield from _table(part)


def _table(part: Table, width: int | None = None) -> Iterator[str]:
    rows = [[_cell(value) for value in row] for row in islice(part.rows, part.most)]
    table = RichTable(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    for at, (title, kind) in enumerate(part.columns):
        justify: Any = "right" if kind == "number" else "left"
        whole = kind == "name" and max(len(row[at]) for row in rows) <= _NAME
        table.add_column(printable(title), overflow="fold", justify=justify, no_wrap=whole)
    for row in rows:
        table.add_row(*row)
    terminal = console()
    terminal.width = width or terminal.width
    with terminal.capture() as captured:
        terminal.print(table)
    yield from (row.rstrip() for row in captured.get().splitlines())
    if len(part.rows) > part.most:
        yield f"... and {plural(len(part.rows) - part.most, part.noun)} more"


def _cell(value: Any) -> str:
    """Return the text of a cell; the items of a list have a line each."""
    if isinstance(value, list):
        return "\n".join(map(printable, value))
    return printable(", ".join(map(str, value)) if isinstance(value, tuple) else str(value))


def show_summary(summary: Summary) -> None:
    """Print the table of a sweep, each reason and the conclusions."""
    ranking = rank(summary)
    _show_columns(columns(summary, ranking), ranking.rows)
    for numbers, reason in reasons(summary.rows):
        line(f"{numbered(numbers)}: {printable(first_line(reason))}")
    for conclusion in conclusions(summary, ranking):
        line(printable(conclusion))


def show_where(summary: Summary, folder: Path) -> None:
    """Print how the rows ended, and the paths of table and page."""
    statuses = Counter(in_words(row.status) for row in summary.rows)
    others = (f", {count} {status}" for status, count in statuses.items() if status != "ok")
    text = f"{statuses['ok']} of {plural(len(summary.rows), 'row')} ok{''.join(others)}"
    line(f"{text}; the table is in {shown_folder(folder / 'summary.csv')}")
    line(f"the page is in {shown_folder(folder / 'report.html')}")


def _show_columns(available: Sequence[Column], rows: Sequence[SweepRow]) -> None:
    """Print the columns that fit into the terminal, all in a pipe, and the titles of the others."""
    cells = {column: [printable(column.text(row)) or "-" for row in rows] for column in available}
    widths = {c: max(map(len, (c.title, *cells[c]))) + _GAP for c in available}
    shown = list(available)
    width = console().width if has_width(sys.stdout) else sum(widths.values())
    while sum(widths[column] for column in shown) - _GAP > width:
        least = max(shown, key=lambda column: column.spare)
        if not least.spare:
            break
        shown.remove(least)
    titles = tuple((column.title, "number" if column.number else "text") for column in shown)
    found = list(zip(*(cells[column] for column in shown), strict=True))
    for text in _table(Table(label="", columns=titles, rows=found, most=len(rows)), width):
        line(text)
    if len(shown) < len(available):
        hidden = ", ".join(column.title for column in available if column not in shown)
        line(f"columns left out, as the terminal is too narrow: {printable(hidden)}")
