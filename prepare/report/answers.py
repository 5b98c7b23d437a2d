"""The answers of a job's page: is it right, is it faster, is the layout kept, and what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from prepare.core.utils.machine import disturbance
from prepare.core.utils.speed import interval_text, speed_text
from prepare.core.utils.text import first_line, size
from prepare.flow.causes import layout_causes, named
from prepare.report.advice import advice
from prepare.report.answer import Answer
from prepare.report.charts.flow_text import times
from prepare.report.export_answer import export_answer
from prepare.report.failure import failure_answers
from prepare.report.sentences import UNCHANGED, busy_sentence, skipped_outputs
from prepare.tune.records import UNPREPARED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prepare.bench.records import Bench, VariantResult
    from prepare.contract.records import ContractCheck
    from prepare.flow.records import Flow
    from prepare.job.results import SavedResults
    from prepare.tune.records import Tuning
    from prepare.verify.records import Check, Verification

# An error of more times what is allowed is not given in figures.
_BEYOND = 1000


def answers(run: SavedResults) -> list[Answer]:
    """Return the answers that the record of a job gives, the advice last."""
    if run.result is not None and run.result.error and run.audit is None:
        return failure_answers(run.result)
    if run.contract is not None:
        layout = [_layout(run.flow, run.flow_before)] if run.flow else []
        return [_kept(run.contract), *layout, _advice(run)]
    if run.tuning is not None:
        found = [_winner(run.tuning), _right_winner(run.tuning)]
    elif run.unchanged:
        found = [_same("Right?", "Unchanged"), _same("Faster?", "Not timed")]
    elif run.audit or run.verification or run.bench:
        found = [_right(run.verification), _speed(run)]
        if _interrupted(run):
            missing = {"verify=none", "bench=none"}
            found = [
                replace(a, remark="stopped before") if a.remark in missing else a for a in found
            ]
    else:
        found = []
    if run.export is not None:
        found.insert(0, export_answer(run.export))
    if run.flow is not None:
        found.append(_layout(run.flow, run.flow_before))
    elif run.audit is not None:
        found.append(
            Answer(question="Layout?", kind="plain", answer="Not followed", remark="flow=none")
        )
    return [*found, _advice(run)] if found else []


def _kept(contract: ContractCheck) -> Answer:
    """Return whether the contract is kept, as an answer to a question."""
    kinds = {"broken": "bad", "better": "warn", "kept": "good"}
    count = len(contract.changes)
    return Answer(
        question="Contract?",
        kind=kinds[contract.status],
        answer=f"Contract {contract.status}",
        remark=f"{count} change{'s' * (count > 1)}, see below" if count else "",
        section="contract",
    )


def verdict(run: SavedResults) -> str:
    """Return the answers as sentences: `Right. 1.3x faster. Layout lost 24 times: add ...`."""
    if run.result is not None and run.result.error and run.audit is None:
        return f"{run.result.status.replace('_', ' ').capitalize()}: {first_line(run.result.error)}"
    stopped = []
    if _interrupted(run) and run.result is not None and run.result.error:
        stopped = [f"Interrupted: {first_line(run.result.error)}."]
    return " ".join([*stopped, *_sentences(run)])


def _interrupted(run: SavedResults) -> bool:
    """Return whether the job was stopped after the model was prepared."""
    return run.result is not None and run.result.status == "interrupted"


def _busy(run: SavedResults) -> str:
    """Return a sentence if the machine was busy while the job was timed or tuned; empty if not."""
    busy = busy_sentence(run.bench)
    if run.tuning is not None and (found := disturbance(run.tuning.environment)):
        busy = f"{found}: times mean little; try again later"
    return f"{busy[0].upper()}{busy[1:]}." if busy else ""


def _sentences(run: SavedResults) -> Iterator[str]:
    found = {answer.question: answer for answer in answers(run)}
    advised = found.pop("What to do?", None)
    if not found:
        if run.plan is not None and run.audit is None:
            summary = run.plan["summary"]
            yield f"Planned only: {summary['to_change']:,} of {summary['tensors']:,} tensors would change."
        return
    for question, answer in found.items():
        if question == "Layout?" and (busy := _busy(run)):
            yield busy
        text = f"{answer.answer[0].lower()}{answer.answer[1:]}"
        if question == "Layout?":
            text = f"Layout {text}"
        elif answer.answer in ("Unclear", "No difference"):
            text = f"Speed: {text}"
        elif answer.answer == "Wrong":
            text = f"Wrong: {answer.remark}"
        else:
            text = answer.answer
        if question == "Layout?" and answer.kind == "bad" and advised is not None:
            yield f"{text}: {advised.answer[0].lower()}{advised.answer[1:]}"
        else:
            yield f"{text}."


def _same(question: str, answer: str) -> Answer:
    """Return the answer for a run that changed nothing."""
    return Answer(question=question, kind="plain", answer=answer, remark=UNCHANGED)


def _right(verification: Verification | None) -> Answer:
    question, section = "Right?", "verify"
    if verification is None:
        return Answer(question=question, kind="plain", answer="Not checked", remark="verify=none")
    if verification.status == "fail":
        remark = verification.reason
        remark += f"; first in {verification.culprit}" if verification.culprit else ""
        return Answer(question=question, kind="bad", answer="Wrong", remark=remark, section=section)
    if verification.status != "pass":
        remark = verification.reason
        return Answer(
            question=question,
            kind="warn",
            answer="Cannot tell if right",
            remark=remark,
            section=section,
        )
    if any(check.status == "wrong" for check in verification.checks):
        remark = verification.reason
        answer = f"Right in mode {verification.mode} only"
        return Answer(question=question, kind="warn", answer=answer, remark=remark, section=section)
    remark = error_text(verification)
    return Answer(question=question, kind="good", answer="Right", remark=remark, section=section)


def error_text(verification: Verification) -> str:
    """Return `output error 1.7e-06, 4 % of what is allowed; gradients right`."""
    checks = [check for check in verification.checks if check.status == "pass"]
    outputs = [check for check in checks if check.what == "outputs" and check.error is not None]
    if not outputs:
        return skipped_outputs(verification)
    worst = max(outputs, key=lambda check: share(check) or 0.0)
    part = share(worst)
    text = f"output error {worst.error:.2g}"
    text += "" if part is None else f", {share_text(part)} of what is allowed"
    gradients = any("gradients" in check.what for check in checks)
    return f"{text}; gradients right" if gradients else text


def share(check: Check) -> float | None:
    """Return the error of a check as a fraction of what is allowed; None if one is not known."""
    return check.error / check.allowed if check.error is not None and check.allowed else None


def share_text(part: float) -> str:
    """Return a share of what is allowed: `4 %`, `less than 1 %`, `46 times`, `more than 1,000 times`."""
    if part < 0.01:
        return "less than 1 %"
    if part > _BEYOND:
        return f"more than {_BEYOND:,} times"
    return f"{part:,.0f} times" if part >= 10 else f"{100 * part:,.0f} %"


def _speed(run: SavedResults) -> Answer:
    """Return whether it is faster; that of a wrong model is not a success."""
    found = _faster(run.bench)
    if found.kind == "good" and run.verification and run.verification.status == "fail":
        return replace(found, kind="plain", remark=f"{found.remark}; but the outputs are wrong")
    return found


def _faster(bench: Bench | None) -> Answer:
    question, section = "Faster?", "bench"
    if bench is None:
        return Answer(question=question, kind="plain", answer="Not timed", remark="bench=none")
    row, comparison = bench.headline, bench.cases[0].comparison
    if row.ratio is None or comparison is None:
        kind, answer = ("bad", "Failed") if row.verdict == "failed" else ("plain", "Not timed")
        return Answer(
            question=question, kind=kind, answer=answer, remark=row.reason, section=section
        )
    kinds = {"faster": "good", "slower": "bad", "unclear": "warn"}
    answer = speed_text(row.verdict, row.ratio, None)
    return Answer(
        question=question,
        kind=kinds.get(row.verdict, "plain"),
        answer=answer[0].upper() + answer[1:],
        remark=f"{bench.cases[0].what}: {_remark(row)}",
        section=section,
    )


def _remark(row: VariantResult) -> str:
    """Return the interval of the change of the time, or why the verdict is unclear."""
    if row.verdict == "unclear":
        return row.reason or "the interval is too wide"
    shown = interval_text(row.ratio_interval)
    return f"95 % interval: {shown} time" if shown else "the interval is wide"


def _layout(flow: Flow, before: Flow | None) -> Answer:
    question, section = "Layout?", "flow"
    summary = flow.summary
    if flow.status != "ok":
        return Answer(
            question=question,
            kind="warn",
            answer="Cannot tell if kept",
            remark=flow.reason,
            section=section,
        )
    formats = " and ".join(dict.fromkeys(flow.wanted.values()))
    outputs = (
        f"{summary['in_layout']:,} of {summary['convolutions']:,} convolutions returned {formats}"
    )
    if summary["breaks"]:
        causes = named(layout_causes(flow))
        remark = f"{causes}: {size(summary['copied_bytes'])} copied in each forward"
        return Answer(
            question=question,
            kind="bad",
            answer=f"Lost {times(summary['breaks'])}",
            remark=remark,
            section=section,
        )
    if summary["backward"]["breaks"]:
        remark = named(layout_causes(flow, "backward"))
        answer = f"Lost {times(summary['backward']['breaks'])} in backward"
        return Answer(question=question, kind="bad", answer=answer, remark=remark, section=section)
    if set(flow.wanted.values()) <= {"contiguous"}:
        return Answer(
            question=question,
            kind="plain",
            answer="Contiguous",
            remark="channels-last was not requested",
            section=section,
        )
    if before is not None and before.summary["breaks"]:
        outputs += f"; lost {times(before.summary['breaks'])} without the repairs"
    return Answer(question=question, kind="good", answer="Kept", remark=outputs, section=section)


def _winner(tuning: Tuning) -> Answer:
    row = tuning.row(tuning.winner)
    if row.name == UNPREPARED and not tuning.is_clear:
        remark = "no recipe was shown to be correct and faster"
        return Answer(
            question="Faster?", kind="warn", answer="Unclear", remark=remark, section="tune"
        )
    if row.name == UNPREPARED or row.ratio is None:
        return Answer(
            question="Faster?",
            kind="plain",
            answer="No recipe is faster",
            remark=row.reason,
            section="tune",
        )
    return Answer(
        question="Faster?",
        kind="good",
        answer=f"{row.name} is {speed_text(tuning.verdict(row), row.ratio, None)}",
        remark=f"95 % interval: {shown} time"
        if (shown := interval_text(row.ratio_interval))
        else "",
        section="tune",
    )


def _right_winner(tuning: Tuning) -> Answer:
    row = tuning.row(tuning.winner)
    if row.name == UNPREPARED:
        return Answer(
            question="Right?",
            kind="plain",
            answer="Unchanged",
            remark="the model as it is",
            section="tune",
        )
    if row.verified == "pass":
        part = row.error / row.allowed if row.error is not None and row.allowed else None
        remark = (
            ""
            if part is None
            else f"output error {row.error:.2g}, {share_text(part)} of what is allowed"
        )
        return Answer(question="Right?", kind="good", answer="Right", remark=remark, section="tune")
    return Answer(
        question="Right?",
        kind="warn",
        answer="Cannot tell if right",
        remark=row.verified or "not verified",
        section="tune",
    )


def _advice(run: SavedResults) -> Answer:
    return advice(
        run,
        problems=bool(run.plan and run.plan["problems"]),
        unchanged=run.unchanged,
        example=run.job is None or bool(run.job.seen),
    )
