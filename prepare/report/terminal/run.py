"""Terminal output of a single job: a short table, or one line for each error."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare.core.utils.text import line, output, plural, printable, size
from prepare.core.utils.wording import step
from prepare.registry import ordered_stages
from prepare.report.documents import advice, shown_of, stage_documents
from prepare.report.objects import changes_table
from prepare.report.sentences import (
    autocast_text,
    by_remedy,
    convolutions_text,
    missed_notes,
    outputs_sentence,
    quantized_text,
    steps_text,
)
from prepare.report.terminal.console import console, has_width
from prepare.report.terminal.document import part_lines, show_document
from prepare.report.training_code import recipe_call
from prepare.stage import Stage

if TYPE_CHECKING:
    from prepare.audit import Audit
    from prepare.core.document import Document
    from prepare.core.forward.run_example import LayoutCount
    from prepare.job.outcome import Outcome
    from prepare.job.results import Results

# The width of the longest label, `convolutions`.
_LABEL = 12


class RunOutput:
    """The output of a single run: each line as soon as it is known."""

    def __init__(self, folder: Path) -> None:
        self._folder = shown_folder(folder)
        self._shown: list[tuple[str, str]] = []

    def show(self, results: Results) -> None:
        """Print what these results add to those that were shown."""
        if results.audit is None:
            return
        documents = stage_documents(shown_of(results, self._folder))
        rows = _answer_rows(results, results.audit, documents)
        if not self._shown:
            for document in documents:
                if document.is_whole:  # of a stage that ran before the model was prepared
                    show_document(document)
            line(f"{printable(results.model)} is prepared: {_declared(results)}")
        # A stage that ends later may stand before one that was shown.
        _show_rows([row for row in rows if row not in self._shown])
        self._shown = rows
        sys.stdout.flush()

    def end(self, outcome: Outcome) -> None:
        """Print the rest, or the errors of the run."""
        results = outcome.results
        if results is not None:
            self._show_rest(results)
        if results is None or outcome.result.status in ("failed", "interrupted"):
            for problem in (outcome.result.error or "").splitlines():
                line(printable(problem), errors=True)
            if outcome.result.traceback:
                file = os.path.join(self._folder, "traceback.txt")  # noqa: PTH118  for reading
                line(f"the traceback is in {file}", errors=True)

    def _show_rest(self, results: Results) -> None:
        documents = stage_documents(shown_of(results, self._folder))
        if results.audit is not None:
            self.show(results)
            _show_rows(_detail_rows(results, results.audit, documents, self._folder))
            _show_last("files", self._folder)
        elif results.found:
            _show_unprepared(results, documents, self._folder)
        else:
            _show_plan(results, self._folder)
        _show_warnings(results.warnings)
        before = {cls.name for cls in ordered_stages() if cls.choose is not Stage.choose}
        for document in documents:
            if document.is_whole and document.name not in before and results.audit is not None:
                show_document(document)


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


def _show_plan(results: Results, folder: str) -> None:
    """Print the plan of a pipeline and the first tensors that it would change."""
    plan, steps = results.plan.summary(), _declared(results)
    rows = [("to change", f"{plan['to_change']} of {plural(plan['tensors'], 'tensor')}")]
    rows += [("wanted by", f"{name}: {count}") for name, count in plan["by_step"].items()]
    rows.append(("memory", f"{size(plan['bytes_before'])} now, {size(plan['bytes_after'])} after"))
    rows.append(("written", size(plan["bytes_written"])))
    rows += [("note", problem) for problem in results.notes]
    line(f"{printable(results.model)} would be prepared: {steps}; nothing was changed")
    width = max(len(label) for label, _ in rows)
    _show_rows(rows, width=width)
    _show_last("files", folder, width=width)
    table = changes_table(results.plan.tensors)
    if table.rows:
        line("")
        for text in part_lines(table):
            line(text)
        if len(table.rows) > table.most:
            line("plan.json has them all")


def _show_unprepared(results: Results, documents: Iterable[Document], folder: str) -> None:
    """Print what is known of a model that is not prepared."""
    under = autocast_text(results.amp)
    line(f"{printable(results.model)} is not prepared{under and f', {under}'}")
    for problem in results.notes:
        line(printable(problem))
    for document in documents:
        show_document(document)
    line(f"  details are in {printable(folder)}")


def _answer_rows(
    results: Results, audit: Audit, documents: Iterable[Document]
) -> list[tuple[str, str]]:
    """Return the answers, in the order in which they become known."""
    counted = convolutions_text(audit.summary["convolutions"], results.pipeline.to_config())
    return [("convolutions", counted), *(row for document in documents for row in document.rows)]


def _detail_rows(
    results: Results, audit: Audit, documents: Sequence[Document], folder: str
) -> list[tuple[str, str]]:
    """Return what follows the answers: what to do, what was prepared, and the notes."""
    summary = audit.summary
    before, after = summary["bytes_before"], summary["bytes_after"]
    advised = [] if results.stopped else _advice_texts(results, documents, folder)
    rows = [("what to do", text) for text in advised]
    rows.append(("tensors", _tensors(summary)))
    if text := quantized_text(audit.rows):
        rows.append(("quantized", text))
    rows.append(("memory", f"{size(before)} before, {size(after)} after"))
    if results.example is None:
        rows.append(("example", "not run; give one with input.shape=[...]"))
    else:
        rows.append(("example", f"{results.example.inputs} -> {results.example.outputs}"))
        ineffective = summary["convolutions"].get("ineffective", 0)
        rows += [
            ("outputs", _outputs(count, ineffective)) for count in results.example.convolutions
        ]
    rows += [row for document in documents for row in document.details]
    said = [note for document in documents for note in document.notes]
    notes = [*said, *results.notes, *missed_notes(audit.rows)]
    return [*rows, *(("note", text) for text in notes)]


def _declared(results: Results) -> str:
    """Return the steps, and the autocast in which the model runs."""
    steps = steps_text(results.pipeline.to_config())
    return ", ".join(filter(None, [steps, autocast_text(results.amp)]))


def _advice_texts(results: Results, documents: Iterable[Document], folder: str) -> list[str]:
    """Return what to do as one sentence; for a recipe to use, the call and the words that apply it."""
    plan, found = results.plan, advice(results, documents)
    text = f"{found.answer[0].lower()}{found.answer[1:]}"
    if found.section == "reproduce":
        path = os.path.join(folder, "recipe.yaml")  # noqa: PTH118  a path for reading, not for use
        call = recipe_call(path, repairs=plan.training_steps, errors=bool(plan.training_errors))
        added = [step(name, **options) for name, options in (plan.training_steps or {}).items()]
        return [f"{text}: {call}", f"or by command: {' '.join([f'recipe={path}', *added])}"]
    said = [text for document in documents for _, text in document.rows]
    if not found.remark or any(found.answer[1:] in each for each in said):
        return [text]
    return [f"{text}{', ' if found.remark.startswith('or') else ': '}{found.remark}"]


def _tensors(audit: Mapping[str, Any]) -> str:
    dtypes = ", ".join(f"{count} {name}" for name, count in audit["dtypes"].items())
    return f"{audit['tensors']:,} parameters and buffers: {dtypes}"


def _outputs(count: LayoutCount, ineffective: int) -> str:
    text = outputs_sentence(
        format=count.format, gave=count.gave, of=count.of, ambiguous=count.ambiguous
    )
    if ineffective and count.gave == count.of:
        # Both lines are true: torch takes the layout of the input, and converts the weight in each call.
        text += f"; their inputs decide that, also for the {ineffective} ineffective"
    return text


def _show_rows(rows: list[tuple[str, str]], *, width: int = _LABEL) -> None:
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


def _show_last(label: str, text: str, *, width: int = _LABEL) -> None:
    # Users copy the folder, so do not wrap it.
    line(f"  {label.ljust(width)}  {printable(text)}")
