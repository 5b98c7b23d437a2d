"""The layout section of a job's page: causes, strips, the module tree and its tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prepare.core.utils.text import size
from prepare.flow.causes import layout_causes
from prepare.report.charts.flow_picture import flow_figure, flow_legend, flow_strip
from prepare.report.charts.flow_text import times
from prepare.report.pages.run_tables import convolution_table, copy_table, event_table
from prepare.report.sentences import flow_sentence

if TYPE_CHECKING:
    from prepare.flow.records import Flow
    from prepare.job.results import SavedResults


def layout_flow(run: SavedResults) -> dict[str, Any] | None:
    """Return the causes, the pictures and the tables; two pictures if the record has a flow from before."""
    if not run.flow:
        return None
    flow, before = run.flow, run.flow_before
    figures = [("After the repairs" if before else "", "flow", flow, before)]
    if before:
        figures.insert(0, ("Before the repairs", "flow-before", before, flow))
    return {
        "wanted": flow.wanted,
        "mode": flow.mode,
        "strips": [
            (label, flow_sentence(shown), flow_strip(shown, name=f"{name}-strip"))
            for label, name, shown, _ in figures
        ],
        "legend": flow_legend([shown for _, _, shown, _ in figures]),
        "trees": [
            (label, flow_figure(shown, name=name, beside=other))
            for label, name, shown, other in figures
        ],
        "modules": len(flow.modules),
        "compared": _compared(before, flow) if before else [],
        "causes": [row for label, _, shown, _ in figures for row in _causes(shown, label)],
        "events": event_table(flow),
        "copies": copy_table(flow),
        "convolutions": convolution_table(flow),
        "backends": _backends(flow),
        "notes": flow.notes,
    }


def _causes(flow: Flow, label: str) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield cause, how often, bytes at the breaks, bytes to bring the layout back, and first module."""
    for phase in ("forward", "backward"):
        for cause in layout_causes(flow, phase):
            when = ", ".join(filter(None, (label.lower(), phase if phase != "forward" else "")))
            copied, regained = (
                size(count) if count else "" for count in (cause.copied, cause.regained)
            )
            name = f"{cause.name}, {when}" if when else cause.name
            lost = times(cause.count) if cause.count else "copied only"
            yield name, lost, copied, regained, cause.first or "the model itself"


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
