"""Terminal output of a single job: its answers, or one line for each error."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from prepare.app.report.documents import (
    advice,
    advice_in,
    is_training,
    shown_of,
    stage_documents,
)
from prepare.app.report.sentences import (
    bytes_text,
    changes_text,
    declared_text,
    missed_notes,
    problems_of,
    title_text,
)
from prepare.app.report.terminal.console import console, has_width
from prepare.app.report.training_code import one_line
from prepare.core.document import FASTER, LAYOUT, NEXT, RIGHT, Advice, Answer, Document, Row
from prepare.core.utils.text import line, output, plural, printable

if TYPE_CHECKING:
    from prepare.app.job.outcome import Outcome
    from prepare.app.job.results import Results

# A step that a remedy adds.
_STEP = re.compile(r"\+steps\.\S+")
# The width of the longest label.
_LABEL = 8
_ORDER = (LAYOUT, RIGHT, FASTER)
# A remark that begins so goes on with the sentence of an advice.
_JOINED = ("or", "and", "as", "in", "with", "without", "best")


class RunOutput:
    """The output of a single run, each line as soon as it is known: a title and a line for each answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = shown_folder(folder)
        self._shown: list[Row] = []

    def show(self, results: Results) -> None:
        """Print what these results add to those that were shown."""
        if results.audit is not None:
            self._show_answers(results, self._documents(results), ended=False)

    def end(self, outcome: Outcome) -> None:
        """Print the rest, or the errors of the run."""
        results = outcome.results
        if results is not None:
            self._show_rest(results)
        for each in outcome.asked:
            line(printable(f"{each.reason}: {each.error}"), errors=True)
        if results is None or outcome.result.status in ("failed", "interrupted"):
            for problem in (outcome.result.error or "").splitlines():
                if not any(problem in text for _, text in self._shown):
                    line(printable(problem), errors=True)
            if outcome.result.traceback:
                line(f"the traceback is in {self._path('traceback.txt')}", errors=True)

    def _documents(self, results: Results) -> list[Document]:
        return stage_documents(shown_of(results, self._folder))

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)  # noqa: PTH118  for reading, not for use

    def _show_answers(
        self, results: Results, documents: Sequence[Document], *, ended: bool
    ) -> None:
        """Print the title, and the answers that were not shown yet."""
        title, rows = _title_and_rows(results, documents, ended=ended)
        if not self._shown:
            line(printable(title))
        # A stage that ends later may stand before one that was shown.
        _show_rows([row for row in rows if row not in self._shown])
        self._shown = rows or [("", "")]
        sys.stdout.flush()

    def _show_rest(self, results: Results) -> None:
        """Print the answers that are missing, what to do, the first warning or note, and the page."""
        documents = self._documents(results)
        self._show_answers(results, documents, ended=True)
        advised = self._advice(results, documents)
        _show_rows([(NEXT.lower(), text) for text in advised])
        rows = results.audit.rows if results.audit else ()
        missed = missed_notes(row for row in rows if row.status == "ineffective")
        notes = [*missed, *results.notes, *(note for each in documents for note in each.notes)]
        # A stage that follows a model without preparing it says itself what is slow there.
        told = results.audit is not None or not results.found
        warnings = problems_of(results.plan, "warnings") if told else []
        right = any(a.kind == "good" and a.question == RIGHT for d in documents for a in d.answers)
        if right and not is_training(results):  # what is an error in training only is on the page
            errors = problems_of(results.plan, "training_errors")
            warnings = [each for each in warnings if each not in errors]
        # A warning whose remedy is what to do anyway is on the page.
        words = {word for text in advised for word in text.split()}
        steps = [{*_STEP.findall(each.remedy)} for each in warnings]
        told_so = [bool(names) and names <= words for names in steps]
        shown = [f"warning: {w}" for w, told in zip(warnings, told_so, strict=True) if not told]
        _show_first(shown, notes)
        # Users copy the path, so do not wrap it.
        line(f"  {'details'.ljust(_LABEL)}  {printable(self._path('report.html'))}")

    def _advice(self, results: Results, documents: Iterable[Document]) -> list[str]:
        """Return what to do as one sentence; for a recipe to use, the call and the words that apply it."""
        if results.stopped:
            return []
        if results.audit is None and not results.found:
            return ["leave out task=plan to prepare it"]
        plan, found = results.plan or {}, advice(results, documents)
        text = f"{found.answer[0].lower()}{found.answer[1:]}"
        if found.section == "reproduce":
            method, training = results.model.partition(".")[2], is_training(results)
            formats = results.formats
            call = one_line("recipe.yaml", plan, method=method, formats=formats, training=training)
            return [call if method or formats else f"{call}, with the file beside the page"]
        given = [each for document in documents for each in document.answers]
        said = [text for each in given for text in (each.remark, each.line)]
        if not found.remark or any(
            found.answer[1:] in each or found.remark in each for each in said
        ):
            return [text]
        joint = ", " if found.remark.partition(" ")[0].strip(",") in _JOINED else "; "
        return [f"{text}{joint}{found.remark}"]


def show_report(title: str, documents: Sequence[Document], default: Iterable[Advice]) -> None:
    """Print a report on a model as a run is: a title, its answers, what to do, and the first note."""
    rows = _answer_rows(documents, ended=True)
    for found in advice_in(documents, default):
        answer = f"{found.answer[0].lower()}{found.answer[1:]}"
        rows.append((NEXT.lower(), "; ".join(filter(None, (answer, found.remark)))))
    line(printable(title))
    _show_rows(rows)
    _show_first([], [note for each in documents for note in each.notes])


def _title_and_rows(
    results: Results, documents: Iterable[Document], *, ended: bool
) -> tuple[str, list[Row]]:
    """Return the title of a run, and a row for each answer."""
    steps, rows = results.steps, _answer_rows(documents, ended=ended)
    if results.audit is not None:
        return title_text(results.model, steps, results.audit, results.amp), rows
    device = (steps.get("device") or {}).get("device")
    title = declared_text(results.model, steps, [device] if device else [], results.amp)
    if results.found:
        return f"{title} is not prepared", rows
    plan = results.plan["summary"] if results.plan else {}
    title = f"{title}: {changes_text(plan)}, and nothing was changed"
    return title, [("memory", bytes_text(plan, "now"))]


def _answer_rows(documents: Iterable[Document], *, ended: bool) -> list[Row]:
    """Return a row for each answer, and those of documents without, in the order of all outputs.

    Until the run has `ended`, an answer waits for those that stand before it.
    """
    found: dict[str, list[Row]] = {}
    for document in sorted(documents, key=lambda each: each.place):
        if document.title or ended:
            for answer in document.answers:
                found.setdefault(answer.question, [(answer.question.lower(), _line(answer))])
            if not document.answers:
                found[document.name] = list(document.rows)
    ranked = [*_ORDER, *(word for word in found if word not in _ORDER)]
    known = ranked if ended else takewhile(found.__contains__, ranked)
    return [row for word in known for row in found.get(word, ())]


def _line(answer: Answer) -> str:
    """Return the line of an answer; that of `Kept` and a remark is `kept: all 18 convolutions ...`."""
    if answer.line:
        return answer.line
    text = f"{answer.answer[0].lower()}{answer.answer[1:]}"
    return f"{text}: {answer.remark}" if answer.remark else text


def _show_first(warnings: Sequence[str], notes: Sequence[str]) -> None:
    """Print the first warning with its remedy, or the first note, and how many more there are."""
    more = len(warnings) + len(notes) - 1
    noun = "more warning" if not notes else "more note"
    rest = f"and {plural(more, noun)} on the page" if more else ""
    for text in warnings[:1]:
        line(printable(text), errors=True)
        if rest:
            line(f"  {rest}", errors=True)
    if notes and not warnings:
        _show_rows([("note", text) for text in filter(None, (notes[0], rest))])


def shown_folder(folder: Path) -> str:
    """Return a path that can be copied; relative if it is below the current folder."""
    relative = os.path.relpath(folder)
    # A run with hydra.job.chdir=true is in its folder, and the user is not.
    outside = relative == os.curdir or relative.startswith(os.pardir)
    return printable(folder.absolute() if outside else relative)


def _show_rows(rows: Sequence[Row]) -> None:
    """Print rows of label and text; in a pipe a line ends at a space only, as calls are copied."""
    width = max([_LABEL, *(len(label) for label, _ in rows)])
    room = max(console().width - width - 4, 20)
    last = ""
    for label, text in rows:
        begin = "" if label == last else label
        parts = textwrap.wrap(
            printable(text), room, break_long_words=has_width(output()), break_on_hyphens=False
        )
        for part in parts or [""]:
            line(f"  {begin.ljust(width)}  {part}".rstrip())
            begin = ""
        last = label
