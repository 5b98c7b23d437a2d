"""The log file of a run, for Hydra's `job_logging`."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from prepare.core.utils.files import open_unlinked
from prepare.core.utils.text import printable

if TYPE_CHECKING:
    import os


class LogFile(logging.FileHandler):
    """A log that its first message creates, and that is left out if it cannot be written.

    Its lines hold no control characters, so that a terminal can show it; it does not follow links.
    """

    def __init__(self, filename: str | os.PathLike[str]) -> None:
        super().__init__(filename, delay=True, encoding="utf-8", errors="backslashreplace")

    def _open(self) -> Any:
        return open(
            self.baseFilename,
            self.mode,
            encoding=self.encoding,
            errors=self.errors,
            opener=open_unlinked,
        )

    def format(self, record: logging.LogRecord) -> str:
        """Return the message with control characters escaped, line by line."""
        return "\n".join(map(printable, super().format(record).splitlines()))

    def emit(self, record: logging.LogRecord) -> None:
        """Append a message; a full disk stops neither the run nor its output."""
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  a name of logging
        """Ignore an error that `FileHandler` would print with a traceback."""
