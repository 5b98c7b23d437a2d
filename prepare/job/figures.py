"""The figures of a job as one flat mapping of plain values: for scripts and for loggers of experiments."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from prepare.export.records import ARTEFACT

if TYPE_CHECKING:
    from prepare.bench.records import Bench
    from prepare.export.records import Export
    from prepare.job.results import Analyses
    from prepare.verify.records import Verification

_CONVOLUTIONS = ("converted", "already", "skipped", "ineffective", "untouched")


def figures(results: Analyses) -> dict[str, Any]:
    """Return the figures of the analyses that ran; an analysis that did not run has no key.

    Sizes are bytes, times seconds, and `time_ratio` is the time of the prepared model relative to that of
    the unprepared one: below 1 is faster. `prepared_seconds` is that ratio times `unprepared_seconds`.
    """
    found: dict[str, Any] = {}
    if results.audit is not None:
        summary = results.audit.summary
        counts = summary["convolutions"]
        found |= {f"convolutions_{word}": counts.get(word, 0) for word in _CONVOLUTIONS}
        found |= {key: summary[key] for key in ("tensors", "bytes_before", "bytes_after")}
    if results.flow is not None:
        flow = results.flow.summary
        found |= {"flow": results.flow.status, "layout_breaks": flow["breaks"]}
        found |= {"layout_regains": flow["regains"], "copied_bytes": flow["copied_bytes"]}
        found |= {
            "convolutions_called": flow["convolutions"],
            "convolutions_kept": flow["in_layout"],
        }
    if results.verification is not None:
        found |= _verified(results.verification)
    if results.bench is not None:
        found |= _timed(results.bench)
    if results.export is not None:
        found |= _exported(results.export)
    if results.tuning is not None:
        found |= {"winner": results.tuning.winner, "tune_rounds": results.tuning.rounds}
        found["winner_time_ratio"] = _finite(results.tuning.row(results.tuning.winner).ratio)
    return found


def _exported(export: Export) -> dict[str, Any]:
    found: dict[str, Any] = {"exporter": export.exporter, "exported": export.status}
    found |= {"artefact": export.artefact, "artefact_bytes": export.bytes}
    if (worst := export.worst) is not None:
        found |= {"artefact_error": worst.error, "artefact_allowed": worst.allowed}
    if export.time is not None:
        found["artefact_time_ratio"] = _finite(export.time.row(ARTEFACT).ratio)
    return found


def _verified(verification: Verification) -> dict[str, Any]:
    found: dict[str, Any] = {"verified": verification.status}
    for name in ("outputs", "input gradients", "parameter gradients"):
        checks = [check for check in verification.checks if check.what == name]
        errors = [(error, check) for check in checks if (error := _finite(check.error)) is not None]
        if errors:
            error, worst = max(errors, key=lambda pair: pair[0])
            key = name.replace(" ", "_")
            found |= {f"{key}_error": error, f"{key}_allowed": _finite(worst.allowed)}
    return found


def _timed(bench: Bench) -> dict[str, Any]:
    case = bench.cases[0]
    row = case.row
    low, high = row.ratio_interval or (None, None)
    found: dict[str, Any] = {"timed": case.what, "verdict": row.verdict}
    found |= {"time_ratio": _finite(row.ratio), "time_ratio_low": low, "time_ratio_high": high}
    found |= {"prepared_seconds": _finite(case.seconds), "prepared_peak_bytes": row.peak_bytes}
    if case.comparison is not None:
        baseline = case.comparison.row(case.comparison.baseline)
        found |= {"unprepared_seconds": _finite(baseline.seconds)}
        found |= {"unprepared_peak_bytes": baseline.peak_bytes, "rounds": case.comparison.repeats}
    return found


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
