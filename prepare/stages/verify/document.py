"""The document of a verification: whether it is right, by which checks, and what would find more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from prepare.core.document import (
    NOT_MEASURED,
    RIGHT,
    UNCHANGED,
    UNCLEAR,
    Advice,
    Answer,
    Document,
    Folded,
    Part,
    ReportContext,
    Table,
    Text,
)
from prepare.core.utils.numbers import doubt, share_text, small, tolerance_text
from prepare.core.utils.text import capitalized, plural, printable
from prepare.core.utils.wording import argument, words

if TYPE_CHECKING:
    from prepare.stages.verify.records import Check, Lost, Verification

# An error that is larger than this multiple of what is allowed is not given in figures.
_BEYOND = 1000
# A sensitivity of more than this names the module that has it.
_BLIND = 0.001
# A sensitivity of more than this says nothing about the gradients.
_HIDDEN = 0.1
_NOISES = {"bfloat16": "bf16", "float16": "fp16"}
_LIMITS = ("verify.seconds", "verify.memory")
_SERIOUS = ("fail", "wrong", "cannot tell")
# Most losses of casts say the same.
_LOSSES = 2000
_ABOUT_ERRORS = (
    "An error is the largest difference from the exact result, relative to the size of the tensor. Its "
    "tolerance follows from the error of the unprepared model with the same types; a gradient may differ "
    "more, because a tie in a maximum or a ReLU sends it another way."
)


def verify_document(shown: ReportContext) -> Document | None:
    """Return what is shown of the verification of a run; None if it was to have none."""
    verification = shown.found.get("verify")
    if verification is None:
        return _without(shown)
    finds, wrong = sensitivity_text(verification), verification.status == "fail"
    return Document(
        name="verify",
        title=RIGHT,
        place=40,
        line=verify_sentence(verification),
        head=f"verify ({verification.level})",
        answers=(_answer(verification),),
        advice=tuple(_advice(verification)),
        rows=((RIGHT.lower(), verdict_sentence(verification)),),
        notes=(verification.advice,) if wrong and verification.advice else (),
        details=(("sensitivity", f"finds systematic errors from {finds}"),) if finds else (),
        parts=lambda: (*_in_terminal(verification, shown), *_on_page(verification)),
        lead=(Text(text=verification.advice),) if wrong and verification.advice else (),
        is_whole=wrong,
    )


def _without(shown: ReportContext) -> Document | None:
    """Return the document of a run that was to be verified, and was not."""
    if not shown.had("verify"):
        return None
    answer, remark = NOT_MEASURED, shown.without("verify")
    rows: tuple[tuple[str, str], ...] = ()
    if shown.unchanged:
        answer, remark, rows = "Unchanged", UNCHANGED, ((RIGHT.lower(), UNCHANGED),)
    sentence = "" if shown.unchanged else "Results not measured"
    missing = Answer(RIGHT, "plain", answer, remark, sentence=sentence)
    return Document(name="verify", place=40, answers=(missing,), rows=rows)


def verify_sentence(verification: Verification) -> str:
    """Return the verdict, and of a pass the least error that it finds."""
    finds = sensitivity_text(verification) if verification.status == "pass" else ""
    text = verdict_sentence(verification)
    return f"{text}; finds systematic errors from {finds}" if finds else text


def verdict_sentence(verification: Verification) -> str:
    """Return one sentence: `pass: 4 checks against float64, ...`, `fail: outputs (eval mode): ...`."""
    if verification.status != "pass":
        return f"{doubt(verification.status)}: {printable(verification.reason)}"
    checks = [check for check in verification.checks if check.status != "skipped"]
    reference = f" against {verification.reference}" if verification.reference else ""
    if alone := max((c.compared for c in checks if c.what.startswith("module ")), default=0):
        reference += f", {plural(alone, 'module')} alone"
    parts = [c.part for c in checks if c.what == "outputs" and c.part is not None]
    if parts:
        reference += f", outputs at {tolerance_text(max(parts))}"
    skipped, hidden = skipped_outputs(verification), _hidden(verification)
    seen = "" if not hidden else f"{hidden}; " if skipped else f"outputs right; {hidden}; "
    text = f"pass: {seen}{plural(len(checks), 'check')}{reference}"
    if skipped:
        text += f"; {skipped}"
    if verification.reason:
        wrong = f"wrong, but not a failure in mode {verification.mode}: {verification.reason}"
        text += printable(f"; {wrong}")
    return text


def skipped_outputs(verification: Verification) -> str:
    """Return `outputs: they are all zero, ...` if those of the user's batch were skipped; else empty."""
    first = next((check for check in verification.checks if check.what == "outputs"), None)
    return f"outputs: {printable(first.note)}" if first and first.status == "skipped" else ""


def sensitivity_text(verification: Verification) -> str:
    """Return `0.0043 % in outputs, 3.5 % in gradients`, and where more hides; empty if not measured."""
    measured = [(kind, verification.sensitivity(kind)) for kind in ("outputs", "gradients")]
    kinds = {kind: found for kind, found in measured if found}
    text = ", ".join(f"{_percent(least)} in {kind}" for kind, (least, _) in kinds.items())
    least, place = max(kinds.values(), default=(0.0, ""))
    if least > _BLIND and place:
        text += f" (errors below {_percent(least)} in {place} cannot be told from noise"
        more = f"; {argument('mode', 'train')} compares modules alone"
        text += f"{more})" if _has_more(verification) else ")"
    return printable(text)


def _hidden(verification: Verification) -> str:
    """Return `gradients unclear (bf16 noise hides errors below 230 %)`; empty if smaller ones are found."""
    least, _ = verification.sensitivity("gradients") or (0.0, "")
    if least <= _HIDDEN:
        return ""
    noise = f"{_NOISES.get(verification.amp, '')} noise".lstrip()
    return f"gradients unclear ({noise} hides errors below {_percent(least)})"


def _percent(part: float) -> str:
    """Return `0.0043 %`, `18 %`, `230 %`: two digits count."""
    rounded = float(f"{100 * part:.2g}")
    return f"{rounded:,.0f} %" if rounded >= 100 else f"{rounded:.2g} %"


def error_text(verification: Verification) -> str:
    """Return `outputs at 4 % of the tolerance, gradients right (float64 reference)`."""
    checks = [check for check in verification.checks if check.status == "pass"]
    outputs = [check for check in checks if check.what == "outputs" and check.error is not None]
    if not outputs:
        return skipped_outputs(verification)
    worst = max(outputs, key=lambda check: check.part or 0.0)
    text = f"output error {worst.error:.2g}"
    if worst.part is not None:
        text = f"outputs at {tolerance_text(worst.part)}"
    hidden, training = _hidden(verification), verification.mode == "train"
    if any("gradients" in check.what for check in checks) and (training or not hidden):
        text += f", {hidden or 'gradients right'}"
    return text + (f" ({verification.reference} reference)" if verification.reference else "")


def _answer(verification: Verification) -> Answer:
    kind, answer, remark = "warn", UNCLEAR, verification.reason
    sentence, line = "Unclear if right", ""
    if verification.status == "fail":
        kind, answer = "bad", "No"
        remark += f"; first in {verification.culprit}" if verification.culprit else ""
        sentence, line = f"Wrong: {remark}", f"NO: {remark}"
    elif verification.status == "pass":
        is_wrong = any(check.status == "wrong" for check in verification.checks)
        kind, answer, remark, sentence = "good", "Yes", error_text(verification), "Right"
        if is_wrong:
            kind, remark = "warn", verification.reason
            answer, sentence = f"Yes, in mode {verification.mode} only", ""
        elif verification.mode == "train" and _hidden(verification):
            kind, answer, sentence = "warn", "Outputs only", "Outputs right"
    return Answer(RIGHT, kind, answer, remark, sentence=sentence, line=line)


def _advice(verification: Verification) -> Iterator[Advice]:
    if verification.status == "fail":
        remark = "the report has probable causes and remedies" if verification.advice else ""
        yield Advice(10, "bad", "Do not use it", remark)
    elif verification.status == "cannot tell":
        limit = next((key for key in _LIMITS if f"raise {key}" in verification.reason), "")
        answer = f"Raise {limit}" if limit else "Verify it with verify=full"
        yield Advice(30, "warn", answer)
    elif verification.mode == "train" and (remark := _hidden(verification)):
        once = words(cli="with precision=float32 amp=none", python="without half and autocast")
        answer = f"Verify it once in float32, {once}"
        yield Advice(72, "warn", answer, remark)


def _in_terminal(verification: Verification, shown: ReportContext) -> Iterator[Part]:
    serious = [check for check in verification.checks if check.status in _SERIOUS]
    serious.sort(key=lambda check: _SERIOUS.index(check.status))
    titles = ("status", "what", "case", "worst", "error", "tolerance")
    yield Table(
        label="Checks that did not pass",
        columns=tuple((title, "text") for title in titles),
        rows=list(map(_serious, serious)),
        noun="check",
        where="terminal",
    )
    texts = (
        f"the first difference is in {verification.culprit}" if verification.culprit else "",
        verification.advice,
        _lost(verification.lost) if verification.lost else "",
        f"details are in {shown.file('verify.json')}" if shown.folder else "",
    )
    for text in filter(None, texts):
        yield Text(text=text, where="terminal")


def _on_page(verification: Verification) -> Iterator[Part]:
    yield Text(text=f"{capitalized(verify_sentence(verification))}.", where="page")
    if verification.culprit:
        yield Text(text=f"The first difference is in {verification.culprit}.", where="page")
    if verification.advice:
        yield Text(text=verification.advice, where="page")
    columns = [("Status", "text"), ("Compared", "text"), ("Mode", "text"), ("Batch", "number")]
    columns += [("Inputs", "text"), ("Worst", "code"), ("Error", "number"), ("Tolerance", "number")]
    columns += [("Of the tolerance", "number")]
    bad, fine = (
        [_check(check) for check in verification.checks if (check.status in _SERIOUS) is serious]
        for serious in (True, False)
    )
    about = Text(text=_ABOUT_ERRORS, kind="note", where="page")
    checks = Table(label="Checks", columns=tuple(columns), rows=fine)
    if bad:
        yield replace(checks, rows=bad, where="page")
        yield about
    skipped = sum(row[0] == "skipped" for row in fine)
    counted = [f"{plural(len(fine) - skipped, 'check')} passed"]
    counted += [f"{skipped} skipped"] if skipped else []
    yield Folded(title=", ".join(counted), parts=(checks, *(() if bad else (about,))))
    losses = [("Tensor", "code"), ("Before", "text"), ("After", "text"), ("Overflowed", "number")]
    losses += [("Flushed to zero", "number"), ("Rounded", "number")]
    yield Table(
        label="Losses of casts",
        title="Losses of casts, the worst tensor first",
        columns=tuple(losses),
        rows=[
            (loss.tensor, loss.before, loss.after, loss.overflowed, loss.flushed, loss.rounded)
            for loss in verification.lost[:_LOSSES]
        ],
        where="page",
    )


def _check(check: Check) -> tuple[object, ...]:
    case = (
        doubt(check.status),
        check.what,
        check.mode,
        check.batch or "",
        check.inputs,
        check.worst,
    )
    return (
        *case,
        small(check.error),
        small(check.allowed),
        "" if check.part is None else share_text(check.part),
    )


def _serious(check: Check) -> tuple[str, ...]:
    batch = f"batch {check.batch}" if check.batch else ""
    case = ", ".join(filter(None, (check.mode, batch, check.inputs)))
    numbers = small(check.error), small(check.allowed)
    return doubt(check.status), check.what, case, check.worst, *numbers


def _has_more(verification: Verification) -> bool:
    """Return True if gradients are the least sensitive, and mode train would compare modules alone."""
    outputs, gradients = map(verification.sensitivity, ("outputs", "gradients"))
    alone = any(check.what.startswith("module ") for check in verification.checks)
    is_least = gradients is not None and (outputs is None or gradients > outputs)
    return is_least and verification.mode == "eval" and verification.amp == "none" and not alone


def _lost(losses: tuple[Lost, ...]) -> str:
    effects = {
        "became infinite": sum(loss.overflowed for loss in losses),
        "became zero": sum(loss.flushed for loss in losses),
        "whole numbers were rounded": sum(loss.rounded for loss in losses),
    }
    counts = ", ".join(f"{count:,} {text}" for text, count in effects.items() if count)
    worst = printable(losses[0].tensor)
    return f"casts: {counts}, in {plural(len(losses), 'tensor')}, most in {worst}"
