"""The document of a verification: whether it is right, by which checks, and what would find more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prepare.core import document as parts
from prepare.core.document import Answer, Document, Part, ReportContext, Table, Text
from prepare.core.utils import text as texts
from prepare.core.utils.text import capitalized, doubt, plural, printable

if TYPE_CHECKING:
    from prepare.stages.verify.records import Check, Verification

# Above this sensitivity a comparison of gradients says nothing.
_HIDDEN = 0.1
_COLUMNS = parts.columns(
    "Status text, Compared text, Worst code, Error number, Tolerance number, Of the tolerance number"
)
_ABOUT = "An error is a part of the tensor's size; the tolerance follows from the unprepared model."


def verify_document(shown: ReportContext) -> Document | None:
    """Return what is shown of the verification of a run; None if it was to have none."""
    found = shown.found.get("verify")
    if found is not None:
        return Document(
            name="verify",
            title=parts.RIGHT,
            place=40,
            line=verify_sentence(found),
            head="verify",
            answers=(_answer(found),),
            advice=tuple(_advice(found)),
            parts=lambda: _parts(found),
        )
    if not shown.had("verify"):
        return None
    missing = Answer(parts.RIGHT, "plain", parts.NOT_MEASURED, shown.without("verify"))
    same = Answer(parts.RIGHT, "plain", "Unchanged", parts.UNCHANGED)
    return Document(name="verify", place=40, answers=(same if shown.unchanged else missing,))


def verify_sentence(verification: Verification) -> str:
    """Return one sentence: `pass: 4 checks against float32, ...`, `fail: outputs (eval mode): ...`."""
    if verification.status != "pass":
        return f"{doubt(verification.status)}: {printable(verification.reason)}"
    checks = [check for check in verification.checks if check.status != "skipped"]
    alone = max((c.compared for c in checks if c.what.startswith("module ")), default=0)
    text = f"pass: {plural(len(checks), 'check')} against {verification.reference or 'no run'}"
    text += f", {plural(alone, 'module')} alone" if alone else ""
    text += f", {_outputs(verification)}"
    for kind in ("outputs", "gradients"):
        if found := verification.sensitivity(kind):
            where = found[1] or "the model"
            text += f"; finds errors of {kind} from {_percent(found[0])} in {where}"
    if verification.reason:
        text += f"; wrong, but not a failure in mode {verification.mode}: {verification.reason}"
    return printable(text)


def _outputs(verification: Verification) -> str:
    """Return `outputs at 4 % of the tolerance`."""
    measured = [c.part for c in verification.checks if c.what == "outputs" and c.part is not None]
    return f"outputs at {texts.tolerance_text(max(measured))}" if measured else "no outputs"


def _hidden(verification: Verification) -> str:
    """Return `gradients cannot be judged in bfloat16: ...`; empty if smaller errors are found."""
    least, _ = verification.sensitivity("gradients") or (0.0, "")
    if least <= _HIDDEN:
        return ""
    if not verification.dtype.endswith("float16"):
        return f"gradients unclear (noise hides errors below {_percent(least)})"
    once = "precision=float32" if verification.amp == "none" else "amp=none"
    return f"gradients cannot be judged in {verification.dtype}: run once with {once}"


def _percent(part: float) -> str:
    """Return `0.0043 %`, `18 %`, `230 %`: two digits count."""
    rounded = float(f"{100 * part:.2g}")
    return f"{rounded:,.0f} %" if rounded >= 100 else f"{rounded:.2g} %"


def _answer(verification: Verification) -> Answer:
    remark, mode = verification.reason, verification.mode
    if verification.status == "fail":
        remark += f"; first in {verification.culprit}" if verification.culprit else ""
        return Answer(parts.RIGHT, "bad", "No", remark, line=f"NO: {remark}")
    if verification.status != "pass":
        return Answer(parts.RIGHT, "warn", parts.UNCLEAR, remark)
    if any(check.status == "wrong" for check in verification.checks):
        return Answer(parts.RIGHT, "warn", f"Yes, in mode {mode} only", remark)
    hidden = _hidden(verification)
    if hidden and mode == "train":
        return Answer(parts.RIGHT, "warn", "Outputs right", hidden, line=f"outputs right; {hidden}")
    judged = [c.status == "pass" for c in verification.checks if "gradients" in c.what]
    said = ", gradients right" if judged and all(judged) and not hidden else ""
    return Answer(parts.RIGHT, "good", "Yes", _outputs(verification) + said)


def _advice(verification: Verification) -> Iterator[parts.Advice]:
    if verification.status == "fail":
        remedy = verification.advice.removeprefix("It may help to").strip(" .")
        yield parts.Advice(10, "bad", f"Do not use it; {remedy}" if remedy else "Do not use it")
    elif verification.status == "cannot tell":
        is_short = "raise verify.seconds" in verification.reason
        answer = "Raise verify.seconds" if is_short else "Verify it on another batch"
        yield parts.Advice(30, "warn", answer)
    elif verification.mode == "train" and (once := _hidden(verification).partition(": ")[2]):
        yield parts.Advice(72, "warn", f"Judge the gradients: {once}")


def _parts(verification: Verification) -> Iterator[Part]:
    yield Text(text=f"{capitalized(verify_sentence(verification))}.", where="page")
    if verification.culprit:
        yield Text(text=f"the first difference is in {printable(verification.culprit)}")
    if verification.advice:
        yield Text(text=verification.advice)
    checks = sorted(verification.checks, key=lambda check: check.status in ("pass", "skipped"))
    yield Table(label="Checks", columns=_COLUMNS, rows=list(map(_row, checks)), noun="check")
    yield Text(text=_ABOUT, kind="note")


def _row(check: Check) -> tuple[str, ...]:
    share = "" if check.part is None else texts.share_text(check.part)
    numbers = texts.small(check.error), texts.small(check.allowed), share
    where = check.note if check.status == "skipped" else check.worst
    return doubt(check.status), check.what, where, *numbers
