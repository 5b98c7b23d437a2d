"""Write the page and the pictures of a job that has ended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prepare.job.outcome import Outcome


def get_ready() -> None:
    """Import what `write_pages` needs, in a process that is forked for every job of a sweep."""
    from prepare.report import render
    from prepare.report.charts import flow_picture  # noqa: F401
    from prepare.report.pages import bench_section, page, tune_section  # noqa: F401

    render.load_templates()


def write_pages(outcome: Outcome, folder: Path) -> None:
    """Write `flow.svg`, `bench.svg`, `tune.svg` and `report.html` of a job.

    Of a job that failed, write only `report.html`. Call it
    before the job writes its result. Raises FileError.
    """
    # Jinja is slow to import.
    from prepare.report.pages.page import write_page

    if outcome.results is None:
        write_page(folder, result=outcome.result)
        return
    from prepare.report.charts.chart import write_charts
    from prepare.report.charts.flow_picture import write_flow_svg
    from prepare.report.pages.bench_section import bench_charts
    from prepare.report.pages.tune_section import tune_charts

    if outcome.results.flow is not None:
        write_flow_svg(outcome.results.flow, folder / "flow.svg")
    if outcome.results.bench is not None:
        charts = bench_charts(outcome.results.bench, outcome.results.verification)
        write_charts(charts, folder / "bench.svg")
    if outcome.results.tuning is not None:
        write_charts(tune_charts(outcome.results.tuning), folder / "tune.svg")
    write_page(folder, result=outcome.result)
