"""Write the page and the pictures of a run that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from prepare.app.job.outcome import Outcome


def get_ready() -> None:
    """Import what `write_pages` needs, in a process that is forked for every job of a sweep."""
    from prepare.app.report import render
    from prepare.app.report.pages import page  # noqa: F401

    render.load_templates()


def write_pages(outcome: Outcome, folder: Path) -> None:
    """Write the pictures and the page of a run; of one that failed, the page only.

    Call it before the run writes its result. Raises FileError.
    """
    # Jinja is slow to import.
    from prepare.app.report.pages.page import write_page

    if outcome.results is not None:
        from prepare.app.report.charts import write_charts
        from prepare.app.report.documents import shown_of, stage_documents
        from prepare.app.report.render import render
        from prepare.core.document import Charts, Strip
        from prepare.core.utils import files

        for document in stage_documents(shown_of(outcome.results)):
            for part in document.parts():
                if isinstance(part, Charts) and part.file:
                    write_charts(part.charts, folder / part.file)
                elif isinstance(part, Strip) and part.file:
                    text = render("strip.svg", strip=part, picture=document.name, alone=True)
                    files.write_text(folder / part.file, text)
    write_page(folder, result=outcome.result)
