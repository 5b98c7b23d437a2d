"""The sections of a run's page: each is a function from what the run left to what its template shows."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prepare.audit.rows import STATUSES, Row
from prepare.core.utils.text import counts, plural, size
from prepare.report.charts.flow_picture import flow_figure
from prepare.report.charts.flow_text import times
from prepare.report.pages.bench_section import timed
from prepare.report.pages.long_table import LIMIT
from prepare.report.pages.run_tables import convolution_table, copy_table, event_table, tensor_table
from prepare.report.pages.tune_section import tuned
from prepare.report.sentences import factor, flow_sentence, verify_sentence

if TYPE_CHECKING:
    from prepare.flow.records import Flow
    from prepare.job.results import SavedResults

Context = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """One part of a page: its anchor and the name of its template, its title, what it shows.

    `context` gives None where the run left nothing for it; then the section is left out.
    """

    name: str
    title: str
    context: Callable[[SavedResults], Context | None]


def declared(run: SavedResults) -> Context | None:
    """The command, the choices in each group, and the recipe that came of it."""
    if not run.job and run.recipe is None and not run.plan:
        return None
    choices = {key: value for key, value in (run.job.choices if run.job else {}).items() if value}
    return {
        "command": command(run),
        "choices": choices,
        "recipe": run.recipe,
        "steps": run.plan["steps"] if run.plan and run.recipe is None else {},
    }


def happened(run: SavedResults) -> Context | None:
    """How the run ended, what the audit counts, and every tensor with its status."""
    if not run.result and not run.audit and not run.plan:
        return None
    shown: Context = {"result": run.result, "facts": [], "statuses": {}}
    shown |= {"skipped": [], "tensors": None}
    if run.audit:
        shown["facts"] = _audit_facts(run)
        shown["statuses"] = {word: run.audit.summary["status"].get(word, 0) for word in STATUSES}
        shown["skipped"] = _reasons(run.audit.rows)
        shown["tensors"] = tensor_table(run.audit.rows)
    elif run.plan:
        shown["facts"] = _plan_facts(run.plan["summary"])
    return shown


def layout_flow(run: SavedResults) -> Context | None:
    """The picture, and everything in it as tables; two pictures where there is a flow from before."""
    if not run.flow:
        return None
    flow, before = run.flow, run.flow_before
    named = [("Before", "flow-before", before, flow), ("After", "flow", flow, before)]
    pictures = [
        (label if before else "", flow_sentence(one), flow_figure(one, name=name, beside=other))
        for label, name, one, other in named
        if one
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
    """Whether outputs and gradients are those of the unprepared model, and what casts lost."""
    found = run.verification
    if found is None:
        return None
    return {
        "sentence": verify_sentence(found),
        "culprit": found.culprit,
        "advice": found.advice,
        "checks": found.checks,
        "lost": found.lost[:LIMIT],
    }


def warned(run: SavedResults) -> Context | None:
    """What is known to go wrong, or slowly, with this model on this device."""
    plan = run.plan or {}
    problems, warnings = plan.get("problems", []), plan.get("warnings", [])
    return {"problems": problems, "warnings": warnings} if problems or warnings else None


def environment(run: SavedResults) -> Context | None:
    """Where it ran."""
    found = run.environment
    if not found:
        return None
    known = {"Python": found["python"], "torch": found["torch"], **found["packages"]}
    versions = {key: value for key, value in known.items() if value}
    cores = f"{found['cores']} cores, {plural(found['threads'], 'thread')} for torch"
    machine = {
        "Date": found["date"],
        "Platform": found["platform"],
        "Processor": f"{found['cpu'] or 'not known'}; {cores}",
        "Devices": ", ".join(found["devices"]) or "none besides the processor",
        "Commit": found["git_commit"] or "not in a git repository",
    }
    return {"versions": versions, "machine": machine}


def again(run: SavedResults) -> Context | None:
    """The same on the command line, and in training code."""
    if run.recipe is None and not command(run):
        return None
    return {"command": command(run), "recipe": run.recipe is not None}


SECTIONS = (
    Section("declared", "What was declared", declared),
    Section("tune", "Which recipe is best here", tuned),
    Section("happened", "What happened", happened),
    Section("flow", "Where the layout goes", layout_flow),
    Section("verify", "Is it still right", verified),
    Section("bench", "Is it faster", timed),
    Section("warned", "Known issues and warnings", warned),
    Section("environment", "Where it ran", environment),
    Section("again", "Do it again", again),
)


def tiles(run: SavedResults) -> list[tuple[str, str, str]]:
    """The figures at the top of the page: (what, how much, a word more)."""
    found = []
    if run.audit:
        summary = run.audit.summary
        converted = summary["convolutions"]
        lies = converted["converted"] + converted["already"]
        total = sum(converted.values())
        found.append(("Convolutions as wanted", f"{lies:,} of {total:,}", _left(converted)))
        memory = f"{size(summary['bytes_before'])} before"
        found.append(("Memory of the tensors", size(summary["bytes_after"]), memory))
    if run.flow:
        summary = run.flow.summary
        causes = ", ".join(f"{word} {count:,}" for word, count in summary["by_cause"].items())
        found.append(("Layout lost", times(summary["breaks"]), causes or "from end to end kept"))
        copied = size(summary["copied_bytes"])
        found.append(("Copied because of layouts", copied, "in each forward"))
    if run.bench and run.bench.headline.ratio is not None:
        row = run.bench.headline
        said = f"of the unprepared model's: {row.verdict}"
        found.append((f"Time of one {run.bench.cases[0].what}", factor(row.ratio), said))
    if run.result:
        found.append(("Time", f"{run.result.seconds:,.1f} s", "the whole run"))
    return found


def command(run: SavedResults) -> str:
    """The line that does this run again; empty where the run did not come so far as to say."""
    return shlex.join(["python", "run.py", *run.job.overrides]) if run.job else ""


def _audit_facts(run: SavedResults) -> list[tuple[str, str]]:
    summary = run.audit.summary
    dtypes = ", ".join(f"{count:,} {name}" for name, count in summary["dtypes"].items())
    devices = ", ".join(f"{count:,} on {name}" for name, count in summary["devices"].items())
    facts = [
        ("Convolutions", counts(summary["convolutions"], STATUSES)),
        ("Tensors", f"{plural(summary['tensors'], 'tensor')}: {dtypes}; {devices}"),
        ("Memory", f"{size(summary['bytes_before'])} before, {size(summary['bytes_after'])} after"),
    ]
    if summary["unregistered"]:
        facts.append(("Not registered", ", ".join(map(str, summary["unregistered"]))))
    seen = run.job.seen if run.job else None
    if seen:
        facts.append(("Example", f"{seen['given']} gave {seen['gave']}"))
        facts += [("Seen in it", _seen(one)) for one in seen["convolutions"]]
    return facts


def _seen(one: dict[str, Any]) -> str:
    text = f"{one['gave']} of {plural(one['of'], 'convolution')} gave {one['format']}"
    also = f"; {one['ambiguous']} of them can be read as another" if one["ambiguous"] else ""
    return text + also


def _plan_facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    memory = f"{size(summary['bytes_before'])} now, {size(summary['bytes_after'])} then"
    changes = f"{summary['to_change']:,} of {plural(summary['tensors'], 'tensor')} would change"
    return [("Planned only", changes), ("Memory", memory)]


def _reasons(rows: Iterable[Row]) -> list[tuple[str, str, int, str]]:
    """(status, reason, how many tensors, the first of them), the worst first."""
    first: dict[tuple[str, str], str] = {}
    times: Counter[tuple[str, str]] = Counter()
    for row in rows:
        if row.reason:
            # Of tied tensors the reason names the place; the table of every tensor has that too.
            key = row.status, row.reason.partition(" (as ")[0]
            first.setdefault(key, row.path)
            times[key] += 1
    ranked = sorted(first, key=lambda key: STATUSES.index(key[0]))
    return [(*key, times[key], first[key]) for key in ranked[:LIMIT]]


def _compared(before: Flow, after: Flow) -> list[tuple[str, str, str]]:
    def figures(flow: Flow) -> list[str]:
        found = flow.summary
        gave = f"{found['in_layout']:,} of {found['convolutions']:,}"
        lost = [f"{found['breaks']:,}", f"{found['regains']:,}"]
        return [*lost, size(found["copied_bytes"]), gave]

    titles = ["Layout lost", "Regained", "Copied per forward", "Convolutions in the layout"]
    return list(zip(titles, figures(before), figures(after), strict=True))


def _backends(flow: Flow) -> list[tuple[str, int, int]]:
    """(backend, convolutions, calls)."""
    modules: dict[str, set[str]] = {}
    calls: Counter[str] = Counter()
    for row in flow.convolutions:
        modules.setdefault(row.backend, set()).add(row.module)
        calls[row.backend] += row.calls
    return [(name, len(modules[name]), count) for name, count in calls.most_common()]


def _left(found: dict[str, int]) -> str:
    left = [f"{found[word]:,} {word}" for word in ("ineffective", "skipped") if found[word]]
    if found["untouched"]:
        left.append(f"{found['untouched']:,} untouched")
    return ", ".join(left) or "none left out"
