"""Records of a patch as plain data, saved to and loaded from `patch.json` without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from prepare.core.utils import files
from prepare.core.utils.json_records import JsonRecord, Kind
from prepare.errors import FlowError
from prepare.stages.bench.records import check_ratios

if TYPE_CHECKING:
    import os


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedCall:
    """A call that the patch changes: `calls` of keep_layout names it so.

    `copied_bytes` and `breaks` are those that come back in one forward (and backward) without its change.
    """

    name: str
    source: str
    copied_bytes: int
    breaks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpatchedBreak:
    """Breaks at one place that stay, and the reason."""

    source: str
    cause: str
    breaks: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch(JsonRecord):
    """A unified diff of the model's own code, what it saves, and the breaks that it leaves.

    `before` and `after` are the copied bytes and the breaks of the flow without and with it. `verdict` and
    `ratio` compare the time with it to the time without it; they are empty if it was not timed.
    `verified` is the status of the verification of the model with it.
    """

    KIND: ClassVar[Kind] = Kind("prepare.patch", 1, "a patch", "a patch.json", FlowError)

    diff: str
    calls: tuple[PatchedCall, ...]
    left: tuple[UnpatchedBreak, ...]
    before: tuple[int, int]
    after: tuple[int, int]
    verdict: str = ""
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    verified: str = ""

    def save(self, path: str | os.PathLike) -> None:
        """Write `patch.json`, and the diff into `patch.diff` beside it. Raises FileError."""
        JsonRecord.save(self, path)
        files.write_text(Path(path).with_suffix(".diff"), self.diff)

    def check(self) -> None:
        check_ratios(self.ratio, *(self.interval or ()))
