"""The document of the check of a layout contract: whether it is kept, and what changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prepare.core.document import Advice, Answer, Document, Items, Part, ReportContext, Text
from prepare.core.utils.text import capitalized, plural
from prepare.stages.contract.records import TOO_NOISY
from prepare.stages.contract.summary import change_lines, check_lines

if TYPE_CHECKING:
    from prepare.stages.contract.records import ContractCheck

_UPDATE = "contract.update=true"
_ADVICE = {
    "broken": ("bad", "Undo what broke it", f"or, if intended, {_UPDATE}"),
    "better": ("warn", "Tighten the contract", _UPDATE),
    "kept": ("good", "Nothing to do", "all is as recorded"),
}


def contract_document(shown: ReportContext) -> Document | None:
    """Return what is shown of the check of a run; None if it had none."""
    check = shown.found.get("contract")
    if check is None:
        return None
    kind, advised, remark = _ADVICE[check.status]
    if check.status == "kept" and check.of(TOO_NOISY):
        remark = "all that can be decided is as recorded"
    status, line, more = check.status, f"{check.status}: {check.file}", ""
    if check.changes:
        more = f"{plural(len(check.changes), 'change')}, see below"
    changes = [*change_lines(check, most=1)]
    first = "; ".join([line, *changes] if status == "kept" else [*changes, check.file])
    answer = Answer(
        "Contract", kind, capitalized(status), more, sentence=f"Contract {status}", line=first
    )
    return Document(
        name="contract",
        title="Contract",
        place=30,
        line=line,
        head="contract",
        answers=(answer,),
        advice=(Advice(0, kind, advised, remark),),
        rows=(("contract", line),),
        parts=lambda: _parts(check),
    )


def _parts(check: ContractCheck) -> Iterator[Part]:
    lines = check_lines(check, file=check.file, update=f"add {_UPDATE}")
    yield Items(texts=tuple(lines), where="terminal")
    yield Text(text=f"The layout contract {check.file} is {check.status}.", where="page")
    yield Items(texts=tuple(change_lines(check)), where="page")
    if check.status != "kept":
        text = f"to record the model of today, add {_UPDATE} to the command"
        yield Text(text=text, kind="remedy", where="page")
