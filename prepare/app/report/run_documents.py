"""The documents that every run has: what went wrong, warnings, tensors, how to repeat it."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from prepare.app.report.documents import (
    advice,
    failure_word,
    is_training,
    shown_of,
    stage_documents,
)
from prepare.app.report.plan_changes import changes_table
from prepare.app.report.sentences import (
    audited_text,
    by_remedy,
    bytes_text,
    changes_text,
    is_judged,
    problems_of,
)
from prepare.app.report.training_code import training_code as code_for_recipe
from prepare.audit import STATUSES, Audit, AuditRow
from prepare.core.document import Code, Document, Facts, Folded, Items, Part, Table, Text, columns
from prepare.core.utils.machine import NAMES, how_threads_waited
from prepare.core.utils.text import plural, printable, size

if TYPE_CHECKING:
    from prepare.app.job.results import Results

# More reasons, and longer commands, are not read.
_LIMIT, _LETTERS = 2000, 4000
_STEP = re.compile(r"\+steps\.\S+")
_KNOWN = {"torch": "torch", "python": "Python", "cpu": "on"}


def own_documents() -> Iterator[tuple[str, Callable[[Results], Document | None]]]:
    """Yield the titles of the documents that belong to no stage, and the functions that make them."""
    parts: tuple[tuple[str, str, int, Callable[[Results], Iterable[Part]]], ...] = (
        ("failure", "What went wrong", 0, _failure),
        ("issues", "Warnings", 35, _warnings),
        ("notes", "Notes", 36, _notes),
        ("result", "Tensors", 80, _result),
        ("reproduce", "Reproduce", 90, _reproduce),
        ("environment", "Environment", 95, lambda run: _environment(run.environment or {})),
    )
    for name, title, place, make in parts:
        yield title, partial(_document, name, title, place, make)


def _document(
    name: str,
    title: str,
    place: int,
    make: Callable[[Results], Iterable[Part]],
    run: Results,
) -> Document | None:
    parts = tuple(make(run))
    return Document(name=name, title=title, place=place, parts=lambda: parts) if parts else None


def audit_parts(audit: Audit) -> Iterator[Part]:
    """Yield the counts of an audit, the reasons of tensors that were not converted, and every tensor."""
    yield Facts(rows=tuple(audit_facts(audit)))
    yield from _tensors(audit)


def _tensors(audit: Audit) -> tuple[Text, Table, Folded]:
    counts = audit.summary["status"]
    by_status = ", ".join(f"{counts.get(status, 0):,} {status}" for status in STATUSES)
    text = f"{plural(len(audit.rows), 'row')} in the audit, one for each use of a tensor"
    text += f": {by_status}" if is_judged(audit) else ""
    note = Text(text=text, kind="note")
    titles = columns("Status word, Reason prose, Tensors number, First tensor code")
    title = "Not converted, or only in part"
    why = Table(label="Not converted", title=title, columns=titles, rows=_reasons(audit.rows))
    every = Table(
        label="All tensors with their status",
        columns=columns(
            "Tensor name, Module text, Status word, Shape number, Strides number, Type text, Device text, "
            "Strides before number, Before text, Reason prose"
        ),
        rows=list(map(_tensor, sorted(audit.rows, key=_worst_first))),
        file="audit.csv",
    )
    fold = f"All tensors: {plural(len(audit.rows), 'row')}, the worst first"
    return note, why, Folded(title=fold, parts=(every,))


def plan_parts(summary: Mapping[str, Any]) -> Iterator[Part]:
    """Yield what a plan would change."""
    memory = bytes_text(summary, "now")
    wanted = ", ".join(f"{name}: {count:,}" for name, count in summary["by_step"].items())
    rows = [("Planned only", changes_text(summary)), ("Wanted by", wanted), ("Memory", memory)]
    yield Facts(
        rows=(*(row for row in rows if row[1]), ("Written", size(summary["bytes_written"])))
    )


def issues(plan: Mapping[str, Any]) -> Iterator[Items]:
    """Yield the known problems of a model on a device, grouped by their remedy."""
    for kind, key in (("wrong", "problems"), ("issues", "warnings")):
        for remedy, texts in by_remedy(problems_of(plan, key)).items():
            yield Items(texts=tuple(texts), title=remedy, kind=kind)
    said = problems_of(plan, "problems", "warnings")
    if later := [each for each in problems_of(plan, "training_errors") if each not in said]:
        yield Items(texts=tuple(map(str, later)), title="In training", kind="issues", where="page")


def environment(values: Mapping[str, Any] | None) -> Iterator[Part]:
    """Yield versions and machine."""
    if not values:
        return
    packages = {"Python": values["python"], "torch": values["torch"], **values["packages"]}
    cores = f"{values['cores']} cores, {plural(values['threads'], 'thread')} for torch"
    machine = {
        "Date": values["date"],
        "Platform": values["platform"],
        "Processor": f"{values['cpu'] or 'not known'}; {cores}",
        "Devices": ", ".join(values["devices"]) or "only the processor",
        "Accelerator": _accelerator(values.get("accelerator") or {}),
        "Commit": values["git_commit"] or "not in a git repository",
        "Versions": ", ".join(f"{name} {version}" for name, version in packages.items() if version),
    }
    yield Facts(rows=tuple((key, str(text)) for key, text in machine.items() if text))


def command(run: Results) -> str:
    """Return the command line of the run; empty if the record has none."""
    program = str((run.environment or {}).get("program") or "prepare")
    return f"{program} {shlex.join(run.overrides)}".rstrip() if run.job else ""


def training_code(run: Results) -> str:
    """Return the lines that apply the recipe in training code; empty without a recipe."""
    if run.recipe is None:
        return ""
    amp = run.result.amp if run.result is not None else "none"
    method = run.job.model.partition(".")[2] if run.job else ""
    method = method if method.isidentifier() else ""
    figures = (run.result and run.result.figures) or {}
    waiting = (
        printable(how_threads_waited(run.environment or {})) if figures.get("time_ratio") else ""
    )
    training = is_training(run)
    return code_for_recipe(run.plan, amp, method=method, waiting=waiting, training=training)


def _failure(run: Results) -> Iterator[Part]:
    result = run.result
    if result is None or not result.error or result.status == "verification_failed":
        return  # the stage that failed has a section of its own
    yield Text(text=failure_word(result), kind="error")
    yield Code(text=result.error)
    if result.traceback:
        yield Folded(title="Traceback", parts=(Code(text=result.traceback),))
    rows = [("Done until then", ", ".join(map(str, result.done or ())))]
    rows.append(("Failed while", result.during))
    yield Facts(rows=tuple((name, text) for name, text in rows if text))


def _warnings(run: Results) -> Iterator[Part]:
    """Yield the known problems; without a remedy that is what to do anyway."""
    parts = list(issues(run.plan or {}))
    advised = advice(run, stage_documents(shown_of(run))).answer if parts else ""
    for part in parts:
        steps = _STEP.findall(part.title)
        is_advised = steps and all(step in advised for step in steps)
        yield replace(part, title="") if is_advised else part


def _notes(run: Results) -> Iterator[Part]:
    if run.result is not None:
        yield Items(texts=tuple(run.result.notes))


def _result(run: Results) -> Iterator[Part]:
    """Yield what the first screen does not show of an audit, or of a plan."""
    if run.audit:
        facts = [
            fact for fact in audit_facts(run.audit) if fact[0] not in ("Convolutions", "Memory")
        ]
        kept = [fact for fact in facts if fact[0] == "Tensors"]
        yield Facts(rows=tuple(fact for fact in facts if fact not in kept))
        note, reasons, every = _tensors(run.audit)
        yield reasons
        yield replace(every, parts=(Facts(rows=tuple(kept)), note, *every.parts))
    elif run.plan:
        yield from plan_parts(run.plan["summary"])
        yield changes_table(run.plan["tensors"])


def _reproduce(run: Results) -> Iterator[Part]:
    """Yield the command, the code if the first screen does not show it, and the recipe."""
    if text := command(run):
        yield Code(text=text, most=_LETTERS, title="On the command line:")
    is_shown = run.audit is not None and not (
        run.result and run.result.status == "verification_failed"
    )
    if not is_shown and (text := training_code(run)):
        yield Code(text=text, title="In training code, with the recipe.yaml of this folder:")
    what = "recipe" if run.recipe is not None else "steps"
    yield Folded(title=f"The {what}, with every option", parts=tuple(_declaration(run)))


def _environment(values: Mapping[str, Any]) -> Iterator[Part]:
    if parts := tuple(environment(values)):
        known = (f"{name} {values[key]}" for key, name in _KNOWN.items() if values[key])
        yield Folded(title=", ".join(known), parts=parts)


def _declaration(run: Results) -> Iterator[Part]:
    choices = {key: value for key, value in (run.job.choices if run.job else {}).items() if value}
    if choices:
        yield Facts(rows=tuple((key, str(value)) for key, value in choices.items()))
    if run.recipe is not None:
        yield Code(text=run.recipe)
    elif run.plan and run.plan["steps"]:
        texts = (
            f"{name}: {', '.join(f'{key}: {value}' for key, value in options.items())}"
            for name, options in run.plan["steps"].items()
        )
        yield Items(texts=tuple(texts), title="The steps")


def _accelerator(identity: Mapping[str, Any]) -> str:
    """Return the known versions of an accelerator's libraries: `backend cuda, cuDNN 9.10.2`."""
    known = {name: identity.get(key) for key, name in NAMES.items()}
    texts = {name: ", ".join(v) if isinstance(v, list) else v for name, v in known.items() if v}
    return ", ".join(f"{name} {value}" for name, value in texts.items())


def audit_facts(audit: Audit) -> list[tuple[str, str]]:
    """Return the counts of an audit as names and values."""
    summary = audit.summary
    dtypes = ", ".join(f"{count:,} {name}" for name, count in summary["dtypes"].items())
    devices = ", ".join(f"{count:,} on {name}" for name, count in summary["devices"].items())
    memory = bytes_text(summary) if is_judged(audit) else size(summary["bytes_after"])
    facts = [
        ("Convolutions", audited_text(audit)),
        ("Tensors", f"{plural(summary['tensors'], 'tensor')}: {dtypes}; {devices}"),
        ("Memory", memory),
    ]
    if summary["unregistered"]:
        facts.append(("Not registered", ", ".join(map(str, summary["unregistered"]))))
    return facts


def _reasons(rows: Iterable[AuditRow]) -> list[tuple[str, str, str, str]]:
    """Return (status, reason, number of tensors, first tensor), the worst status first."""
    first: dict[tuple[str, str], str] = {}
    tensors: Counter[tuple[str, str]] = Counter()
    for row in rows:
        if row.reason:
            # For tied tensors the reason ends with a place, which the table of all tensors shows.
            key = row.status, row.reason.partition(" (as ")[0]
            first.setdefault(key, row.path)
            tensors[key] += 1
    ranked = sorted(first, key=lambda key: STATUSES.index(key[0]))
    return [(*key, f"{tensors[key]:,}", first[key]) for key in ranked[:_LIMIT]]


def _tensor(row: AuditRow) -> tuple[Any, ...]:
    before = row.before or {}
    types = ", ".join(str(before[key]) for key in ("dtype", "device") if key in before)
    after = (row.path, row.type, row.status, row.shape, row.stride, row.dtype, row.device)
    return (*after, before.get("stride"), types, row.reason)


def _worst_first(row: AuditRow) -> int:
    return STATUSES.index(row.status)
