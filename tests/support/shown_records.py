"""Show the record of a stage as the terminal does."""

from prepare.app.report.terminal.document import show_document
from prepare.core.document import ReportContext
from prepare.stages.registry import STAGES


def show(stage, record, folder=""):
    """Print the record that the run of `stage` leaves, in a run's `folder`."""
    show_document(STAGES[stage].document(ReportContext(found={stage: record}, folder=folder)))
