"""The document of a verification: whether it is right, by which checks, and what would find more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prepare.core import document as parts
from prepare.core.document import Answer, Document, Part, ReportContext, Table, Text
from prepare.core.utils import text as texts
from prepare.core.utils.text import capitalized, doubt, plural, printable, words

if TYPE_CHECKING:
    from prepare.stages.verify.records import Check, Verification

# A sensitivity of more than the first names the module that has it; above the second it says nothing.
_BLIND, _HIDDEN = 0.001, 0.1
_SERIOUS = ("fail", "wrong", "cannot tell")
_COLUMNS = parts.columns(
    "Status text, Compared text, Case text, Worst code, Error number, Tolerance number, "
    "Of the tolerance number"
)
_ABOUT_ERRORS = (
    "An error is the largest difference from the exact result, relative to the size of the tensor. Its "
    "tolerance follows from the error of the unprepared model with the same types."
)


def verify_document(shown: ReportContext) -> Document | None:
    """Return what is shown of the verification of a run; None if it was to have none."""
    verification = shown.found.get("verify")
    if verification is None:
        return _without(shown)
    wrong = verification.status == "fail"
    return Document(
        name="verify",
        title=parts.RIGHT,
        place=40,
        line=verify_sentence(verification),
        head="verify",
        answers=(_answer(verification),),
        advice=tuple(_advice(verification)),
        notes=(verification.advice,) if wrong and verification.advice else (),
        parts=lambda: _parts(verification),
    )


def _without(shown: ReportContext) -> Document | None:
    """Return the document of a run that was to be verified, and was not."""
    if not shown.had("verify"):
        return None
    remark, sentence = shown.without("verify"), "Results not measured"
    missing = Answer(parts.RIGHT, "plain", parts.NOT_MEASURED, remark, sentence=sentence)
    same = Answer(parts.RIGHT, "plain", "Unchanged", parts.UNCHANGED)
    return Document(name="verify", place=40, answers=(same if shown.unchanged else missing,))


def verify_sentence(verification: Verification) -> str:
    """Return the verdict, and of a pass the least error that it finds."""
    finds = _sensitivity_text(verification) if verification.status == "pass" else ""
    found = f"; finds systematic errors from {finds}" if finds else ""
    return verdict_sentence(verification) + found


def verdict_sentence(verification: Verification) -> str:
    """Return one sentence: `pass: 4 checks against float32, ...`, `fail: outputs (eval mode): ...`."""
    if verification.status != "pass":
        return f"{doubt(verification.status)}: {printable(verification.reason)}"
    checks = [check for check in verification.checks if check.status != "skipped"]
    alone = max((c.compared for c in checks if c.what.startswith("module ")), default=0)
    hidden, text = _hidden(verification), f"pass: {plural(len(checks), 'check')}"
    text += f" against {verification.reference}" if verification.reference else ""
    text += f", {plural(alone, 'module')} alone" if alone else ""
    text += f", {_outputs(verification)}" + (f"; {hidden}" if hidden else "")
    if verification.reason:
        text += f"; wrong, but not a failure in mode {verification.mode}: {verification.reason}"
    return printable(text)


def _outputs(verification: Verification) -> str:
    """Return `outputs at 4 % of the tolerance`, or why there is no such number."""
    checks = [check for check in verification.checks if check.what == "outputs"]
    measured = [c.part for c in checks if c.part is not None and c.status != "skipped"]
    if measured:
        return f"outputs at {texts.tolerance_text(max(measured))}"
    return f"outputs: {checks[0].note}" if checks else "no outputs"


def _sensitivity_text(verification: Verification) -> str:
    """Return `0.0043 % in outputs, 3.5 % in gradients`, and where more hides; empty if not measured."""
    measured = {kind: verification.sensitivity(kind) for kind in ("outputs", "gradients")}
    kinds = {kind: found for kind, found in measured.items() if found}
    text = ", ".join(f"{_percent(least)} in {kind}" for kind, (least, _) in kinds.items())
    least, place = max(kinds.values(), default=(0.0, ""))
    if least > _BLIND and place:
        text += f" (errors below {_percent(least)} in {place} cannot be told from noise"
        is_eval = verification.mode == "eval"
        text += f"; {texts.argument('mode', 'train')} compares modules alone)" if is_eval else ")"
    return printable(text)


def _hidden(verification: Verification) -> str:
    """Return `gradients cannot be judged in bfloat16: ...`; empty if smaller errors are found."""
    least, _ = verification.sensitivity("gradients") or (0.0, "")
    if least <= _HIDDEN:
        return ""
    own = (check.dtype for check in verification.checks if check.dtype.endswith("float16"))
    if (coarse := next(own, verification.amp)) == "none":
        return f"gradients unclear (noise hides errors below {_percent(least)})"
    once = words(cli="with precision=float32", python="in float32")
    if verification.amp != "none":
        once = words(cli="with amp=none", python="without autocast")
    return f"gradients cannot be judged in {coarse}: run once {once}"


def _percent(part: float) -> str:
    """Return `0.0043 %`, `18 %`, `230 %`: two digits count."""
    rounded = float(f"{100 * part:.2g}")
    return f"{rounded:,.0f} %" if rounded >= 100 else f"{rounded:.2g} %"


def error_text(verification: Verification) -> str:
    """Return `outputs at 4 % of the tolerance, gradients right`."""
    hidden, text = _hidden(verification), _outputs(verification)
    has_gradients = any("gradients" in c.what for c in verification.checks if c.status == "pass")
    shown = has_gradients and (verification.mode == "train" or not hidden)
    return f"{text}, {hidden or 'gradients right'}" if shown else text


def _answer(verification: Verification) -> Answer:
    kind, answer, remark = "warn", parts.UNCLEAR, verification.reason
    sentence, line = "Unclear if right", ""
    if verification.status == "fail":
        kind, answer = "bad", "No"
        remark += f"; first in {verification.culprit}" if verification.culprit else ""
        sentence, line = f"Wrong: {remark}", f"NO: {remark}"
    elif verification.status == "pass":
        kind, answer, remark, sentence = "good", "Yes", error_text(verification), "Right"
        hidden = _hidden(verification) if verification.mode == "train" else ""
        if any(check.status == "wrong" for check in verification.checks):
            kind, remark = "warn", verification.reason
            answer, sentence = f"Yes, in mode {verification.mode} only", ""
        elif hidden:
            kind, remark, answer = "warn", hidden, "Outputs right"
            sentence, line = answer, f"outputs right; {hidden}"
    return Answer(parts.RIGHT, kind, answer, remark, sentence=sentence, line=line)


def _advice(verification: Verification) -> Iterator[parts.Advice]:
    if verification.status == "fail":
        yield parts.Advice(10, "bad", "Do not use it")
    elif verification.status == "cannot tell":
        is_short = "raise verify.seconds" in verification.reason
        answer = "Raise verify.seconds" if is_short else "Verify it on another batch"
        yield parts.Advice(30, "warn", answer)
    elif verification.mode == "train" and (once := _hidden(verification).partition(": ")[2]):
        yield parts.Advice(72, "warn", f"Judge the gradients: {once}")


def _parts(verification: Verification) -> Iterator[Part]:
    yield Text(text=f"{capitalized(verdict_sentence(verification))}.", where="page")
    serious = [
        check for status in _SERIOUS for check in verification.checks if check.status == status
    ]
    if serious:
        yield _table("Checks that did not pass", serious)
    if verification.culprit:
        yield Text(text=f"the first difference is in {printable(verification.culprit)}")
    if verification.advice:
        yield Text(text=verification.advice)
    fine = [check for check in verification.checks if check not in serious]
    skipped = sum(check.status == "skipped" for check in fine)
    title = f"{plural(len(fine) - skipped, 'check')} passed"
    title += f", {skipped} skipped" if skipped else ""
    finds = _sensitivity_text(verification)
    lines = (_ABOUT_ERRORS, *([f"It finds systematic errors from {finds}."] if finds else []))
    yield parts.Folded(title=title, parts=(_table("Checks", fine), Text(text=lines, kind="note")))


def _table(label: str, checks: list[Check]) -> Table:
    return Table(label=label, columns=_COLUMNS, rows=list(map(_row, checks)), noun="check")


def _row(check: Check) -> tuple[str, ...]:
    mode, batch = check.mode and f"{check.mode} mode", f"batch {check.batch}" if check.batch else ""
    case = ", ".join(filter(None, (mode, batch, check.inputs)))
    share = "" if check.part is None else texts.share_text(check.part)
    numbers = texts.small(check.error), texts.small(check.allowed), share
    return doubt(check.status), check.what, case, check.worst, *numbers
