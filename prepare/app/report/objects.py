"""Show single records in Python: one line, and the text of the terminal."""

from __future__ import annotations

from typing import Any

from prepare.core.document import Document, ReportContext, Text
from prepare.core.utils.text import plural, printable
from prepare.stages.stage import ordered_stages

_LONGEST = 160


def one_line(record: Any) -> str:
    """Return the class of a record and its sentence, 160 letters at most."""
    if hasattr(record, "found"):  # a report
        parts = [part for part in (record.audit, *record.found.values()) if part is not None]
        found = ", ".join(map(one_line, parts))
    else:
        found = printable(document_of(record).line)
    text = f"{type(record).__name__}({found})"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]}...)"


def text(record: Any) -> str:
    """Return the text of the terminal; one line if the package rich is not installed."""
    try:
        from prepare.app.report import terminal
    except ModuleNotFoundError:
        return (
            f"{one_line(record)}\nthe whole table needs the extra: pip install 'torch-prepare[cli]'"
        )
    if hasattr(record, "found"):
        return "\n".join(terminal.report_lines(record.as_run()))
    return "\n".join(terminal.document_lines(document_of(record)))


def document_of(record: Any) -> Document:
    """Return the document of a record."""
    for cls in ordered_stages():
        if isinstance(record, tuple(cls.records().values())):
            document = cls.document(ReportContext(found={cls.name: record}))
            return document or Document(name=cls.name)
    # Importing the class of a plan would load torch.
    return _audit_document(record) if hasattr(record, "rows") else _plan_document(record)


def _audit_document(audit: Any) -> Document:
    from prepare.app.report import sections, sentences

    text, judged = sentences.audited_text(audit), sentences.is_judged(audit)
    missed = tuple(f"note: {note}" for note in sentences.missed_notes(audit.rows))
    return Document(
        name="result",
        line=f"{plural(audit.summary['tensors'], 'tensor')}; {'convolutions: ' * judged}{text}",
        head="audit",
        parts=lambda: (*sections.audit_parts(audit), Text(text=missed, where="terminal")),
    )


def _plan_document(plan: Any) -> Document:
    from prepare.app.report import sections

    summary, data = plan.summary(), plan.to_dict()
    parts = [f"{summary['to_change']} of {plural(summary['tensors'], 'tensor')} to change"]
    parts += [f"{action.step}: {plural(len(action.modules), 'module')}" for action in plan.actions]
    counted = (("error", plan.errors), ("warning", plan.warnings))
    parts += [plural(len(found), word) for word, found in counted if found]
    return Document(
        name="result",
        line=", ".join(parts),
        head=f"plan: {', '.join(plan.steps) or 'no step'}",
        parts=lambda: (*sections.issues(data), *sections.plan_parts(data)),
    )
