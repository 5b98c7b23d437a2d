"""Judge the answers of an artefact to its inputs, and draw a conclusion from all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prepare.core.utils.text import first_line
from prepare.export.input_layouts import CONTIGUOUS
from prepare.export.records import LayoutCheck
from prepare.export.reference import Judgement
from prepare.verify.execution.runner import CannotTellError

if TYPE_CHECKING:
    from prepare.export.input_layouts import InputCase
    from prepare.export.load_again import ArtefactAnswer
    from prepare.export.reference import Reference


def checked(judge: Reference, case: InputCase, answer: ArtefactAnswer) -> LayoutCheck:
    """Judge the answer to one input. A refusal passes, unless the artefact promised to take it."""
    known: dict[str, Any] = {"layout": case.layout, "batch": case.call.batch}
    if answer.crashed:
        return LayoutCheck(**known, answer="crashed", status="fail", note=answer.error)
    if answer.error:
        status = "fail" if case.promised else "pass"
        return LayoutCheck(**known, answer="refused", status=status, note=answer.error)
    try:
        found = judge.judge(answer.outputs, case.call)
    except CannotTellError as error:
        found = Judgement("cannot tell", note=str(error))
    except Exception as error:  # the reference itself cannot take this batch size
        note = f"the unprepared model raises {type(error).__name__}: {first_line(error)}"
        status = "cannot tell" if case.promised else "pass"
        return LayoutCheck(**known, answer="cannot tell", status=status, note=note)
    word = {"pass": "right", "fail": "wrong"}.get(found.status, "cannot tell")
    return LayoutCheck(
        **known,
        answer=word,
        status=found.status,
        error=found.error,
        allowed=found.allowed,
        note=found.note,
    )


def conclusion(checks: tuple[LayoutCheck, ...]) -> Judgement:
    """Return the worst verdict of all checks."""
    for status in ("fail", "cannot tell"):
        bad = next((check for check in checks if check.status == status), None)
        if bad:
            note = f"{_place(bad)}: {bad.answer}"
            note += f": {bad.note}" if bad.note else ""
            return Judgement(status, bad.error, bad.allowed, note)
    notes = []
    for word, text in (
        ("wrong", "wrong, but not allowed by the contract"),
        ("refused", "refused clearly"),
    ):
        if places := [_place(check) for check in checks if check.answer == word]:
            notes.append(f"{text}: {', '.join(places)}")
    note = "; ".join(notes)
    errors = [check for check in checks if check.layout == CONTIGUOUS and check.error is not None]
    if not errors:
        return Judgement("pass", note=note)
    return Judgement("pass", errors[0].error, errors[0].allowed, note)


def _place(check: LayoutCheck) -> str:
    batch = "" if check.batch is None else f" of batch {check.batch}"
    return f"{check.layout} input{batch}"
