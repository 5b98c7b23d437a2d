"""The first screen of a run: its answers, a verdict in one line, what to do next, and code to paste."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from prepare.app.report import sentences
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
from prepare.core.utils.text import capitalized, first_line, plural, printable
from prepare.errors import Problem
from prepare.stages.stage import ordered_stages, stages_of

if TYPE_CHECKING:
    from prepare.app.job.record import Result, Results

# What to do with a model that is reported on in Python, if nothing speaks against it.
_USE_MODEL = replace(USE_RECIPE, answer="Use the model as it is", remark="")
# What to do about an open answer to these questions.
_VERBS = {RIGHT: "Verify it", FASTER: "Time it"}

_INDENT = "    "
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


def stage_documents(run: Results, folder: str = "") -> list[Document]:
    """Return the documents of the stages of a run, in their order."""
    shown = ReportContext(
        found=run.found,
        ran=tuple(stages_of(run.task or "prepare")),
        audit=run.audit,
        unchanged=run.unchanged,
        stopped=bool(run.stopped),
        has_example=run.audit is None or bool(run.job.seen),
        folder=folder,
        elsewhere=sentences.elsewhere(run),
    )
    found = (cls.document(shown) for cls in ordered_stages())
    return [document for document in found if document is not None]


def answers(run: Results, documents: Iterable[Document]) -> list[Answer]:
    """Return the answers that a run gives, what to do last."""
    if failed := _failed(run):
        return _failure_answers(failed)
    found = list(by_question(documents).values())
    if run.stopped:
        found.insert(0, Answer("What happened?", "warn", "Interrupted", first_line(run.stopped)))
    if not found and run.plan is not None and run.audit is None:
        changes = sentences.changes_text(run.plan["summary"])
        found.append(Answer("What would change?", "plain", capitalized(changes)))
    what = advice(run, documents)
    advised = Answer(NEXT, what.kind, what.answer, what.remark, section=what.section)
    return [*found, advised]


def advice(run: Results, documents: Iterable[Document]) -> Advice:
    """Return what to do: of all advice the one with the lowest rank.

    A recipe is not advised as long as an answer is open, but to find that answer.
    """
    documents = list(documents)
    found = [each for document in documents for each in document.advice]
    found += _own_advice(run)
    if open_ := [each for each in by_question(documents).values() if each.answer in UNDECIDED]:
        remark = open_[0].remark
        use = Advice(
            USE_RECIPE.rank,
            "warn",
            f"{_VERBS.get(open_[0].question, 'Measure it')} before you use it",
            f"choose another level than {remark}" if remark.endswith("=none") else remark,
            section=open_[0].section,
        )
        found = [use if each.section == USE_RECIPE.section else each for each in found]
    return min(found, key=lambda each: each.rank)


def _failure_word(result: Result) -> str:
    """Return the kind of failure in a few words: `The model raised`."""
    reason = (result.reason or result.status).replace("_", " ")
    return _WORDS.get(reason, capitalized(reason))


def _failed(run: Results) -> Result | None:
    """Return the result of a run that did not come to its end; one that fails a check says why itself."""
    own = run.result if run.audit is None and run.result and run.result.error else None
    return own if own and own.status not in ("ok", "verification_failed") else None


def by_question(documents: Iterable[Document]) -> dict[str, Answer]:
    """Return one answer to each question, that of the document with the lowest place."""
    found: dict[str, Answer] = {}
    for document in sorted(documents, key=lambda each: each.place):
        for answer in document.answers:
            found.setdefault(answer.question, answer)
    return found


def _own_advice(run: Results) -> Iterator[Advice]:
    """Yield what to do with a run, whatever its stages say."""
    remedies = sentences.by_remedy(sentences.problems_of(run.plan, "problems", "warnings"))
    read = capitalized(next(filter(None, remedies), "")) or "Read the warnings"
    if run.plan and run.plan["problems"]:
        yield Advice(40, "warn", read, section="issues")
    if run.audit is None:
        yield Advice(92, "plain", f"Leave out task={run.task} to prepare it")
    elif run.audit.summary["convolutions"].get("ineffective"):
        yield Advice(50, "warn", read, "some weights have another layout", section="result")
    if run.unchanged or not (run.task or run.steps):
        yield _unchanged(run)
    elif run.audit is not None and not run.job.seen:
        shapes = [str(s).replace(" ", "") for s in run.audit.summary.get("first_input") or ()]
        remark = f"as in input.shape={shapes[-1]}" if shapes else ""
        yield Advice(60 if shapes else 94, "warn", "Give an example input", remark)
    yield USE_RECIPE if run.task else _USE_MODEL


def _unchanged(run: Results) -> Advice:
    """Return the advice to take the format of a model's convolutions; to compare two if it was taken."""
    weights = sentences.convolution_weights(run.audit.rows if run.audit else ())
    ranks = {len(row.shape or ()) for row in weights}
    word = "channels_last" if ranks == {4} else "channels_last_3d" if ranks == {5} else "by_rank"
    if not run.task:
        call = f'as in prepare.prepare(model, memory_format="{word}")'
        return Advice(93, "plain", "Prepare it", call if ranks else "")
    if ranks and run.audit and run.audit.summary.get("format_steps"):
        remark = f"in a sweep, as in -m memfmt=contiguous,{word}"
        return Advice(91, "plain", "Compare two formats", remark)
    remark = f"as in memfmt={word} or precision=bfloat16" if ranks else "as in precision=bfloat16"
    return Advice(93, "plain", "Choose a change", remark)


def _failure_answers(result: Result) -> list[Answer]:
    """Return what went wrong; and where, when, and what to do, as far as they are known."""
    problem = next(iter(result.problems), Problem("", first_line(result.error or "")))
    if result.status == "interrupted":
        remedy = "Run the command again"
    elif problem.remedy:
        remedy = capitalized(problem.remedy)
    elif result.reason == "oom":
        remedy = "Use a smaller input or model"
    elif result.traceback:
        remedy = "Correct that line" if result.place else "Read the traceback"
    else:
        remedy = ""  # an error of ours without a remedy
    text = str(replace(problem, remedy=""))
    text = text.replace(f"{result.place}: ", "", 1) if result.place else text
    answers = [("What went wrong?", "bad", _failure_word(result), first_line(text))]
    if result.place:
        answers.append(("Where?", "plain", result.place, ""))
    if result.during:
        done = f"after {plural(len(result.done), 'completed stage')}" if result.done else ""
        answers.append(("When?", "plain", f"While {result.during}", done))
    if remedy:
        answers.append((NEXT, "warn", remedy, ""))
    return [Answer(*each, section="failure") for each in answers]


def training_code(run: Results) -> str:
    """Return code that loads the recipe, applies it to a `model` as the run has, and calls it.

    If training with the recipe is an error, the code prepares the model for inference. That of a
    training run has the loop with the optimizer, and scales the gradients of float16. It is empty without a
    recipe.
    """
    if run.recipe is None:
        return ""
    plan, training = run.plan or {}, run.is_training
    timed = bool(run.result and run.result.figures and run.result.figures.get("time_ratio"))
    lines, where = [], run.environment or {}
    if timed and where.get("waiting") and where["threads"] > 1:
        lines.append(f"# Timed with {printable(where['waiting'])}: set it for your program too.")
    if run.amp != "none":
        lines.append("import torch")
    lines += ["from prepare.pipeline import Pipeline", ""]
    if plan.get("training_errors"):
        lines.append("# For inference only: training mode is an error, see Warnings.")
    lines.append('pipeline = Pipeline.load("recipe.yaml")')
    lines.append(f"model = pipeline.apply({_prepared(run)})  # in place, the same object")
    device = run.steps.get("device", {}).get("device", "cpu").partition(":")[0]
    work = [f"loss = criterion({_call(run)}, target)" if training else f"output = {_call(run)}"]
    if run.amp != "none":
        entered = f'with torch.autocast("{device}", torch.{run.amp}):'
        work = [entered, *(f"{_INDENT}{each}" for each in work)]
    if not training:
        return "\n".join([*lines, *work])
    backward = ["loss.backward()", "optimizer.step()"]
    if run.amp == "float16":
        lines.append(f'scaler = torch.amp.GradScaler("{device}")')
        backward = ["scaler.scale(loss).backward()", "scaler.step(optimizer)", "scaler.update()"]
    loop = ["optimizer.zero_grad()", *work, *backward]
    lines += ["for batch, target in loader:", *(f"{_INDENT}{each}" for each in loop)]
    return "\n".join(lines)


def one_line(run: Results) -> str:
    """Return one line that loads the recipe and applies it, as `training_code` does.

    It ends with a call if that is not `model(batch)`: a method, or a batch that has to be formatted.
    """
    load, prepared = 'Pipeline.load("recipe.yaml")', _prepared(run)
    if not (_method(run) or run.formats):
        return f"{load}.apply({prepared})"
    return f"pipeline = {load}; pipeline.apply({prepared}); {_call(run)}"


def _prepared(run: Results) -> str:
    """Return what `apply` is given: with errors in training mode the model for inference."""
    errors = (run.plan or {}).get("training_errors")
    given = "model.eval()" if errors else "model"
    return f"{given}, optimizer=optimizer" if run.is_training else given


def _method(run: Results) -> str:
    method = run.model.partition(".")[2]
    return method if method.isidentifier() else ""


def _call(run: Results) -> str:
    return f"{'.'.join(filter(None, ('model', _method(run))))}(pipeline.format(batch))"
