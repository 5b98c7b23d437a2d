"""The sections that every run has: what went wrong, warnings, tensors, how to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prepare.app.report import sentences
from prepare.app.report.answers import training_code
from prepare.audit import STATUSES, Audit, AuditRow
from prepare.core.document import Code, Document, Facts, Folded, Part, Table, Text, columns
from prepare.core.utils.text import plural, size

if TYPE_CHECKING:
    from prepare.app.job.record import Results

# Longer commands are not read.
_LETTERS = 4000
# The request that changes a side of a tensor, where their names differ.
_WANTS = {"stride": "memory_format"}


def own_documents(run: Results, advised: str) -> Iterator[Document]:
    """Yield the documents that belong to no stage; `advised` is what to do anyway."""
    made = (
        ("failure", "What went wrong", 0, _failure(run)),
        ("issues", "Warnings", 35, _warnings(run, advised)),
        ("notes", "Notes", 36, [Text(text=tuple(run.notes), kind="note")] if run.notes else ()),
        ("result", "Tensors", 80, _result(run)),
        ("reproduce", "Reproduce", 90, _reproduce(run)),
        ("environment", "Environment", 95, _environment(run.environment or {})),
    )
    for name, title, place, parts in made:
        if found := tuple(parts):
            yield Document(name=name, title=title, place=place, parts=found.__iter__)


def audit_parts(audit: Audit) -> Iterator[Part]:
    """Yield the counts of an audit, why tensors were not converted, and every tensor."""
    summary = audit.summary
    dtypes = ", ".join(f"{count:,} {name}" for name, count in summary["dtypes"].items())
    devices = ", ".join(f"{count:,} on {name}" for name, count in summary["devices"].items())
    judged = sentences.is_judged(audit)
    facts = [
        ("Convolutions", sentences.audited_text(audit)),
        ("Tensors", f"{plural(summary['tensors'], 'tensor')}: {dtypes}; {devices}"),
        ("Memory", sentences.bytes_text(summary) if judged else size(summary["bytes_after"])),
        ("Not registered", ", ".join(map(str, summary["unregistered"]))),
    ]
    yield Facts(rows=tuple(fact for fact in facts if fact[1]))
    titles = columns("Status word, Reason prose, Tensors number, First tensor code")
    rows = [(*key, f"{count:,}", first) for *key, count, first in sentences.reasons_in(audit.rows)]
    title = "Not converted, or only in part"
    yield Table(label="Not converted", title=title, columns=titles, rows=rows)
    every = Table(
        label="All tensors with their status",
        columns=columns(
            "Tensor name, Module text, Status word, Shape number, Strides number, Type text, Device text, "
            "Strides before number, Before text, Reason prose"
        ),
        rows=list(map(_tensor, sorted(audit.rows, key=_worst_first))),
        file="audit.csv",
    )
    counts = summary["status"]
    by_status = ", ".join(f"{counts.get(status, 0):,} {status}" for status in STATUSES)
    text = f"{plural(len(audit.rows), 'row')} in the audit, one for each use of a tensor"
    note = Text(text=f"{text}: {by_status}" if judged else text, kind="note")
    fold = f"All tensors: {plural(len(audit.rows), 'row')}, the worst first"
    yield Folded(title=fold, parts=(note, every))


def plan_parts(plan: Mapping[str, Any]) -> Iterator[Part]:
    """Yield what a plan would change."""
    summary = plan["summary"]
    rows = [
        ("Planned only", sentences.changes_text(summary)),
        ("Wanted by", ", ".join(f"{name}: {n:,}" for name, n in summary["by_step"].items())),
        ("Memory", sentences.bytes_text(summary, "now")),
        ("Written", size(summary["bytes_written"])),
    ]
    yield Facts(rows=tuple(row for row in rows if row[1]))
    yield _changes(plan["tensors"])


def issues(plan: Mapping[str, Any]) -> Iterator[Text]:
    """Yield the known problems of a model on a device, grouped by their remedy."""
    for kind, key in (("wrong", "problems"), ("issues", "warnings")):
        for remedy, texts in sentences.by_remedy(sentences.problems_of(plan, key)).items():
            yield Text(text=tuple(texts), title=remedy, kind=kind)
    said = sentences.problems_of(plan, "problems", "warnings")
    if later := [
        each for each in sentences.problems_of(plan, "training_errors") if each not in said
    ]:
        yield Text(text=tuple(map(str, later)), title="In training", kind="issues", where="page")


def command(run: Results) -> str:
    """Return the command line of the run, as it was typed."""
    program = str((run.environment or {}).get("program") or "prepare")
    return f"{program} {shlex.join(run.job.overrides)}".rstrip()


def is_wrong(run: Results) -> bool:
    """Return whether a run failed a check, so that its code is not worth a place on the first screen."""
    return run.result is not None and run.result.status == "verification_failed"


def _failure(run: Results) -> Iterator[Part]:
    result = run.result
    if result is None or not result.error or is_wrong(run):
        return  # the stage that failed has a section of its own
    yield Code(text=result.error)
    if result.traceback:
        yield Folded(title="Traceback", parts=(Code(text=result.traceback),))
    rows = [("Done until then", ", ".join(result.done)), ("Failed while", result.during)]
    yield Facts(rows=tuple(row for row in rows if row[1]))


def _warnings(run: Results, advised: str) -> Iterator[Part]:
    """Yield the known problems; without a remedy that is what to do anyway."""
    for part in issues(run.plan or {}):
        yield replace(part, title="") if sentences.is_told(part.title, advised) else part


def _result(run: Results) -> Iterator[Part]:
    """Yield what was found of the tensors, or what is planned."""
    if run.audit:
        yield from audit_parts(run.audit)
    elif run.plan:
        yield from plan_parts(run.plan)


def _reproduce(run: Results) -> Iterator[Part]:
    """Yield the command, the code if the first screen does not show it, and the recipe."""
    if not run.task:
        return
    yield Code(text=command(run), most=_LETTERS, title="On the command line:")
    if (run.audit is None or is_wrong(run)) and (text := training_code(run)):
        yield Code(text=text, title="In training code, with the recipe.yaml of this folder:")
    what = "recipe" if run.recipe is not None else "steps"
    yield Folded(title=f"The {what}, with every option", parts=tuple(_declaration(run)))


def _declaration(run: Results) -> Iterator[Part]:
    yield Facts(rows=tuple((key, str(value)) for key, value in run.job.choices.items() if value))
    if run.recipe is not None:
        yield Code(text=run.recipe)
    elif run.plan:
        texts = (f"{name} {options}" for name, options in run.plan["steps"].items())
        yield Text(text=tuple(texts), title="The steps")


def _environment(values: Mapping[str, Any]) -> Iterator[Part]:
    """Yield versions and machine, below a line with the most important."""
    if not values:
        return
    first = {"torch": values["torch"], "Python": values["python"], "on": values["cpu"]}
    title = ", ".join(f"{name} {value}" for name, value in first.items() if value)
    texts = {key: _listed(values[key]) for key in values if key not in ("format", "version")}
    rows = ((key.replace("_", " ").capitalize(), text) for key, text in texts.items() if text)
    yield Folded(title=title, parts=(Facts(rows=tuple(rows)),))


def _listed(value: Any) -> str:
    """Return a value of an environment as text: `numpy 2.4, hydra-core 1.3.8`; empty if it is not known."""
    if isinstance(value, dict):
        value = [f"{name} {_listed(each)}" for name, each in value.items() if each]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "")


def _tensor(row: AuditRow) -> tuple[Any, ...]:
    before = row.before or {}
    types = ", ".join(str(before[key]) for key in ("dtype", "device") if key in before)
    after = (row.path, row.type, row.status, row.shape, row.stride, row.dtype, row.device)
    return (*after, before.get("stride"), types, row.reason)


def _worst_first(row: AuditRow) -> int:
    return STATUSES.index(row.status)


def _changes(tensors: Iterable[Mapping[str, Any]]) -> Table:
    """Return the tensors of a `plan.json` that a plan would change, and how."""
    rows = []
    for tensor in tensors:
        old, new = tensor["old"], tensor["new"]
        if sides := [side for side in old if old[side] != new[side]]:
            name = ".".join(filter(None, (tensor["module"], tensor["tensor"])))
            shape = tensor["shape"]
            changes = [_change(side, shape, old[side], new[side]) for side in sides]
            by = [tensor["by"].get(_WANTS.get(side, side), ()) for side in sides]
            steps = dict.fromkeys(step for names in by for step in names)
            rows.append((name, _value(shape), changes, list(steps)))
    titles = columns("tensor name, shape text, change text, wanted by text")
    return Table(label="Changes", columns=titles, rows=rows, noun="tensor", file="plan.json")


def _change(side: str, shape: Sequence[int], old: Any, new: Any) -> str:
    """Return one change; memory formats are named instead of strides if these differ."""
    from prepare.core.model.memory_format import satisfied

    if side == "stride" and old is not None and new is not None:
        formats = [satisfied(tuple(shape), tuple(strides)) for strides in (old, new)]
        names = [" or ".join(found) or "no format" for found in formats]
        if names[0] != names[1]:
            return " -> ".join(names)
        return f"strides {_value(old)} -> {_value(new)}"
    return f"{_value(old)} -> {_value(new)}"


def _value(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
