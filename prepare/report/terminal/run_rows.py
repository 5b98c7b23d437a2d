"""The rows of a single job's summary: first the answers, then what was prepared, then notes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prepare.core.utils.text import plural, size
from prepare.report.documents import advice
from prepare.report.sentences import (
    autocast_text,
    convolutions_text,
    outputs_sentence,
    quantized_text,
)
from prepare.report.training_code import recipe_call

if TYPE_CHECKING:
    from prepare.audit import Audit, AuditRow
    from prepare.core.document import Document
    from prepare.core.forward.conv_layouts import LayoutCount
    from prepare.job.results import Results

Rows = list[tuple[str, str]]


def answer_rows(results: Results, audit: Audit, documents: Iterable[Document]) -> Rows:
    """Return the answers, in the order in which they become known."""
    counted = convolutions_text(audit.summary["convolutions"], results.pipeline.to_config())
    return [("convolutions", counted), *(row for document in documents for row in document.rows)]


def detail_rows(results: Results, audit: Audit, documents: Sequence[Document], folder: str) -> Rows:
    """Return what follows the answers: what to do, what was prepared, and the notes."""
    summary = audit.summary
    before, after = summary["bytes_before"], summary["bytes_after"]
    rows = [] if results.stopped else [("what to do", _advice_text(results, documents, folder))]
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


def declared(results: Results) -> str:
    """Return the steps, and the autocast in which the model runs."""
    steps = results.pipeline.to_config()
    named = ", ".join(f"{name} {_first(options)}".strip() for name, options in steps.items())
    return ", ".join(filter(None, [named or "no step", autocast_text(results.amp)]))


def missed_notes(rows: Iterable[AuditRow]) -> list[str]:
    """Return one line for each reason of unconverted tensors, `ineffective` first."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    missed = [row for row in rows if row.status in ("ineffective", "skipped")]
    for row in sorted(missed, key=lambda row: row.status):
        path = f"{row.module}.{row.tensor}" if row.module else row.tensor
        by_reason.setdefault((row.status, row.reason or ""), []).append(path)
    lines = [
        f"{status}: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}"
        for (status, reason), names in by_reason.items()
    ]
    hidden = len(lines) - 4
    return [
        *lines[:4],
        *([f"{plural(hidden, 'more reason')}; see audit.csv"] if hidden > 0 else []),
    ]


def _advice_text(results: Results, documents: Iterable[Document], folder: str) -> str:
    """Return what to do as one sentence; for a recipe to use, the call that applies it."""
    plan, found = results.plan, advice(results, documents)
    text = f"{found.answer[0].lower()}{found.answer[1:]}"
    if found.section == "reproduce":
        path = os.path.join(folder, "recipe.yaml")  # noqa: PTH118  a path for reading, not for use
        call = recipe_call(path, repairs=plan.training_steps, errors=bool(plan.training_errors))
        return f"{text}: {call}"
    said = [text for document in documents for _, text in document.rows]
    if not found.remark or any(found.answer[1:] in each for each in said):
        return text
    return f"{text}{', ' if found.remark.startswith('or') else ': '}{found.remark}"


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


def _first(options: Mapping[str, Any]) -> str:
    value = next(iter(options.values()), "")
    return value if isinstance(value, str) else ""
