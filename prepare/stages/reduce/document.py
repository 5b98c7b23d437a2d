"""The document of a reduction: the module that is wrong, and the script that shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prepare.core.document import Answer, Code, Document, ReportContext, Text

if TYPE_CHECKING:
    from prepare.core.document import Part
    from prepare.stages.reduce.records import Reduction

_SECTION, _SCRIPT = "reduced", "reduced.py"


def reduce_document(shown: ReportContext) -> Document | None:
    """Return what is shown of the reduction of a run; None if it had none."""
    reduction = shown.found.get("reduced")
    if reduction is None:
        return None
    return Document(
        name=_SECTION,
        title="Script",
        place=45,
        line=_sentence(reduction),
        head="reduced",
        answers=(
            Answer(
                question="Script",
                kind="plain",
                answer=_SCRIPT,
                remark=_sentence(reduction),
                section=_SECTION,
                line=f"{shown.file(_SCRIPT)}, with torch alone, shows {_sentence(reduction)}",
            ),
        ),
        parts=lambda: _parts(reduction, shown),
        is_whole=True,
    )


def _sentence(reduction: Reduction) -> str:
    """Return the module and its fault; a script that is read from its file says no more than itself."""
    if reduction.call is None:
        return f"a script that needs torch alone shows the fault: {_SCRIPT}"
    known = f"known: {reduction.known}" if reduction.known else "not in the table of known issues"
    return f"{reduction.module}: nn.{reduction.call.kind} {reduction.text} ({known})"


def _parts(reduction: Reduction, shown: ReportContext) -> Iterator[Part]:
    yield Text(text=f"the script, with torch alone: {shown.file(_SCRIPT)}", where="terminal")
    title = f"A script that needs torch alone shows the fault: {_SCRIPT} in this folder."
    yield Code(text=reduction.script, title=title)
