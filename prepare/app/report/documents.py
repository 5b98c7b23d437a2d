"""The documents of a run: those of its stages, and those of what every run has."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prepare.app.report.sentences import (
    by_remedy,
    changes_text,
    convolution_weights,
    elsewhere,
    problems_of,
)
from prepare.core.document import (
    FASTER,
    NEXT,
    RIGHT,
    UNDECIDED,
    USE_RECIPE,
    Advice,
    Answer,
    Document,
    ReportContext,
)
from prepare.core.utils.text import capitalized, first_line, plural
from prepare.errors import Problem
from prepare.stages.stage import ordered_stages, stages_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prepare.app.job.record import Result
    from prepare.app.job.results import Results
    from prepare.audit import AuditRow

# What applies if no stage says otherwise.
_DEFAULTS = {
    "problems": Advice(40, "warn", "Read the warnings", section="issues"),
    "ineffective": Advice(
        50, "warn", "Read the warnings", "some weights have another layout", section="result"
    ),
    "unprepared": Advice(92, "plain", "Leave out task=flow to prepare it"),
    "unchanged": Advice(93, "plain", "Choose a change", "as in precision=bfloat16"),
    "example": Advice(94, "warn", "Give an example input"),
    "use": USE_RECIPE,
}

_MEASURE = Advice(100, "warn", "Measure it before you use it")
# What to do about an open answer to these questions.
_VERBS = {RIGHT: "Verify it", FASTER: "Time it"}

_WORDS = {
    "model": "The model raised",
    "step": "A step raised",
    "error": "An exception",
    "oom": "Out of memory",
    "exit": "sys.exit was called",
    "file": "A file",
    "weights": "The weights",
    "configuration": "The configuration",
    "known issue": "A known issue",
}


def task_of(found: Mapping[str, Any]) -> str:
    """Return the word of `task=` that leaves these records; `prepare` if only a plain run does."""
    for cls in reversed(ordered_stages()):
        names = {file.rpartition(".")[0] for file in cls.records()}
        if not cls.default and names & found.keys():
            return next(iter(cls.tasks), "prepare")
    return "prepare"


def shown_of(run: Results, folder: str = "") -> ReportContext:
    """Return what the documents of a run are made from."""
    task = run.task or task_of(run.found)
    return ReportContext(
        found=run.found,
        ran=tuple(stages_of(task)),
        audit=run.audit,
        unchanged=run.unchanged,
        stopped=bool(run.stopped),
        has_example=run.has_example,
        overrides=run.overrides,
        folder=folder,
        elsewhere=elsewhere(run),
    )


def stage_documents(shown: ReportContext) -> list[Document]:
    """Return the documents of the stages in the order of a run."""
    found = (cls.document(shown) for cls in ordered_stages())
    return [document for document in found if document is not None]


def answers(run: Results, documents: Iterable[Document]) -> list[Answer]:
    """Return the answers that the record of a run gives, what to do last."""
    if run.result is not None and _has_failed(run):
        return _failure_answers(run.result)
    found = _by_question(documents)
    return [*found.values(), _card(advice(run, documents))] if found else []


def _has_failed(run: Results) -> bool:
    """Return whether a run did not come to its end; one that fails a check has, and its answers say why."""
    status = run.result.status if run.result is not None and run.result.error else "ok"
    return run.audit is None and status not in ("ok", "verification_failed")


def cards_of(documents: Iterable[Document], default: Iterable[Advice] = ()) -> list[Answer]:
    """Return the answers of documents without a run, and what to do if they, or the `default`, say so."""
    documents = list(documents)
    return [*_by_question(documents).values(), *map(_card, advice_in(documents, default))]


def advice_in(documents: Iterable[Document], default: Iterable[Advice] = ()) -> list[Advice]:
    """Return the advice of documents without a run, one or none; `default` is that of the lowest rank."""
    documents = list(documents)
    found = [each for document in documents for each in document.advice]
    return _best([*found, *default], documents)


def _card(advised: Advice) -> Answer:
    return Answer(NEXT, advised.kind, advised.answer, advised.remark, section=advised.section)


def _by_question(documents: Iterable[Document]) -> dict[str, Answer]:
    """Return one answer to each question, that of the document with the lowest place."""
    found: dict[str, Answer] = {}
    for document in sorted(documents, key=lambda each: each.place):
        for answer in document.answers:
            found.setdefault(answer.question, answer)
    return found


def verdict(run: Results, documents: Iterable[Document]) -> str:
    """Return the answers as sentences: `Right. 1.3x faster. Layout lost 24 times: add ...`."""
    result = run.result
    if result is not None and _has_failed(run):
        return f"{result.status.replace('_', ' ').capitalize()}: {first_line(result.error)}"
    stopped = ""
    if run.stopped and result is not None and result.error:
        stopped = f"Interrupted: {first_line(result.error)}. "
    found = answers(run, documents)
    if not found and run.plan is not None and run.audit is None:
        return f"Planned only: {changes_text(run.plan['summary'])}."
    return stopped + sentences_of(found)


def sentences_of(answers: Iterable[Answer]) -> str:
    """Return the answers but what to do as sentences."""
    found = (answer for answer in answers if answer.question != NEXT)
    return " ".join(f"{answer.sentence or answer.answer}." for answer in found)


def advice(run: Results, documents: Iterable[Document]) -> Advice:
    """Return what to do: of all advice the one with the lowest rank.

    A recipe is not advised as long as an answer is open.
    """
    documents = list(documents)
    found = [each for document in documents for each in document.advice]
    holds = {
        "problems": bool(run.plan and run.plan["problems"]),
        "ineffective": run.audit and run.audit.summary["convolutions"].get("ineffective"),
        "unprepared": run.audit is None and run.found,
        "unchanged": run.unchanged,
        "example": not run.has_example,
        "use": True,
    }
    found += [each for key, each in _DEFAULTS.items() if holds[key]]
    weights = convolution_weights(run.audit.rows if run.audit else ())
    if weights and run.unchanged:
        found.append(_with_a_format(weights, run.audit))
    for shape in run.audit.summary.get("first_input", ()) if run.audit else ():
        if not (run.has_example or run.unchanged):
            example = f"as in input.shape={json.dumps(shape, separators=(',', ':'))}"
            found.append(replace(_DEFAULTS["example"], rank=60, remark=example))
    troubles = problems_of(run.plan, "problems", "warnings")
    if remedy := next(filter(None, by_remedy(troubles)), ""):
        read = _DEFAULTS["problems"].answer
        found = [replace(a, answer=capitalized(remedy)) if a.answer == read else a for a in found]
    return _best(found, documents)[0]


def _with_a_format(weights: Sequence[AuditRow], audit: Any) -> Advice:
    """Return the advice to take the format of a model's convolutions; to compare two if it was taken."""
    ranks = {len(row.shape or ()) for row in weights}
    word = "channels_last" if ranks == {4} else "channels_last_3d" if ranks == {5} else "by_rank"
    if audit.summary.get("format_steps"):
        remark = f"in a sweep, as in -m memfmt=contiguous,{word}"
        return replace(_DEFAULTS["unchanged"], rank=91, answer="Compare two formats", remark=remark)
    remark = f"as in memfmt={word} or precision=bfloat16"
    return replace(_DEFAULTS["unchanged"], rank=92, remark=remark)


def is_training(run: Results) -> bool:
    """Return whether a run was one of training."""
    modes = {getattr(record, "mode", "") for record in run.found.values()}
    return "train" in modes or "mode=train" in run.overrides


def _best(found: list[Advice], documents: Iterable[Document]) -> list[Advice]:
    """Return the advice with the lowest rank; measuring in place of using the recipe if an answer is open."""
    if open_ := [each for each in _by_question(documents).values() if each.answer in UNDECIDED]:
        remark = open_[0].remark
        remark = f"leave out {remark}" if remark.endswith("=none") else remark
        verb = _VERBS.get(open_[0].question, "Measure it")
        answer = f"{verb} before you use it"
        section = open_[0].section or _MEASURE.section
        use = replace(_MEASURE, answer=answer, remark=remark, section=section)
        found = [use if each.section == USE_RECIPE.section else each for each in found]
    return sorted(found, key=lambda each: each.rank)[:1]


def _failure_answers(result: Result) -> list[Answer]:
    """Return what went wrong; and where, when, and what to do, as far as they are known."""
    problem = next(iter(result.problems), Problem("", first_line(result.error or "")))
    if result.status == "interrupted":
        advice = "Run the command again"
    elif problem.remedy:
        advice = capitalized(problem.remedy)
    elif result.reason == "oom":
        advice = "Use a smaller input or model"
    else:
        advice = "Correct that line" if result.place else "Read the traceback"
    if result.traceback is None and advice == "Read the traceback":
        advice = ""  # an error of ours without a remedy
    text = str(replace(problem, remedy=""))
    text = text.replace(f"{result.place}: ", "", 1) if result.place else text
    answers = [("What went wrong?", "bad", failure_word(result), first_line(text))]
    if result.place:
        answers.append(("Where?", "plain", result.place, ""))
    if result.during:
        done = f"after {plural(len(result.done), 'completed stage')}" if result.done else ""
        answers.append(("When?", "plain", f"While {result.during}", done))
    if advice:
        answers.append((NEXT, "warn", advice, ""))
    return [Answer(*each, section="failure") for each in answers]


def failure_word(result: Result) -> str:
    """Return the kind of failure in a few words: `The model raised`."""
    reason = (result.reason or result.status).replace("_", " ")
    return _WORDS.get(reason, capitalized(reason))
