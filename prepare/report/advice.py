"""Say what to do after a job, for its page and for the terminal: the first advice that applies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prepare.report.answer import Answer
from prepare.report.export_answer import export_advice
from prepare.report.sentences import layout_remedy
from prepare.tune.records import UNPREPARED

if TYPE_CHECKING:
    from prepare.job.results import Analyses

_QUESTION = "What to do?"
_Advice = tuple[str, str, str, str]  # kind, answer, remark, section
_UPDATE = "contract.update=true"
_OF_CONTRACT: dict[str, _Advice] = {
    "broken": ("bad", "Undo what broke it", f"or, if intended, {_UPDATE}", "contract"),
    "better": ("warn", "Tighten the contract", _UPDATE, "contract"),
    "kept": ("good", "Nothing", "all is as recorded", "contract"),
}


def advice(run: Analyses, *, problems: bool, unchanged: bool, example: bool) -> Answer:
    """Return the advice for the analyses of a job.

    `problems` says that its plan has errors, `unchanged` that it changed nothing, `example` that the model
    was called.
    """
    advised = _on_results(run)
    if advised is None and problems:
        advised = "warn", "Read the warnings", "", "issues"
    if advised is None:
        advised = _on_figures(run)
    if advised is None and run.audit is None and run.flow is not None:
        advised = "plain", "Prepare it", "memfmt=channels_last, without task=flow", ""
    if advised is None and unchanged:
        advised = "plain", "Choose a change", "memfmt=channels_last, precision=bfloat16, ...", ""
    if advised is None and not example:
        advised = "warn", "Give an example input", "input.shape=[...]", ""
    if advised is None:
        advised = "good", "Use the recipe", "in training code, or by the command", "reproduce"
    if run.export is not None:
        advised = export_advice(run.export, advised)
    kind, answer, remark, section = advised
    return Answer(question=_QUESTION, kind=kind, answer=answer, remark=remark, section=section)


def _on_results(run: Analyses) -> _Advice | None:
    """Return the advice on what is wrong, lost or not known; None if there is nothing of it."""
    verification, flow = run.verification, run.flow
    if run.contract is not None:
        return _OF_CONTRACT[run.contract.status]
    if verification and verification.status == "fail":
        remark = "probable causes and their remedies are below" if verification.advice else ""
        return "bad", "Do not use it", remark, "verify"
    if flow and flow.status == "ok" and (remedy := layout_remedy(flow)):
        return "warn", f"{remedy[0].upper()}{remedy[1:]}", "for the breaks of the layout", "flow"
    if verification and verification.status == "cannot tell":
        return "warn", "Verify it with verify=full", "", "verify"
    return None


def _on_figures(run: Analyses) -> _Advice | None:
    """Return the advice on weights without effect, and on the speed; None if all is well."""
    row = run.bench.headline if run.bench else None
    tuned = run.tuning is not None and run.tuning.winner != UNPREPARED
    if run.audit and run.audit.summary["convolutions"].get("ineffective"):
        return "warn", "Read the warnings", "some weights have another layout", "result"
    if row and row.verdict == "slower":
        return "bad", "Leave the model unprepared", "it is slower", "bench"
    if row and row.verdict == "unclear" and not tuned:
        return "warn", "Time it longer with bench=full", "best on an idle machine", "bench"
    if run.tuning is not None and not tuned and not run.tuning.is_clear:
        return "warn", "Tune it longer with tune.budget", "best on an idle machine", "tune"
    if run.tuning is not None and not tuned:
        return "plain", "Leave the model as it is", "no correct recipe is faster", "tune"
    return None
