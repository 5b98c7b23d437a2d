"""Write the page of a run that has ended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prepare.app.job.outcome import Outcome


def write_pages(outcome: Outcome, folder: Path) -> None:
    """Write the page of a run, before the run writes its result. Raises FileError."""
    # Jinja is slow to import.
    from prepare.app.report.pages.page import write_page

    write_page(folder, result=outcome.result)
