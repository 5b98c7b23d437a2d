"""The figures of a job as one flat mapping of plain values: for scripts and for loggers of experiments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prepare.registry import ordered_stages

if TYPE_CHECKING:
    from prepare.job.results import Analyses

_CONVOLUTIONS = ("converted", "already", "skipped", "ineffective", "untouched")


def figures(results: Analyses) -> dict[str, Any]:
    """Return the figures of the audit and of each stage that ran; one that did not run has no key.

    Sizes are bytes, times seconds, and `time_ratio` is the time of the prepared model relative to that of
    the unprepared one: below 1 is faster. `prepared_seconds` is that ratio times `unprepared_seconds`.
    """
    found: dict[str, Any] = {}
    if results.audit is not None:
        summary = results.audit.summary
        counts = summary["convolutions"]
        found |= {f"convolutions_{word}": counts.get(word, 0) for word in _CONVOLUTIONS}
        found |= {key: summary[key] for key in ("tensors", "bytes_before", "bytes_after")}
    for cls in ordered_stages():
        found |= cls.figures(results.found)
    return found
