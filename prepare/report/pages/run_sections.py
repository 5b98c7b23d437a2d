"""The sections of a job's page: each function returns the context of its template."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from prepare.audit.rows import STATUSES, AuditRow
from prepare.core.utils.text import counts, plural, size
from prepare.report.charts.flow_picture import flow_figure
from prepare.report.charts.flow_text import times
from prepare.report.pages.bench_section import timed
from prepare.report.pages.long_table import LIMIT
from prepare.report.pages.run_tables import convolution_table, copy_table, event_table, tensor_table
from prepare.report.pages.tune_section import tuned
from prepare.report.sentences import factor, flow_sentence, outputs_sentence, verify_sentence

if TYPE_CHECKING:
    from prepare.audit import Audit
    from prepare.flow.records import Flow
    from prepare.job.record import Job
    from prepare.job.results import SavedResults

Context = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Section(Generic[T]):
    """A part of a page: `name` is its anchor and its template; `context` takes the record.

    `context` returns None if the record has no data for the section; the page leaves it out.
    """

    name: str
    title: str
    context: Callable[[T], Context | None]


def declaration(run: SavedResults) -> Context | None:
    """Return the command, the choice of each group, and the resolved recipe."""
    if not run.job and run.recipe is None and not run.plan:
        return None
    choices = {key: value for key, value in (run.job.choices if run.job else {}).items() if value}
    return {
        "command": command(run),
        "choices": choices,
        "recipe": run.recipe,
        "steps": run.plan["steps"] if run.plan and run.recipe is None else {},
    }


def result(run: SavedResults) -> Context | None:
    """Return the result, the counts of the audit, and every tensor with its status."""
    if not run.result and not run.audit and not run.plan:
        return None
    context: Context = {"result": run.result, "facts": [], "statuses": {}}
    context |= {"skipped": [], "tensors": None}
    if run.audit:
        counted = run.audit.summary["status"]
        context["facts"] = _audit_facts(run.audit, run.job)
        context["statuses"] = {status: counted.get(status, 0) for status in STATUSES}
        context["skipped"] = _reasons(run.audit.rows)
        context["tensors"] = tensor_table(run.audit.rows)
    elif run.plan:
        context["facts"] = _plan_facts(run.plan["summary"])
    return context


def layout_flow(run: SavedResults) -> Context | None:
    """Return the picture and its tables; two pictures if the record has a flow from before."""
    if not run.flow:
        return None
    flow, before = run.flow, run.flow_before
    figures = [("After" if before else "", "flow", flow, before)]
    if before:
        figures.insert(0, ("Before", "flow-before", before, flow))
    pictures = [
        (label, flow_sentence(shown), flow_figure(shown, name=name, beside=other))
        for label, name, shown, other in figures
    ]
    return {
        "wanted": flow.wanted,
        "mode": flow.mode,
        "pictures": pictures,
        "compared": _compared(before, flow) if before else [],
        "causes": flow.summary["by_cause"],
        "events": event_table(flow),
        "copies": copy_table(flow),
        "convolutions": convolution_table(flow),
        "backends": _backends(flow),
        "notes": flow.notes,
    }


def verified(run: SavedResults) -> Context | None:
    """Return the verification of outputs and gradients, and the losses of casts."""
    verification = run.verification
    if verification is None:
        return None
    return {
        "sentence": verify_sentence(verification),
        "culprit": verification.culprit,
        "advice": verification.advice,
        "checks": verification.checks,
        "lost": verification.lost[:LIMIT],
    }


def issues(run: SavedResults) -> Context | None:
    """Return the known problems of this model on this device."""
    plan = run.plan or {}
    problems, warnings = plan.get("problems", []), plan.get("warnings", [])
    return {"problems": problems, "warnings": warnings} if problems or warnings else None


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
        "Commit": values["git_commit"] or "not in a git repository",
    }
    return {"versions": versions, "machine": machine}


def reproduce(run: SavedResults) -> Context | None:
    """Return the command of the job, and whether there is a recipe for training code."""
    if run.recipe is None and not command(run):
        return None
    return {"command": command(run), "recipe": run.recipe is not None}


SECTIONS = (
    Section("declaration", "Declaration", declaration),
    Section("tune", "Tuning", tuned),
    Section("result", "Result", result),
    Section("flow", "Layout flow", layout_flow),
    Section("verify", "Verification", verified),
    Section("bench", "Timing", timed),
    Section("issues", "Known issues and warnings", issues),
    Section("environment", "Environment", environment),
    Section("reproduce", "Reproduce", reproduce),
)


def tiles(run: SavedResults) -> list[tuple[str, str, str]]:
    """Return the figures at the top of the page: (title, figure, remark)."""
    figures = []
    if run.audit:
        summary = run.audit.summary
        converted = summary["convolutions"]
        wanted = converted["converted"] + converted["already"]
        total = sum(converted.values())
        figures.append(
            ("Convolutions in the wanted layout", f"{wanted:,} of {total:,}", _others(converted))
        )
        memory = f"{size(summary['bytes_before'])} before"
        figures.append(("Memory of the tensors", size(summary["bytes_after"]), memory))
    if run.flow:
        summary = run.flow.summary
        causes = ", ".join(f"{word} {count:,}" for word, count in summary["by_cause"].items())
        figures.append(("Layout lost", times(summary["breaks"]), causes or "kept throughout"))
        copied = size(summary["copied_bytes"])
        figures.append(("Copied because of layouts", copied, "in each forward"))
    row = run.bench.headline if run.bench else None
    if run.bench and row and row.ratio is not None:
        remark = f"of the unprepared model's: {row.verdict}"
        figures.append((f"Time of one {run.bench.cases[0].what}", factor(row.ratio), remark))
    if run.result:
        figures.append(("Total time", f"{run.result.seconds:,.1f} s", "of the job"))
    return figures


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


def _compared(before: Flow, after: Flow) -> list[tuple[str, str, str]]:
    def figures(flow: Flow) -> list[str]:
        summary = flow.summary
        convolutions = f"{summary['in_layout']:,} of {summary['convolutions']:,}"
        events = [f"{summary['breaks']:,}", f"{summary['regains']:,}"]
        return [*events, size(summary["copied_bytes"]), convolutions]

    titles = ["Layout lost", "Regained", "Copied per forward", "Convolutions in the layout"]
    return list(zip(titles, figures(before), figures(after), strict=True))


def _backends(flow: Flow) -> list[tuple[str, int, int]]:
    """Return (backend, number of convolutions, number of calls)."""
    modules: dict[str, set[str]] = {}
    calls: Counter[str] = Counter()
    for row in flow.convolutions:
        modules.setdefault(row.backend, set()).add(row.module)
        calls[row.backend] += row.calls
    return [(name, len(modules[name]), count) for name, count in calls.most_common()]


def _others(convolutions: dict[str, int]) -> str:
    statuses = ("ineffective", "skipped", "untouched")
    others = [f"{convolutions[status]:,} {status}" for status in statuses if convolutions[status]]
    return ", ".join(others) or "all of them"
