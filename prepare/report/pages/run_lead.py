"""The part of a job's page below the answers: what was done, and the code that does it again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from markupsafe import Markup

from prepare import recipe
from prepare.core.charts import Bars, Chart
from prepare.core.utils.text import size
from prepare.errors import PrepareError
from prepare.report.charts.chart import figure
from prepare.report.pages.tune_section import FIRST_BARS, tune_charts
from prepare.report.render import render
from prepare.report.sentences import convolutions_text
from prepare.report.training_code import training_code as code_for_recipe

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from prepare.job.results import SavedResults


def run_lead(run: SavedResults) -> str:
    """Return the part as markup; empty for a job that prepared nothing."""
    if run.audit is None:
        return ""
    facts = [("Steps", steps_text(_steps(run)))]
    amp = _amp(run)
    if amp != "none":
        facts.append(("Autocast", f"every forward in {amp}"))
    summary = run.audit.summary
    facts.append(("Convolutions", convolutions_text(summary["convolutions"], _steps(run))))
    before, after = summary["bytes_before"], summary["bytes_after"]
    facts.append(("Memory", f"{size(before)} before, {size(after)} after"))
    seen = run.job.seen if run.job else None
    if seen:
        facts.append(("Example", f"{seen['given']} -> {seen['gave']}"))
    charts = tune_charts(run.tuning)[:1] if run.tuning is not None else []
    pictures = [(chart.title, figure(_first_bars(chart), name="lead")) for chart in charts]
    wrong = run.verification if run.verification and run.verification.status == "fail" else None
    # Code for a model that computes something else is not worth a place on the first screen.
    code = "" if wrong else training_code(run)
    advice = wrong.advice if wrong else ""
    text = render("run_lead.html", facts=facts, code=code, pictures=pictures, advice=advice)
    return Markup(text)  # noqa: S704  rendered with escaping


def _first_bars(chart: Chart) -> Chart:
    """Return the chart with as many bars as fit on the first screen."""
    return replace(chart, rows=chart.rows[:FIRST_BARS]) if isinstance(chart, Bars) else chart


def training_code(run: SavedResults) -> str:
    """Return the lines that apply the recipe in training code; empty without a recipe."""
    return code_for_recipe(run.plan, _amp(run)) if run.recipe is not None else ""


def _amp(run: SavedResults) -> str:
    return run.result.amp if run.result is not None else "none"


def steps_text(steps: Mapping[str, Mapping[str, Any] | None]) -> str:
    """Return each step with the value of its first option: `device cpu, half bfloat16`."""
    texts = (f"{name} {_first(options)}".strip() for name, options in steps.items())
    return ", ".join(texts) or "no step"


def day(run: SavedResults) -> str:
    """Return day and minute of the job: `2026-11-24 06:55`; empty if not known."""
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
