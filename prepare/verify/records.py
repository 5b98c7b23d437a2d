"""What a verification found, as plain data: saved to and loaded from `verify.json` without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prepare.core.utils import json_records
from prepare.errors import VerificationError

_KIND = json_records.Kind("prepare.verify", 1, "a verification", "a verify.json", VerificationError)
STATUSES = ("pass", "fail", "cannot tell")
CHECK_STATUSES = (*STATUSES, "wrong", "skipped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was compared, in one case.

    `what` is values, casts, layout, flags, forward, outputs, input gradients, parameter gradients
    or buffers. `mode`, `batch` and `inputs` are those of the case, empty for what needs no forward.
    `dtype` is the coarsest of the prepared model's. `error` is the largest difference from the
    reference and `allowed` what is tolerated, both as a part of the tensor's scale (see
    `prepare.verify.tolerance`), of the tensor `worst` among `compared`; None where there is no
    such number. `status` is `pass`, `fail`, `cannot tell`; `wrong` where it is, in a mode in which
    that does not count; `skipped` where the reference itself cannot run so.
    """

    what: str
    status: str
    mode: str = ""
    batch: int | None = None
    inputs: str = ""
    dtype: str = ""
    error: float | None = None
    allowed: float | None = None
    worst: str = ""
    compared: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """What a cast to another dtype took from one tensor: counts of its elements.

    `overflowed` became infinite, `flushed` became zero, `rounded` were whole numbers of a tensor
    that holds nothing else, and are other numbers now.
    """

    tensor: str
    before: str
    after: str
    elements: int
    overflowed: int
    flushed: int
    rounded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Whether a prepared model still computes what the unprepared one does.

    `status` is `pass`, `fail` or `cannot tell`; then `reason` says why. `culprit` is the first
    module where it went wrong, `advice` what probably caused that and what to do; both may be
    empty. `lost` is sorted, the worst tensor first. `reference` is the dtype that was taken as exact.
    """

    status: str
    reason: str
    level: str
    mode: str
    reference: str
    checks: tuple[Check, ...]
    lost: tuple[Lost, ...]
    culprit: str
    advice: str
    seconds: float

    def save(self, path: str | Path) -> None:
        """Writes `verify.json`. Raises FileError."""
        json_records.write_json(path, _KIND.head | asdict(self), lines=True)

    @classmethod
    def load(cls, path: str | Path) -> Verification:
        """Read a verification from its JSON; torch is not needed.

        Raises:
            VerificationError: the file is not a verification, or one of another version.
        """
        return json_records.load(cls, path, _KIND, check=_check_status)


def _check_status(verification: Verification) -> None:
    if verification.status not in STATUSES:
        raise ValueError(f"{verification.status!r} is not a status")


def unknown(reason: str, *, level: str, mode: str) -> Verification:
    """That nothing could be compared, and why."""
    none: dict[str, Any] = {"checks": (), "lost": (), "culprit": "", "advice": "", "reference": ""}
    return Verification(
        status="cannot tell", reason=reason, level=level, mode=mode, seconds=0.0, **none
    )
