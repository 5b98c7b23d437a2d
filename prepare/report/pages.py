"""What is written for people when a run has ended: its page, and the picture of its layout flow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prepare.outcome import Outcome


def write_pages(outcome: Outcome, folder: Path) -> None:
    """Writes `flow.svg` and `report.html` of a run that went well, before its result. Raises FileError."""
    if outcome.facts is None:
        return
    # Neither is needed where a run fails, and Jinja takes a moment to load.
    from prepare.report.flow_picture import write_flow_svg
    from prepare.report.page import write_page

    if outcome.facts.flow is not None:
        write_flow_svg(outcome.facts.flow, folder / "flow.svg")
    write_page(folder, result=outcome.result)
