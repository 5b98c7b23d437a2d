"""Read the key figures of a job from its record, without torch and without its long tables.

`results.read_results` reads whole files. A sweep of a thousand rows needs a few figures of each, so
this module decodes only the head of a file that holds a row for every tensor or place.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prepare.audit import Audit, check_summary
from prepare.bench.records import Bench, Case, Comparison
from prepare.core.utils import files, json_records
from prepare.core.utils.machine import disturbance
from prepare.errors import FileError
from prepare.flow.records import Flow
from prepare.verify.records import Check, Verification

# The statuses of convolutions that tables count.
CONVOLUTIONS = ("converted", "already", "skipped", "ineffective")
# A head is a few hundred bytes; a file without a head in this many bytes is read as a whole.
_HEAD = 1 << 16
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyFigures:
    """The figures of a verification.

    `error` and `allowed` belong to the outputs, or, if these were not measured, to the check closest to its
    limit; `what` is its name. They are None if nothing was measured. `wrong` counts the checks that are
    wrong in the mode that does not decide.
    """

    status: str
    error: float | None = None
    allowed: float | None = None
    what: str = ""
    wrong: int = 0
    reason: str = ""

    @property
    def share(self) -> float | None:
        """Return the error as a fraction of what is allowed; None if there is no such number."""
        if self.error is None or not self.allowed:
            return None
        return self.error / self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowFigures:
    """The figures of a layout flow: breaks in one forward, and the bytes copied at them."""

    status: str
    breaks: int
    copied_bytes: int
    convolutions: int
    in_layout: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFigures:
    """The figures of one comparison with the unprepared model; `ratio` below 1 is faster.

    `what` is the case: inference, training step. Ratios are comparable if `where` is the same: the
    machine, its threads, and the device of the baseline. `reason` says why a verdict is `unclear` or
    nothing was compared, `busy` what disturbed the timing.
    """

    what: str
    verdict: str
    ratio: float | None
    interval: tuple[float, float] | None
    seconds: float | None
    where: str
    reason: str = ""
    busy: str = ""

    def overlaps(self, other: BenchFigures) -> bool:
        """Return whether the two intervals overlap; false if one is missing."""
        if self.interval is None or other.interval is None:
            return False
        (low, high), (other_low, other_high) = self.interval, other.interval
        return low <= other_high and other_low <= high


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The key figures of a job; None, or an empty `timed`, for each file that is missing."""

    convolutions: dict[str, int] | None = None
    bytes_before: int | None = None
    bytes_after: int | None = None
    lost: FlowFigures | None = None
    verified: VerifyFigures | None = None
    timed: tuple[BenchFigures, ...] = ()


def headline(folder: Path) -> Headline:
    """Read the key figures of the record in `folder`. Raises PrepareError for a wrong file."""
    audit = audit_summary(folder)
    counts = audit and {word: audit["convolutions"].get(word, 0) for word in CONVOLUTIONS}
    return Headline(
        convolutions=counts,
        bytes_before=audit["bytes_before"] if audit else None,
        bytes_after=audit["bytes_after"] if audit else None,
        lost=_read(folder / "flow.json", _flow_figures),
        verified=_read(folder / "verify.json", _verify_figures),
        timed=_read(folder / "bench.json", _bench_figures) or (),
    )


def audit_summary(folder: Path) -> dict[str, Any] | None:
    """Read the counts of the audit in `folder`; None if it is missing. Raises PrepareError."""
    return _read(folder / "audit.json", _audited)


def _read(path: Path, read: Callable[[Path], _T]) -> _T | None:
    """Call `read` with the file; return None if it is missing."""
    if not path.is_file():
        return None
    try:
        return read(path)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A file of another program, or of another version.
        wrong = f"does not hold what it should: {type(error).__name__}: {error}"
        raise FileError(files.printable_path(path), wrong) from error


def _head(path: Path, kind: str, table: str) -> dict[str, Any] | None:
    """Decode the part of a file before its first table; None if it is not written as our files are."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        with path.open("rb") as file:
            head, separator, _ = file.read(_HEAD).partition(table.encode())
        data = json.loads(head + table.encode() + b"]}") if separator else {}
        if data.get("format") == kind and data.get("version") == 1:
            return data
    return None


def _audited(path: Path) -> dict[str, Any]:
    data = _head(path, "prepare.audit", '"rows":[')
    summary = data["summary"] if data else Audit.load(path).summary
    check_summary(summary)
    return summary


def _flow_figures(path: Path) -> FlowFigures:
    data = _head(path, "prepare.flow", '"events": [')
    if data is None:
        flow = Flow.load(path)
        data = {"status": flow.status, "summary": flow.summary}
    keys = ("breaks", "copied_bytes", "convolutions", "in_layout")
    json_records.check_values(data, {"status": str})
    json_records.check_values(data["summary"], dict.fromkeys(keys, int))
    return FlowFigures(status=data["status"], **{key: data["summary"][key] for key in keys})


def _verify_figures(path: Path) -> VerifyFigures:
    verification = Verification.load(path)
    judged = [check for check in verification.checks if check.status not in ("wrong", "skipped")]
    measured = [check for check in judged if _finite(check.error) is not None]
    outputs = [check for check in measured if check.what == "outputs"]
    worst = max(outputs or measured, key=_excess, default=None)
    return VerifyFigures(
        status=verification.status,
        error=_finite(worst.error) if worst else None,
        allowed=_finite(worst.allowed) if worst else None,
        what=str(worst.what) if worst else "",
        wrong=sum(check.status == "wrong" for check in verification.checks),
        reason="" if verification.status == "pass" else str(verification.reason),
    )


def _excess(check: Check) -> float:
    error, allowed = float(check.error or 0.0), _finite(check.allowed)
    return error / allowed if allowed else math.inf * bool(error)


def _bench_figures(path: Path) -> tuple[BenchFigures, ...]:
    return tuple(map(_case_figures, Bench.load(path).cases))


def _case_figures(case: Case) -> BenchFigures:
    row = case.row
    low, high = map(_finite, row.ratio_interval or (None, None))
    return BenchFigures(
        what=str(case.what),
        verdict=row.verdict,
        ratio=_finite(row.ratio),
        interval=None if low is None or high is None else (low, high),
        seconds=_finite(row.seconds),
        where=_where(case.comparison) if case.comparison else "",
        reason=str(row.reason),
        busy=disturbance(case.comparison.settings) if case.comparison else "",
    )


def _where(comparison: Comparison) -> str:
    """Describe the machine, what torch uses of it, and the device of the baseline."""
    env, settings = comparison.environment, comparison.settings
    rows = (row for row in comparison.rows if row.name == comparison.baseline)
    baseline = next((row.device for row in rows), "")
    parts = [env.get("cpu"), env.get("platform"), *(env.get("devices") or [])]
    parts += [f"torch {env.get('torch')}", f"{settings.get('threads')} threads"]
    # Each row is compared with the unprepared model under the same autocast.
    amp = settings.get("amp", "none")
    parts.append("" if amp == "none" else f"autocast to {amp}")
    return "; ".join(str(part) for part in [*parts, f"baseline on {baseline}"] if part)


def _finite(value: Any) -> float | None:
    """Return a number that JSON can hold, or None."""
    return float(value) if value is not None and math.isfinite(value) else None
