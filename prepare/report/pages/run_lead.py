"""The part of a run's page below the answers: what was done, and the code that does it again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from prepare import recipe
from prepare.core.document import Charts, Text
from prepare.core.utils.text import size
from prepare.errors import PrepareError
from prepare.report.charts.chart import figure
from prepare.report.render import render
from prepare.report.run_documents import training_code
from prepare.report.sentences import convolutions_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from prepare.core.document import Document
    from prepare.job.results import SavedResults


def run_lead(run: SavedResults, documents: Iterable[Document]) -> str:
    """Return the part as markup; empty for a run that prepared nothing."""
    if run.audit is None:
        return ""
    facts = [("Steps", steps_text(_steps(run)))]
    amp = run.result.amp if run.result is not None else "none"
    if amp != "none":
        facts.append(("Autocast", f"every forward in {amp}"))
    summary = run.audit.summary
    facts.append(("Convolutions", convolutions_text(summary["convolutions"], _steps(run))))
    before, after = summary["bytes_before"], summary["bytes_after"]
    facts.append(("Memory", f"{size(before)} before, {size(after)} after"))
    seen = run.job.seen if run.job else None
    if seen:
        facts.append(("Example", f"{seen['given']} -> {seen['gave']}"))
    lead = [part for document in documents for part in document.lead]
    charts = [chart for part in lead if isinstance(part, Charts) for chart in part.charts]
    pictures = [(chart.title, figure(chart, name="lead")) for chart in charts]
    advice = " ".join(part.text for part in lead if isinstance(part, Text))
    # Code for a model that computes something else is not worth a place on the first screen.
    wrong = run.result is not None and run.result.status == "verification_failed"
    code = "" if wrong else training_code(run)
    text = render("run_lead.html", facts=facts, code=code, pictures=pictures, advice=advice)
    return Markup(text)  # noqa: S704  rendered with escaping


def steps_text(steps: Mapping[str, Mapping[str, Any] | None]) -> str:
    """Return each step with the value of its first option: `device cpu, half bfloat16`."""
    texts = (f"{name} {_first(options)}".strip() for name, options in steps.items())
    return ", ".join(texts) or "no step"


def day(run: SavedResults) -> str:
    """Return day and minute of the run: `2026-11-24 06:55`; empty if not known."""
    date = str((run.environment or {}).get("date") or "")
    return date[:16].replace("T", " ")


def _steps(run: SavedResults) -> Mapping[str, Mapping[str, Any] | None]:
    try:
        return recipe.loads(run.recipe) if run.recipe is not None else {}
    except PrepareError:
        return {}


def _first(options: Mapping[str, Any] | None) -> str:
    value = next(iter((options or {}).values()), "")
    return value if isinstance(value, str) else ""
