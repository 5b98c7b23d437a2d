"""The log file of a run, for Hydra's `job_logging`."""

from __future__ import annotations

import logging
import os
from contextlib import suppress


class LogFile(logging.FileHandler):
    """A log that its first message creates, and that is left out if it cannot be written."""

    def __init__(self, filename: str | os.PathLike[str]) -> None:
        super().__init__(filename, delay=True, encoding="utf-8", errors="backslashreplace")

    def emit(self, record: logging.LogRecord) -> None:
        """Append a message; a full disk stops neither the run nor its output."""
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  a name of logging
        """Ignore an error that `FileHandler` would print with a traceback."""
