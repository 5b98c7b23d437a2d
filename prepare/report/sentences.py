"""The figures of a run in a few words each: for the table of a sweep, its page, and what differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prepare.core.utils.text import size

if TYPE_CHECKING:
    from prepare.job.headline import Headline, Timed, Verified


def memory_words(found: Headline) -> str:
    """`5.4 MiB`, or `5.4 -> 2.7 MiB` where it changed; empty where it is not known."""
    before, after = found.bytes_before, found.bytes_after
    if before is None or after is None:
        return ""
    if before == after:
        return size(after)
    figure, _, unit = size(before).partition(" ")
    after_figure, _, after_unit = size(after).partition(" ")
    same = unit == after_unit
    return f"{figure}{'' if same else f' {unit}'} -> {after_figure} {after_unit}"


def verified_words(found: Verified | None) -> str:
    """`pass 3.1e-05`: the status and the largest error that counts, if judged; what else is wrong is told."""
    if found is None:
        return ""
    judged = found.error is not None and found.status != "cannot tell"
    error = f" {found.error:.2g}" if judged else ""
    # Gradients, where the run is for inference.
    return found.status + error + (", wrong in training" if found.wrong else "")


def ratio_words(found: Timed | None) -> str:
    """`0.512`, of the time of the unprepared model."""
    return "" if found is None or found.ratio is None else f"{found.ratio:.3f}"


def interval_words(found: Timed | None) -> str:
    """`0.490 to 0.530`."""
    known = found is not None and found.interval is not None
    return "{:.3f} to {:.3f}".format(*found.interval) if known else ""


def time_words(found: Timed) -> str:
    """All of it: `0.512 (0.490 to 0.530), faster`."""
    interval = interval_words(found)
    parts = [ratio_words(found) + (f" ({interval})" if interval else ""), found.verdict]
    return ", ".join(filter(None, parts))
