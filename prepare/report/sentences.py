"""Sentences and figures that the terminal and the pages share, made from records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from prepare.core.utils.machine import disturbance
from prepare.core.utils.text import counts, plural, printable, size
from prepare.core.utils.wording import argument, step, words
from prepare.job.headline import CONVOLUTIONS
from prepare.report.layout_causes import breaks_text, layout_causes
from prepare.report.speed import noise_text, speed_text
from prepare.tune.records import UNPREPARED

if TYPE_CHECKING:
    from prepare.audit.rows import AuditRow
    from prepare.bench.records import Bench, Case, Control, Interval
    from prepare.export.records import Export, TakenOut
    from prepare.flow.records import Flow
    from prepare.job.headline import BenchFigures, Headline, VerifyFigures
    from prepare.patch.records import Patch
    from prepare.tune.records import CandidateResult, Tuning
    from prepare.verify.records import Check, Verification

# A sentence names at most so many classes of modules.
_NAMED = 3
# The dtype of a weight in 8 bits, as an audit names it: `int8 per row`.
_QUANTIZED = "int8 per "
# A sensitivity of more than this names the module that has it.
_BLIND = 0.001
# What the statuses of recipes mean; others say it themselves.
_RESULTS = {"slower": "slower than another recipe", "not faster": "not shown to be faster"}
# Of a run whose pipeline changes neither the model nor its example.
UNCHANGED = "nothing was changed, so there is nothing to verify or time"


def flow_sentence(flow: Flow) -> str:
    """Return one sentence: `13 breaks, all InstanceNorm3d, 4.3 MiB copied per forward: add ...`."""
    remedy = layout_remedy(flow) if flow.status == "ok" else ""
    return breaks_sentence(flow) + (f": {remedy}" if remedy else "")


def breaks_sentence(flow: Flow) -> str:
    """Return one sentence without the remedy: `13 breaks, all InstanceNorm3d, 4.3 MiB copied per forward`."""
    if flow.status != "ok":
        return f"{flow.status}: {printable(flow.reason)}"
    summary = flow.summary
    copied = f"{size(summary['copied_bytes'])} copied per forward"
    causes = layout_causes(flow)
    if summary["copied_bytes"] and not summary["breaks"]:
        # A copy without a break: the layout is the same before and after the operation.
        copied += f" inside {', '.join(cause.name for cause in causes[:_NAMED] if cause.copied)}"
    parts = [breaks_text(causes), copied]
    backward = summary["backward"]
    if backward["breaks"] or backward["copied_bytes"]:
        parts.append(f"{breaks_text(layout_causes(flow, 'backward'))} in backward")
        parts.append(f"{size(backward['copied_bytes'])} copied per backward")
    return ", ".join(parts)


def layout_remedy(flow: Flow) -> str:
    """Return `add +steps.repair_layout={} to remove 12 of 13 breaks`; empty if nothing was found."""
    if flow.remedy is None:
        return ""
    total = flow.summary["breaks"] + flow.summary["backward"]["breaks"]
    steps = words(cli=" ", python=", ").join(map(step, flow.remedy.steps))
    return f"add {steps} to remove {total - flow.remedy.breaks:,} of {plural(total, 'break')}"


def patch_sentence(patch: Patch) -> str:
    """Return `4 calls changed: 1.1 MiB -> 0 bytes copied per forward, 16 -> 0 breaks, verified: pass`."""
    breaks = plural(patch.before[1], "break")
    if not patch.calls:
        return f"nothing to change: none of {breaks} can be removed"
    sizes = f"{size(patch.before[0])} -> {size(patch.after[0])} copied per forward"
    parts = [
        f"{plural(len(patch.calls), 'call')} changed: {sizes}",
        f"{patch.before[1]:,} -> {plural(patch.after[1], 'break')}",
        f"verified: {patch.verified}" if patch.verified else "not verified",
    ]
    speed = speed_text(patch.verdict, patch.ratio, patch.interval) if patch.verdict else "not timed"
    parts.append(f"time: {speed}" if speed == "unclear" else speed)
    return ", ".join(parts)


def verify_sentence(verification: Verification) -> str:
    """Return the verdict, and of a pass the least error that it finds."""
    finds = sensitivity_text(verification) if verification.status == "pass" else ""
    text = verdict_sentence(verification)
    return f"{text}; finds systematic errors from {finds}" if finds else text


def verdict_sentence(verification: Verification) -> str:
    """Return one sentence: `pass: 4 checks against float64, ...`, `fail: outputs (eval mode): ...`."""
    if verification.status != "pass":
        return f"{verification.status}: {printable(verification.reason)}"
    checks = [check for check in verification.checks if check.status != "skipped"]
    reference = f" against {verification.reference}" if verification.reference else ""
    if alone := max((c.compared for c in checks if c.what.startswith("module ")), default=0):
        reference += f", {plural(alone, 'module')} alone against float64"
    text = f"pass: {plural(len(checks), 'check')}{reference}{_output_error(checks)}"
    if skipped := skipped_outputs(verification):
        text += f"; {skipped}"
    if verification.reason:
        wrong = f"wrong, but not a failure in mode {verification.mode}: {verification.reason}"
        text += printable(f"; {wrong}")
    return text


def skipped_outputs(verification: Verification) -> str:
    """Return `outputs: they are all zero, ...` if those of the user's batch were skipped; else empty."""
    first = next((check for check in verification.checks if check.what == "outputs"), None)
    return f"outputs: {printable(first.note)}" if first and first.status == "skipped" else ""


def _output_error(checks: list[Check]) -> str:
    """Return the error of the outputs, and its share of what is allowed; empty if it was not measured."""
    shares = [
        check.error / check.allowed
        for check in checks
        if check.what == "outputs" and check.error is not None and check.allowed
    ]
    return f", outputs at {_percent(max(shares))} of the limit" if shares else ""


def sensitivity_text(verification: Verification) -> str:
    """Return `0.0043 % in outputs, 3.5 % in gradients`, and where more hides; empty if not measured."""
    measured = [(kind, verification.sensitivity(kind)) for kind in ("outputs", "gradients")]
    kinds = {kind: found for kind, found in measured if found}
    text = ", ".join(f"{100 * least:.2g} % in {kind}" for kind, (least, _) in kinds.items())
    least, place = max(kinds.values(), default=(0.0, ""))
    if least > _BLIND and place:
        text += f" (errors below {100 * least:.2g} % in {place} cannot be told from noise"
        text += (
            f"; {argument('mode', 'train')} compares modules alone)"
            if _has_more(verification)
            else ")"
        )
    return printable(text)


def _has_more(verification: Verification) -> bool:
    """Return True if gradients are the least sensitive, and mode train would compare modules alone."""
    outputs, gradients = map(verification.sensitivity, ("outputs", "gradients"))
    alone = any(check.what.startswith("module ") for check in verification.checks)
    is_least = gradients is not None and (outputs is None or gradients > outputs)
    return is_least and verification.mode == "eval" and verification.amp == "none" and not alone


def convolutions_text(numbers: Mapping[str, int], steps: Mapping[str, Any]) -> str:
    """Return the convolutions by status; in other words if no step requested anything but a device."""
    if steps.keys() <= {"device"} and not numbers.get("converted") and numbers.get("already"):
        return f"{numbers['already']:,} as they were: no memfmt and no precision was chosen"
    return counts(numbers, CONVOLUTIONS)


def quantized_text(rows: Iterable[AuditRow]) -> str:
    """Return `3 weights int8 per row; left in float: 1 Conv2d: ...`; empty if no step stores weights so."""
    once = [row for row in rows if all(row.path <= other for other in row.shared_with)]
    stored = Counter(row.dtype for row in once if row.dtype.startswith(_QUANTIZED))
    left: dict[str, Counter[str]] = {}
    for row in once:
        for part in (row.reason or "").split("; "):
            step, _, reason = part.partition(": ")
            if step == "quantize":
                left.setdefault(reason, Counter())[row.type] += 1
    parts = [f"{plural(count, 'weight')} {dtype}" for dtype, count in stored.items()]
    reasons = [
        f"{', '.join(f'{count:,} {kind}' for kind, count in sorted(kinds.items(), key=_most))} ({reason})"
        for reason, kinds in sorted(left.items(), key=lambda item: -item[1].total())
    ]
    if reasons:
        more = f", and {plural(len(reasons) - _NAMED, 'more reason')}" if reasons[_NAMED:] else ""
        parts.append(f"left in float: {', '.join(reasons[:_NAMED])}{more}")
    return "; ".join(parts)


def _most(item: tuple[str, int]) -> tuple[int, str]:
    """Return a key that sorts counted names, the most frequent first."""
    return -item[1], item[0]


def autocast_text(amp: str) -> str:
    """Return the clause on the autocast of every forward; empty without autocast."""
    return "" if amp == "none" else f"under autocast to {amp}"


def tune_sentence(tuning: Tuning) -> str:
    """Return one sentence: `channels_last: 1.3x faster (...); 3 of 6 recipes timed`."""
    winner = tuning.row(tuning.winner)
    timed = sum(row.rounds > 0 for row in tuning.rows)
    counted = f"{timed} of {plural(len(tuning.rows), 'recipe')} timed"
    if winner.name != UNPREPARED:
        speed = speed_text(tuning.verdict(winner), winner.ratio, winner.ratio_interval)
        text = f"{winner.name}: {speed}; {counted}"
    elif tuning.is_clear:
        text = f"{winner.name}: no correct recipe is faster; {counted}"
    else:
        why = disturbance(tuning.environment) or "give it more time (tune.budget)"
        text = f"unclear: no recipe was shown to be correct and faster; {counted}; {why}"
    return text


def result_text(row: CandidateResult, tuning: Tuning) -> str:
    """Return the result of one recipe in a few words: `winner`, `slower than another recipe`."""
    if row.name == UNPREPARED == tuning.winner and not tuning.is_clear:
        return "kept, as none is shown to be faster"
    return _RESULTS.get(row.status, row.status)


def export_sentence(export: Export) -> str:
    """Return one sentence: `onnx pass: model.onnx, 1.2 MiB; largest error 3e-08 of 1e-05 allowed`."""
    text = f"{export.exporter} {export.status}"
    if export.artefact:
        text += f": {export.artefact}, {size(export.bytes)}"
    if export.status != "fail" and (worst := export.worst) is not None:
        text += f"; largest error {worst.error:.2g}, allowed {worst.allowed:.2g}"
    return f"{text}; {export.reason}" if export.reason else text


def layouts_text(export: Export) -> str:
    """Return the layouts of inputs by answer: `right: contiguous, channels_last; refused: gaps`."""
    answers: dict[str, list[str]] = {}
    for layout, answer in export.contract.layouts.items():
        answers.setdefault(answer, []).append(layout)
    parts = [f"{answer}: {', '.join(layouts)}" for answer, layouts in answers.items()]
    if export.contract.requires_contiguous:
        parts.append("give contiguous inputs only")
    return "; ".join(parts)


def taken_out_text(item: TakenOut) -> str:
    """Return `repair_layout in 3 modules: this format chooses layouts itself`."""
    named = f" in {plural(len(item.modules), 'module')}" if item.modules else ""
    return f"{item.step}{named}: {item.reason}"


def case_sentence(case: Case) -> str:
    """Return one sentence: `inference: 1.2x faster (18 % less time, ...): 38 ms instead of 46 ms`."""
    row = case.row
    if case.comparison is None or row.ratio is None:
        name = "" if row.verdict == "not compared" else f"{row.name} "
        return printable(f"{case.what}: {name}{row.verdict}: {row.reason}")
    baseline = case.comparison.row(case.comparison.baseline).seconds or 0.0
    confidence = float(case.comparison.settings.get("confidence") or 0.95)
    text = speed_text(row.verdict, row.ratio, row.ratio_interval, confidence=confidence)
    if row.verdict == "unclear":
        return printable(f"{case.what}: {text}: {row.reason or 'the interval is too wide'}")
    times = seconds(baseline)
    if row.verdict != "no difference":
        times = f"{seconds(case.seconds or 0.0)} instead of {times}"
    return printable(f"{case.what}: {text}: {times}")


def busy_sentence(bench: Bench | None) -> str:
    """Return one line if the machine was busy while the job was timed; empty if not."""
    cases = bench.cases if bench else ()
    found = (disturbance(case.comparison.settings) for case in cases if case.comparison)
    busy = next(filter(None, found), "")
    return f"{busy}: times mean little; try again later" if busy else ""


def control_text(control: Control | None) -> str:
    """Return the clause on the baseline against itself, which follows the number of rounds."""
    if control is None:
        return "; the baseline failed, so nothing was compared"
    noise = noise_text(control.noise)
    return f"; the baseline against itself: {noise or 'too few rounds for an interval'}"


def outputs_sentence(*, format: str, gave: int, of: int, ambiguous: int) -> str:  # noqa: A002
    """Return one sentence on the outputs of convolutions: `8 of 8 convolutions returned channels_last`."""
    text = f"{gave} of {plural(of, 'convolution')} returned {format}"
    return (
        f"{text} ({ambiguous} of these also satisfy another memory format)" if ambiguous else text
    )


def memory_text(figures: Headline) -> str:
    """Return `5.4 MiB`, or `5.4 -> 2.7 MiB` if it changed; empty if it is not known."""
    before, after = figures.bytes_before, figures.bytes_after
    if before is None or after is None:
        return ""
    if before == after:
        return size(after)
    figure, _, unit = size(before).partition(" ")
    after_figure, _, after_unit = size(after).partition(" ")
    same = unit == after_unit
    return f"{figure}{'' if same else f' {unit}'} -> {after_figure} {after_unit}"


def verified_text(verified: VerifyFigures | None, *, short: bool = False) -> str:
    """Return `pass 3.1e-05 (17 % of the limit)`: the status, the error of the outputs, and its share.

    The `short` text is `pass 3e-05 17%`, for a column.
    """
    if verified is None:
        return ""
    judged = verified.error is not None and verified.status != "cannot tell"
    digits = ".1g" if short else ".2g"
    error = (
        f" {verified.error:{digits}}{_of_the_limit(verified.share, short=short)}" if judged else ""
    )
    # Wrong gradients do not count in a job for inference.
    return verified.status + error + (", wrong in training" if verified.wrong else "")


def _of_the_limit(share: float | None, *, short: bool) -> str:
    if share is None or share > 10:
        return ""
    percent = _percent(share)
    return f" {percent.replace(' ', '')}" if short else f" ({percent} of the limit)"


def _percent(share: float) -> str:
    return "<1 %" if share < 0.01 else f"{100 * share:.0f} %"


def timing_text(timed: BenchFigures) -> str:
    """Return verdict, ratio and interval: `2.0x faster (49 % less time, 95 % interval: 47 to 51 %)`."""
    return speed_text(timed.verdict, timed.ratio, timed.interval)


def seconds(value: float) -> str:
    """Format a time with three digits: `1.23 s`, `45.6 ms`, `789 us`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= 0.9995 * scale:
            return f"{digits(value / scale)} {unit}"
    return f"{digits(value / 1e-6)} us"


def factor(value: float) -> str:
    """Format a ratio for reading: `0.82`, `12.3`, `0.0041`."""
    if value < 0.095:
        return f"{value:.2g}"
    return f"{value:.2f}" if value < 9.995 else digits(value)


def digits(value: float) -> str:
    """Format a number with three digits, or with all before the point if these are more."""
    places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{places}f}"


def span(interval: Interval, form: Callable[[float], str]) -> str:
    """Format an interval: `0.80 to 0.85`; empty for None."""
    return "" if interval is None else " to ".join(map(form, interval))
