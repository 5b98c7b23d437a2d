"""Terminal output of a single job: its answers, with `--verbose` all of it, or one line for each error."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare.app.report.documents import advice, advice_in, shown_of, stage_documents
from prepare.app.report.plan_changes import changes_table
from prepare.app.report.sentences import (
    by_remedy,
    bytes_text,
    changes_text,
    convolutions_text,
    declared_text,
    missed_notes,
    outputs_sentence,
    title_text,
)
from prepare.app.report.terminal.console import console, has_width
from prepare.app.report.terminal.document import part_lines, show_document
from prepare.app.report.training_code import one_line
from prepare.core.document import FASTER, LAYOUT, NEXT, RIGHT, Advice, Answer, Document, Row
from prepare.core.utils.text import line, output, plural, printable, size
from prepare.core.utils.wording import step
from prepare.stages.registry import ordered_stages
from prepare.stages.stage import Stage

if TYPE_CHECKING:
    from prepare.app.job.outcome import Outcome
    from prepare.app.job.results import Results
    from prepare.audit import Audit
    from prepare.core.forward.run_example import LayoutCount
    from prepare.pipeline import Pipeline

# The width of the longest label: of the answers, and with `--verbose`.
_LABEL, _LABELS = 8, 12
_ORDER = (LAYOUT, RIGHT, FASTER)
# A remark that begins so goes on with the sentence of an advice.
_JOINED = ("or", "and", "as", "in", "with", "without", "best")


class RunOutput:
    """The output of a single run: each line as soon as it is known.

    A result has a title and a line for each answer; with `verbose` also all that the answers rest on.
    """

    def __init__(self, folder: Path, *, verbose: bool = False) -> None:
        self._folder, self._verbose = shown_folder(folder), verbose
        self._shown: list[Row] = []

    def show(self, results: Results) -> None:
        """Print what these results add to those that were shown."""
        if results.audit is not None:
            documents = self._documents(results)
            self._show_answers(self._document(results, documents, ended=False), documents)

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

    def _document(
        self, results: Results, documents: Sequence[Document], *, ended: bool = True
    ) -> Document:
        """Return what is shown of the run: a title, its answers as rows, and what follows them."""
        audit, steps = results.audit, results.pipeline.to_config()
        rows = _answer_rows(documents, ended=ended)
        details = [(NEXT.lower(), text) for text in self._advice(results, documents) if ended]
        notes = [*results.notes, *(note for each in documents for note in each.notes)]
        if audit is not None:
            title = title_text(results.model, steps, audit, results.amp)
            missed = (r for r in audit.rows if self._verbose or r.status == "ineffective")
            notes = [*missed_notes(missed), *notes]
            if self._verbose:
                counted = convolutions_text(audit.summary["convolutions"], steps)
                rows = [
                    ("convolutions", counted),
                    *(row for each in documents for row in each.rows),
                ]
                details += _detail_rows(results, audit, documents)
        else:
            device = (steps.get("device") or {}).get("device")
            devices = [device] if device else []
            title = declared_text(results.model, steps, devices, results.amp)
            if results.found:
                title, rows = f"{title} is not prepared", [] if self._verbose else rows
            else:
                plan = results.plan.summary()
                changes, rows = _plan_rows(plan, verbose=self._verbose)
                title = f"{title}: {changes}, and nothing was changed"
                details = [(NEXT.lower(), "leave out task=plan to prepare it")]
        return Document(
            name="run",
            line=title,
            rows=tuple(rows),
            details=tuple(details),
            notes=tuple(notes),
            parts=lambda: () if audit or results.found else (changes_table(results.plan.tensors),),
        )

    def _show_answers(self, document: Document, documents: Sequence[Document]) -> None:
        if not self._shown:
            for each in documents:
                if self._verbose and each.is_whole:  # ran before the model was prepared
                    show_document(each)
            line(printable(document.line))
        # A stage that ends later may stand before one that was shown.
        _show_rows([row for row in document.rows if row not in self._shown], width=self._width)
        self._shown = list(document.rows) or [("", "")]
        sys.stdout.flush()

    @property
    def _width(self) -> int:
        return _LABELS if self._verbose else _LABEL

    def _show_rest(self, results: Results) -> None:
        """Print the answers that are missing, what to do, notes and warnings, and the folder.

        Without `verbose` that is the first warning or note, with it all of them, and the documents.
        """
        documents, is_prepared = self._documents(results), results.audit is not None
        document = self._document(results, documents)
        self._show_answers(document, documents if is_prepared else ())
        if not self._verbose:
            _show_rows(document.details, width=_LABEL)
            _show_first([f"warning: {text}" for text in results.warnings], document.notes)
            _show_last("details", self._path("report.html"), width=_LABEL)
            return
        rows = [*document.details, *(("note", text) for text in document.notes)]
        _show_rows(rows, width=_LABELS)
        _show_last("details", self._folder, width=_LABELS)
        for table in document.shown("terminal"):
            if texts := list(part_lines(table)):
                for text in ("", *texts, "plan.json has them all"):
                    line(text)
        _show_warnings(results.warnings)
        before = {cls.name for cls in ordered_stages() if cls.choose is not Stage.choose}
        for each in documents:
            if not is_prepared or (each.is_whole and each.name not in before):
                show_document(each)

    def _advice(self, results: Results, documents: Iterable[Document]) -> list[str]:
        """Return what to do as one sentence; for a recipe to use, the call and the words that apply it."""
        if results.stopped:
            return []
        plan, found = results.plan, advice(results, documents)
        text = f"{found.answer[0].lower()}{found.answer[1:]}"
        if found.section == "reproduce":
            path = self._path("recipe.yaml")
            method, formats = results.model.partition(".")[2], _is_formatted(results.pipeline)
            training = {
                "training_steps": plan.training_steps,
                "training_errors": plan.training_errors,
            }
            call = one_line(path, training, method=method, formats=formats)
            if results.waiting and results.figures().get("time_ratio"):
                call += f" in a program started with {results.waiting}"
            added = [step(name, **options) for name, options in (plan.training_steps or {}).items()]
            command = f"by command {' '.join([f'recipe={path}', *added])}"
            note = (
                "; training needs what is added to the recipe, which was not timed" if added else ""
            )
            if results.amp != "none":
                note += f"; call it under torch.autocast to {results.amp}"
            return [f"{call}, or {command}{note}"]
        said = [text for each in documents for _, text in each.rows]
        said += [each.remark for document in documents for each in document.answers]
        if not found.remark or any(
            found.answer[1:] in each or found.remark in each for each in said
        ):
            return [text]
        joint = ", " if found.remark.partition(" ")[0].strip(",") in _JOINED else "; "
        return [f"{text}{joint}{found.remark}"]


def _is_formatted(pipeline: Pipeline) -> bool:
    """Return whether the user has to format a batch, as it is not the model that does."""
    given = pipeline.input_format()
    formats = given.dtype or given.device not in (None, "cpu")
    formats = formats or any(step.phase == "inputs" for step in pipeline.steps.values())
    return bool(formats) and not given.attach


def show_report(title: str, documents: Sequence[Document], default: Iterable[Advice]) -> None:
    """Print a report on a model as a run is: a title, its answers, what to do, and the first note."""
    rows = _answer_rows(documents, ended=True)
    for found in advice_in(documents, default):
        answer = f"{found.answer[0].lower()}{found.answer[1:]}"
        rows.append((NEXT.lower(), "; ".join(filter(None, (answer, found.remark)))))
    line(printable(title))
    _show_rows(rows, width=_LABEL)
    _show_first([], [note for each in documents for note in each.notes])


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
    rest = (
        f"and {plural(more, 'more warning' if not notes else 'more note')}, with --verbose"
        if more
        else ""
    )
    for text in warnings[:1]:
        line(printable(text), errors=True)
        if rest:
            line(f"  {rest}", errors=True)
    if notes and not warnings:
        _show_rows([("note", text) for text in filter(None, (notes[0], rest))], width=_LABEL)


def _show_warnings(warnings: Iterable[str]) -> None:
    """Print the warnings, and each advice once, after the warnings that share it."""
    for remedy, texts in by_remedy(warnings).items():
        for text in texts:
            line(printable(f"warning: {text}"), errors=True)
        if remedy:
            line(printable(f"  {remedy}"), errors=True)


def shown_folder(folder: Path) -> str:
    """Return a path that can be copied; relative if it is below the current folder."""
    relative = os.path.relpath(folder)
    # A run with hydra.job.chdir=true is in its folder, and the user is not.
    outside = relative == os.curdir or relative.startswith(os.pardir)
    return printable(folder.absolute() if outside else relative)


def _plan_rows(plan: Mapping[str, Any], *, verbose: bool) -> tuple[str, list[Row]]:
    """Return what a plan would change in a few words, and rows on it."""
    memory = ("memory", bytes_text(plan, "now"))
    if not verbose:
        return changes_text(plan), [memory]
    rows = [("to change", changes_text(plan).removesuffix(" would change"))]
    rows += [("wanted by", f"{name}: {count}") for name, count in plan["by_step"].items()]
    return "would be prepared", [*rows, memory, ("written", size(plan["bytes_written"]))]


def _detail_rows(results: Results, audit: Audit, documents: Sequence[Document]) -> Iterator[Row]:
    """Yield what was prepared, and what came of it."""
    summary = audit.summary
    dtypes = ", ".join(f"{count} {name}" for name, count in summary["dtypes"].items())
    yield "tensors", f"{summary['tensors']:,} parameters and buffers: {dtypes}"
    yield "memory", bytes_text(summary)
    if results.example is None:
        yield "example", "not run; give one with input.shape=[...]"
    else:
        yield "example", f"{results.example.inputs} -> {results.example.outputs}"
        ineffective = summary["convolutions"].get("ineffective", 0)
        for count in results.example.convolutions:
            yield "outputs", _outputs(count, ineffective)
    for document in documents:
        yield from document.details


def _outputs(count: LayoutCount, ineffective: int) -> str:
    text = outputs_sentence(
        format=count.format, gave=count.gave, of=count.of, ambiguous=count.ambiguous
    )
    if ineffective and count.gave == count.of:
        # Both lines are true: torch takes the layout of the input, and converts the weight in each call.
        text += f"; their inputs decide that, also for the {ineffective} ineffective"
    return text


def _show_rows(rows: Sequence[Row], *, width: int) -> None:
    """Print rows of label and text; in a pipe a line ends at a space only, as calls are copied."""
    width = max([width, *(len(label) for label, _ in rows)])
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


def _show_last(label: str, text: str, *, width: int) -> None:
    # Users copy the folder, so do not wrap it.
    line(f"  {label.ljust(width)}  {printable(text)}")
