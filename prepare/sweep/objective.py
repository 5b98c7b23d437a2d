"""Return the figure of a job that a sweeper minimizes."""

from __future__ import annotations

from math import inf
from pathlib import Path

from prepare.errors import PrepareError
from prepare.job.headline import headline
from prepare.job.record import Record


def objective(optimize: str, folder: Path) -> float | None:
    """Return the figure that `optimize` names, from the record in `folder`; None for `none`.

    `time` is the time relative to the unprepared model, `error` the largest error of the verification,
    `memory` the bytes of the prepared model. A job that did not succeed has an infinite figure.
    """
    if optimize == "none":
        return None
    try:
        result = Record(folder).result()
    except PrepareError:
        return inf
    if result is None or result.status != "ok":
        return inf
    figures = headline(result.figures)
    values = {
        "time": figures.timed[0].ratio if figures.timed else None,
        "error": figures.verified.error if figures.verified else None,
        "memory": figures.bytes_after,
    }
    value = values[optimize]
    return inf if value is None else float(value)
