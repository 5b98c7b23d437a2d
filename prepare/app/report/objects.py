"""Show single records in Python: one line, and the text of the terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from prepare.app.report.plan_changes import changes_table
from prepare.core.document import USE_RECIPE, Document, Items, Part, ReportContext
from prepare.core.utils.text import line, output_to, plural, printable
from prepare.stages.stage import ordered_stages, stages_of

_LONGEST = 160
# What to do with a model that is reported on, if nothing speaks against it.
DEFAULT = (replace(USE_RECIPE, answer="Use the model as it is", remark=""),)


def one_line(record: Any) -> str:
    """Return the class of a record and its sentence, 160 letters at most."""
    if hasattr(record, "found"):  # a report
        parts = [part for part in (record.audit, *record.found.values()) if part is not None]
        found = ", ".join(map(one_line, parts))
    else:
        found = ", ".join(printable(document.line) for document in documents_of(record))
    text = f"{type(record).__name__}({found})"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]}...)"


def text(record: Any) -> str:
    """Return the text of the terminal; one line if the package rich is not installed."""
    stream = io.StringIO()
    with output_to(stream):
        try:
            from prepare.app.report.terminal.document import show_document

            if hasattr(record, "found"):  # a report
                from prepare.app.report.sentences import title_text
                from prepare.app.report.terminal.run import show_report

                title = title_text(record.model, record.steps or {}, record.audit, "none")
                show_report(title, documents_of(record), DEFAULT)
                return stream.getvalue().rstrip("\n")
            for number, document in enumerate(documents_of(record)):
                if number:
                    line("")
                show_document(document)
        except ModuleNotFoundError:
            return f"{one_line(record)}\nthe whole table needs the extra: pip install 'torch-prepare[cli]'"
    return stream.getvalue().rstrip("\n")


def documents_of(record: Any) -> list[Document]:
    """Return the documents of a record: one, or those of its parts."""
    if hasattr(record, "document"):
        return [record.document()]
    if hasattr(record, "found"):  # a report
        own = [_audit_document(record.audit)] if record.audit is not None else []
        ran = tuple(stages_of("prepare"))
        shown = ReportContext(found=record.found, ran=ran, audit=record.audit)
        found = (cls.document(shown) for cls in ordered_stages())
        return [*own, *(document for document in found if document is not None)]
    for cls in ordered_stages():
        if isinstance(record, tuple(cls.records().values())):
            document = cls.document(ReportContext(found={cls.name: record}))
            return [document] if document else []
    # Importing the class of a plan would load torch.
    return [_audit_document(record) if hasattr(record, "rows") else _plan_document(record)]


def _audit_document(audit: Any) -> Document:
    from prepare.app.report.run_documents import audit_parts
    from prepare.app.report.sentences import audited_text, is_judged, missed_notes

    found = f"convolutions: {audited_text(audit)}" if is_judged(audit) else audited_text(audit)
    return Document(
        name="result",
        title="Tensors",
        place=80,
        line=f"{plural(audit.summary['tensors'], 'tensor')}; {found}",
        head="audit",
        parts=lambda: (
            *audit_parts(audit),
            Items(
                texts=tuple(f"note: {note}" for note in missed_notes(audit.rows)), where="terminal"
            ),
        ),
    )


def _plan_document(plan: Any) -> Document:
    summary = plan.summary()
    parts = [f"{summary['to_change']} of {plural(summary['tensors'], 'tensor')} to change"]
    parts += [f"{action.step}: {plural(len(action.modules), 'module')}" for action in plan.actions]
    counted = (("error", plan.errors), ("warning", plan.warnings))
    parts += [plural(len(found), word) for word, found in counted if found]
    return Document(
        name="result",
        title="Tensors",
        place=80,
        line=", ".join(parts),
        head=f"plan: {', '.join(plan.steps) or 'no step'}",
        parts=lambda: _plan_parts(plan.to_dict()),
    )


def _plan_parts(plan: dict[str, Any]) -> Iterable[Part]:
    from prepare.app.report.run_documents import issues, plan_parts

    return (*plan_parts(plan["summary"]), *issues(plan), changes_table(plan["tensors"]))
