"""The sections of a job's page: each function returns the context of its template."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from prepare.audit.rows import STATUSES, AuditRow
from prepare.contract.records import KINDS
from prepare.contract.summary import check_lines
from prepare.core.utils.accelerator import NAMES
from prepare.core.utils.text import counts, plural, size
from prepare.report.answers import error_text, share, share_text
from prepare.report.failure import failure_word
from prepare.report.pages.bench_section import timed
from prepare.report.pages.export_section import exported
from prepare.report.pages.flow_section import layout_flow
from prepare.report.pages.long_table import LIMIT
from prepare.report.pages.run_lead import training_code
from prepare.report.pages.run_tables import tensor_table
from prepare.report.pages.tune_section import tuned
from prepare.report.sentences import (
    outputs_sentence,
    patch_sentence,
    quantized_text,
    verify_sentence,
)

if TYPE_CHECKING:
    from prepare.audit import Audit
    from prepare.job.record import Job
    from prepare.job.results import SavedResults

Context = dict[str, Any]
T = TypeVar("T")
# The first letters of a diff; `patch.diff` has all.
_DIFF_SHOWN = 50_000


@dataclass(frozen=True)
class Section(Generic[T]):
    """A part of a page: `name` is its anchor and its template; `context` takes the record.

    `context` returns None if the record has no data for the section; the page leaves it out.
    """

    name: str
    title: str
    context: Callable[[T], Context | None]


def declaration(run: SavedResults) -> Context | None:
    """Return the choice of each group, and the resolved recipe."""
    choices = {key: value for key, value in (run.job.choices if run.job else {}).items() if value}
    steps = run.plan["steps"] if run.plan and run.recipe is None else {}
    if not choices and run.recipe is None and not steps:
        return None
    return {"choices": choices, "recipe": run.recipe, "steps": steps}


def result(run: SavedResults) -> Context | None:
    """Return the counts of the audit, and every tensor with its status; or what a plan would change."""
    if not run.audit and not run.plan:
        return None
    context: Context = {"facts": [], "statuses": {}, "skipped": [], "tensors": None}
    if run.audit:
        counted = run.audit.summary["status"]
        context["facts"] = _audit_facts(run.audit, run.job)
        context["statuses"] = {status: counted.get(status, 0) for status in STATUSES}
        context["skipped"] = _reasons(run.audit.rows)
        context["tensors"] = tensor_table(run.audit.rows)
    elif run.plan:
        context["facts"] = _plan_facts(run.plan["summary"])
    return context


def failed(run: SavedResults) -> Context | None:
    """Return the error, its traceback, and what was done before it."""
    if run.result is None or not run.result.error or run.result.status == "verification_failed":
        return None  # the verification has a section of its own
    return {"result": run.result, "word": failure_word(run.result)}


def verified(run: SavedResults) -> Context | None:
    """Return the verification of outputs and gradients, and the losses of casts."""
    verification = run.verification
    if verification is None:
        return None
    return {
        "sentence": verify_sentence(verification),
        "error": error_text(verification),
        "shares": [
            "" if (part := share(c)) is None else share_text(part) for c in verification.checks
        ],
        "culprit": verification.culprit,
        "reduced": run.reduction.script if run.reduction else "",
        "reduce": _reduce_command(run) if verification.status == "fail" else "",
        "advice": verification.advice,
        "checks": verification.checks,
        "lost": verification.lost[:LIMIT],
    }


def _reduce_command(run: SavedResults) -> str:
    """Return the command that reduces a failed verification to a script; empty without a command."""
    if not run.job:
        return ""
    words = [word for word in run.job.overrides if not word.startswith(("task=", "hydra.run.dir="))]
    return shlex.join(["python", "run.py", *words, "task=reduce"])


def contract(run: SavedResults) -> Context | None:
    """Return the check of the layout contract: its verdict, and one line for each change."""
    if run.contract is None:
        return None
    lines = check_lines(run.contract, file=run.contract.file, update="")
    changes = [text for text in lines if text.startswith(tuple(f"{kind}: " for kind in KINDS))]
    return {"check": run.contract, "changes": changes}


def issues(run: SavedResults) -> Context | None:
    """Return the known problems of this model on this device, grouped by their remedy."""
    plan = run.plan or {}
    problems, warnings = plan.get("problems", []), plan.get("warnings", [])
    if not problems and not warnings:
        return None
    return {"problems": _by_remedy(problems), "warnings": _by_remedy(warnings)}


def _by_remedy(texts: Iterable[str]) -> dict[str, list[str]]:
    """Return the texts by their remedy, which is what follows the last semicolon; empty for none."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        wrong, _, remedy = text.rpartition("; ")
        groups.setdefault(remedy if wrong else "", []).append(wrong or text)
    return groups


def _accelerator(identity: dict[str, Any]) -> str:
    """Return the known versions of an accelerator's libraries: `backend cuda, cuDNN 9.10.2`."""
    known = {name: identity.get(key) for key, name in NAMES.items()}
    texts = {name: ", ".join(v) if isinstance(v, list) else v for name, v in known.items() if v}
    return ", ".join(f"{name} {value}" for name, value in texts.items())


def environment(run: SavedResults) -> Context | None:
    """Return versions and machine."""
    values = run.environment
    if not values:
        return None
    packages = {"Python": values["python"], "torch": values["torch"], **values["packages"]}
    versions = {name: version for name, version in packages.items() if version}
    cores = f"{values['cores']} cores, {plural(values['threads'], 'thread')} for torch"
    machine = {
        "Date": values["date"],
        "Platform": values["platform"],
        "Processor": f"{values['cpu'] or 'not known'}; {cores}",
        "Devices": ", ".join(values["devices"]) or "only the processor",
        "Accelerator": _accelerator(values.get("accelerator") or {}),
        "Commit": values["git_commit"] or "not in a git repository",
    }
    return {"versions": versions, "machine": {key: text for key, text in machine.items() if text}}


def patched(run: SavedResults) -> Context | None:
    """Return what the patch of the model's code changes and saves, the diff, and the breaks that stay."""
    patch = run.patch
    if patch is None:
        return None
    rows = [(call.source, call.name, size(call.copied_bytes), call.breaks) for call in patch.calls]
    return {
        "sentence": patch_sentence(patch),
        "rows": rows,
        "left": patch.left[:LIMIT],
        "diff": patch.diff[:_DIFF_SHOWN],
    }


def reproduce(run: SavedResults) -> Context | None:
    """Return the command of the job, and the lines for training code."""
    if run.recipe is None and not command(run):
        return None
    return {"command": command(run), "code": training_code(run)}


SECTIONS = (
    Section("failure", "What went wrong", failed),
    Section("tune", "Recipes", tuned),
    Section("export", "Exported?", exported),
    Section("contract", "Contract", contract),
    Section("issues", "Warnings", issues),
    Section("verify", "Right?", verified),
    Section("bench", "Faster?", timed),
    Section("flow", "Layout?", layout_flow),
    Section("patch", "Patch", patched),
    Section("result", "Tensors", result),
    Section("declaration", "Declaration", declaration),
    Section("reproduce", "Reproduce", reproduce),
    Section("environment", "Environment", environment),
)


def command(run: SavedResults) -> str:
    """Return the command line of the job; empty if the record has none."""
    return shlex.join(["python", "run.py", *run.job.overrides]) if run.job else ""


def _audit_facts(audit: Audit, job: Job | None) -> list[tuple[str, str]]:
    summary = audit.summary
    dtypes = ", ".join(f"{count:,} {name}" for name, count in summary["dtypes"].items())
    devices = ", ".join(f"{count:,} on {name}" for name, count in summary["devices"].items())
    facts = [
        ("Convolutions", counts(summary["convolutions"], STATUSES)),
        ("Tensors", f"{plural(summary['tensors'], 'tensor')}: {dtypes}; {devices}"),
        ("Memory", f"{size(summary['bytes_before'])} before, {size(summary['bytes_after'])} after"),
    ]
    if text := quantized_text(audit.rows):
        facts.insert(2, ("Quantized", text))
    if summary["unregistered"]:
        facts.append(("Not registered", ", ".join(map(str, summary["unregistered"]))))
    seen = job.seen if job else None
    if seen:
        facts.append(("Example", f"{seen['given']} -> {seen['gave']}"))
        facts += [("Outputs", outputs_sentence(**counted)) for counted in seen["convolutions"]]
    return facts


def _plan_facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    memory = f"{size(summary['bytes_before'])} now, {size(summary['bytes_after'])} after"
    changes = f"{summary['to_change']:,} of {plural(summary['tensors'], 'tensor')} would change"
    return [("Planned only", changes), ("Memory", memory)]


def _reasons(rows: Iterable[AuditRow]) -> list[tuple[str, str, int, str]]:
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
    return [(*key, tensors[key], first[key]) for key in ranked[:LIMIT]]
