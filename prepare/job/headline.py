"""What a run found, in a few figures: read from its files without torch, and without their long tables."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prepare.audit import Audit
from prepare.bench.records import Bench, Case, Comparison
from prepare.core.utils import files
from prepare.errors import FileError
from prepare.flow.records import Flow
from prepare.verify.records import Verification

# The counts of an audit that a table shows of its convolutions.
CONVOLUTIONS = ("converted", "already", "skipped", "ineffective")
# A head is a few hundred bytes; a file that has none in so many is read as a whole.
_HEAD = 1 << 16
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A verification: its status, its largest error that counts, and how many checks were wrong.

    `error` and `allowed` are those of the check with the largest error, `what` says which that is;
    None where nothing was measured. `wrong` counts what is wrong in a mode in which it does not count.
    """

    status: str
    error: float | None = None
    allowed: float | None = None
    what: str = ""
    wrong: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A layout flow: how often the layout is lost in one forward, and the bytes copied for that."""

    status: str
    breaks: int
    copied_bytes: int
    convolutions: int
    in_layout: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One comparison of the prepared model with the unprepared one; `ratio` below 1 is faster.

    `what` was timed: inference, training step. Ratios may be compared where `where` is the same: that is
    the machine, its threads, and the device of the baseline.
    """

    what: str
    verdict: str
    ratio: float | None
    interval: tuple[float, float] | None
    seconds: float | None
    where: str
    reason: str = ""

    def meets(self, other: Timed) -> bool:
        """Whether the intervals of the two have a ratio in common; false where one has none."""
        one, two = self.interval, other.interval
        return bool(one and two) and one[0] <= two[1] and two[0] <= one[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """What a run's files add up to; None, or nothing in `timed`, for each that is not there."""

    convolutions: dict[str, int] | None = None
    bytes_before: int | None = None
    bytes_after: int | None = None
    lost: Lost | None = None
    verified: Verified | None = None
    timed: tuple[Timed, ...] = ()


def headline(folder: Path) -> Headline:
    """The figures of the run in `folder`. Raises PrepareError for a file that is not what it should be."""
    audit = audit_summary(folder)
    return Headline(
        convolutions=audit and {word: audit["convolutions"].get(word, 0) for word in CONVOLUTIONS},
        bytes_before=audit and audit["bytes_before"],
        bytes_after=audit and audit["bytes_after"],
        lost=_of(folder / "flow.json", _lost),
        verified=_of(folder / "verify.json", _verified),
        timed=_of(folder / "bench.json", _timed) or (),
    )


def audit_summary(folder: Path) -> dict[str, Any] | None:
    """The counts of the audit in `folder`; None where there is none. Raises PrepareError."""
    return _of(folder / "audit.json", _audited)


def _of(path: Path, read: Callable[[Path], _T]) -> _T | None:
    """What `read` makes of the file; None where there is none."""
    if not path.is_file():
        return None
    try:
        return read(path)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Another hand's file, or one of another version.
        wrong = f"does not hold what it should: {type(error).__name__}: {error}"
        raise FileError(files.printable_path(path), wrong) from error


def _head(path: Path, kind: str, table: str) -> dict[str, Any] | None:
    """What stands before the first table of a file of ours; None where it is not written as ours are.

    Tables have a row for every tensor or place: a sweep of a thousand rows is not to read them.
    """
    with contextlib.suppress(OSError, ValueError, RecursionError):
        with path.open("rb") as file:
            head, found, _ = file.read(_HEAD).partition(table.encode())
        data = json.loads(head + table.encode() + b"]}") if found else {}
        if data.get("format") == kind and data.get("version") == 1:
            return data
    return None


def _audited(path: Path) -> dict[str, Any]:
    data = _head(path, "prepare.audit", '"rows":[')
    found = data["summary"] if data else Audit.load(path).summary
    counted = {str(word): int(count) for word, count in found["convolutions"].items()}
    sizes = {key: int(found[key]) for key in ("bytes_before", "bytes_after")}
    return {**found, "convolutions": counted, **sizes}


def _lost(path: Path) -> Lost:
    data = _head(path, "prepare.flow", '"events": [')
    if data is None:
        flow = Flow.load(path)
        data = {"status": flow.status, "summary": flow.summary}
    keys = ("breaks", "copied_bytes", "convolutions", "in_layout")
    return Lost(status=str(data["status"]), **{key: int(data["summary"][key]) for key in keys})


def _verified(path: Path) -> Verified:
    found = Verification.load(path)
    checks = [check for check in found.checks if check.status not in ("wrong", "skipped")]
    measured = [check for check in checks if _finite(check.error) is not None]
    worst = max(measured, key=lambda check: check.error, default=None)
    return Verified(
        status=found.status,
        error=worst and _finite(worst.error),
        allowed=worst and _finite(worst.allowed),
        what=str(worst.what) if worst else "",
        wrong=sum(check.status == "wrong" for check in found.checks),
    )


def _timed(path: Path) -> tuple[Timed, ...]:
    return tuple(map(_timing, Bench.load(path).cases))


def _timing(case: Case) -> Timed:
    row = case.row
    low, high = map(_finite, row.ratio_interval or (None, None))
    return Timed(
        what=str(case.what),
        verdict=row.verdict,
        ratio=_finite(row.ratio),
        interval=None if low is None or high is None else (low, high),
        seconds=_finite(row.seconds),
        where=_where(case.comparison) if case.comparison else "",
        reason=str(row.reason),
    )


def _where(found: Comparison) -> str:
    """The machine, what torch has of it, and the device of the baseline."""
    env, settings = found.environment, found.settings
    baseline = next((row.device for row in found.rows if row.name == found.baseline), "")
    parts = [env.get("cpu"), env.get("platform"), *(env.get("devices") or [])]
    parts += [f"torch {env.get('torch')}", f"{settings.get('threads')} threads"]
    return "; ".join(str(part) for part in [*parts, f"baseline on {baseline}"] if part)


def _finite(value: Any) -> float | None:
    """A number that JSON can hold, or None."""
    return float(value) if value is not None and math.isfinite(value) else None
