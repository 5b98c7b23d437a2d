"""Records of a verification as plain data, saved to and loaded from `verify.json` without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from prepare.core.utils.json_records import JsonRecord, Kind, Readable
from prepare.core.utils.text import part_of_tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check.

    `what` is values, layout, flags, forward, outputs, input gradients, parameter gradients, buffers,
    module outputs or module gradients. In a check of values or of modules, `worst` is a module; `compared`
    counts the modules that ran alone. `error` is the largest difference from the reference, `allowed` the
    tolerance, both of the tensor `worst` among `compared` tensors and as a fraction of its scale (see
    `deviations.py`); None if there is no such number. `status` is `pass`, `fail` or `cannot tell`; `wrong`
    for a failure that does not count in this mode; `skipped` if there is nothing to compare, or the
    comparison cannot run or would be meaningless. `sensitivity` is the smallest systematic error (all numbers
    of one module's tensors too large by this fraction) that exceeds the tolerance in every module, and
    `least_sensitive` the module or output with that tolerance.
    """

    what: str
    status: str
    error: float | None = None
    allowed: float | None = None
    worst: str = ""
    compared: int = 0
    note: str = ""
    sensitivity: float | None = None
    least_sensitive: str = ""

    @property
    def part(self) -> float | None:
        """The error as a part of the tolerance; None if one is not known."""
        return part_of_tolerance(self.error, self.allowed)

    @property
    def reason(self) -> str:
        """The result as a sentence, such as `outputs: output is off by 0.01 of its scale, ...`."""
        if self.note:
            joint = ": " if self.note.startswith(("the ", "not ")) else " "
            subject = f"{self.worst}{joint}" if self.worst and self.worst not in self.note else ""
            return f"{self.what}: {subject}{self.note}"
        if self.error is None:
            return f"{self.what}: {self.worst} is infinitely far from the reference"
        off = f"{self.worst} is off by {self.error:.2g} of its scale"
        return f"{self.what}: {off}, and the tolerance is {self.allowed:.2g}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verification(JsonRecord, Readable):
    """The result of a verification: does the prepared model compute what the unprepared one does?

    `status` is `pass`, `fail` or `cannot tell`; `reason` says why. `culprit` is the first module that is
    wrong, `advice` what may help; both may be empty. `reference` is the dtype of the exact run, `dtype` the
    coarsest of the prepared model. `amp` is the autocast of its forward.
    """

    KIND: ClassVar[Kind] = Kind("prepare.verify", "a verification", "a verify.json")
    status: str
    reason: str
    mode: str
    reference: str = ""
    dtype: str = ""
    checks: tuple[Check, ...] = ()
    culprit: str = ""
    advice: str = ""
    amp: str = "none"

    def sensitivity(self, kind: str) -> tuple[float, str] | None:
        """Return the smallest systematic error found in `outputs` or `gradients`, and where.

        Of the whole model the largest of all checks of that kind, or that of the modules alone if it is
        smaller; None if nothing was measured.
        """
        found = {c.what: (c.sensitivity, c.least_sensitive) for c in self.checks if c.sensitivity}
        alone = found.pop(f"module {kind}", None)
        whole = max((least for what, least in found.items() if what.endswith(kind)), default=None)
        return min(filter(None, (alone, whole)), default=None)
