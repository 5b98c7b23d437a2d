"""The cache of tunings: one file for each set of conditions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare.core.forward.call import call_of
from prepare.core.forward.torch_state import read_switch
from prepare.core.model.module_tree import structure
from prepare.core.model.tensors import is_strided, name_of
from prepare.core.utils.folders import cache_folder
from prepare.core.utils.machine import differences, environment
from prepare.core.utils.text import plural
from prepare.errors import FileError, PrepareError, TuneError
from prepare.stages.tune.records import Tuning

if TYPE_CHECKING:
    import torch
    from torch import nn

    from prepare.stages.tune.candidates import Candidate

# The conditions that the machine and the installed versions set: one of these makes a tuning stale.
_MACHINE = (
    *("devices", "accelerator", "cpu", "instructions", "cores", "threads", "matmul"),
    *("torch", "prepare"),
)
# With more noise than this factor the result is not cached: the next tuning may be more precise.
_MAX_NOISE = 1.25
_UNSHOWN = "the winner was not shown to be faster than the unprepared model"
_UNITS = ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))


def conditions(
    model: nn.Module,
    batch: Any,
    candidates: Sequence[Candidate],
    *,
    mode: str,
    amp: str,
) -> dict[str, Any]:
    """Return all that a tuning depends on, except the values of model and input, as plain data.

    `allow`, the declared pipeline and the registered steps are covered by the candidates.
    """
    machine = environment()
    steps = json.dumps([candidate.steps for candidate in candidates], sort_keys=True)
    return {
        "structure": structure(model),
        "inputs": list(map(_describe, call_of(batch).tensors())),
        "candidates": hashlib.sha256(steps.encode("utf-8", "surrogatepass")).hexdigest(),
        "mode": mode,
        "amp": amp,
        **{key: machine[key] for key in _MACHINE if key in machine},
        "matmul": read_switch("matmul_precision"),
        "prepare": machine["packages"]["torch-prepare"],
    }


class Cache:
    """A folder of tunings. A file that cannot be read or written there is a note, not an error."""

    def __init__(self, where: bool | str) -> None:  # noqa: FBT001
        self.notes: list[str] = []
        self._folder = cache_folder("tune") if where is True else Path(where) if where else None

    def find(self, conditions: dict[str, Any], *, budget: float) -> Tuning | None:
        """Return the tuning under these conditions with at least this budget, or None."""
        path = self._path(conditions)
        if path is None:
            return None
        if not path.is_file():
            self._note_stale(path, conditions)
            return None
        try:
            tuning = Tuning.load(path)
            _ = tuning.pipeline  # an error if somebody has put a harmful one there
        except PrepareError as error:
            self.notes.append(f"the cache was not used: {error.problems[0]}")
            return None
        fits = tuning.conditions == conditions and tuning.budget >= budget
        if fits and not tuning.holds:
            self.notes.append(f"{_UNSHOWN}, so the cache was not used")
        return tuning if fits and tuning.holds else None

    def store(self, tuning: Tuning) -> None:
        """Write a tuning, atomically, unless the machine was too busy for a reliable result."""
        path = self._path(tuning.conditions)
        if path is None or len(tuning.rows) == 1:
            return
        if left_out := tuning.pipeline.left_out():
            self.notes.append(f"the result was not cached: {left_out[0].where} {left_out[0].wrong}")
            return
        if not tuning.holds:
            self.notes.append(f"the result was not cached: {_UNSHOWN}")
            return
        if tuning.noise is None or tuning.noise > _MAX_NOISE:
            self.notes.append("the result was not cached: too much noise, or too little time")
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            tuning.save(path)
        except (OSError, FileError) as error:
            reason = error.problems[0] if isinstance(error, FileError) else error
            self.notes.append(f"the result was not cached: {reason}")

    def _path(self, conditions: dict[str, Any]) -> Path | None:
        """Return a file whose name starts with a digest of what does not depend on the machine."""
        if self._folder is None:
            return None
        task = {key: value for key, value in conditions.items() if key not in _MACHINE}
        return self._folder / f"{_digest(task)}-{_digest(conditions)}.json"

    def _note_stale(self, path: Path, conditions: dict[str, Any]) -> None:
        """Add a note if the same was tuned before on another machine or with other versions."""
        for stale in path.parent.glob(f"{path.name.partition('-')[0]}-*.json"):
            with suppress(FileError, TuneError, OSError):
                tuning = Tuning.load(stale)
                reasons = "; ".join(_changes(tuning.conditions, conditions))
                self.notes.append(f"a tuning measured {age(tuning.made)} is stale: {reasons}")


def _digest(conditions: dict[str, Any]) -> str:
    text = json.dumps(conditions, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return which conditions of the machine differ, one phrase each."""
    flat = [
        {key: side.get(key) for key in _MACHINE if key != "accelerator"}
        | (side.get("accelerator") or {})
        for side in (before, now)
    ]
    return differences(*flat)


def age(made: str) -> str:
    """Return how long ago an ISO time was, in words: `3 hours ago`."""
    try:
        passed = datetime.now().astimezone() - datetime.fromisoformat(made).astimezone()
    except (ValueError, OverflowError):  # it was not said, or is no year of an hour here
        return "at an unknown time"
    seconds = max(passed, timedelta(0)).total_seconds()
    size, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return f"{plural(int(seconds // size), unit)} ago"


def _describe(tensor: torch.Tensor) -> str:
    strides = list(tensor.stride()) if is_strided(tensor) else str(tensor.layout)
    return f"{list(tensor.shape)} {name_of(tensor.dtype)} {strides} {tensor.device.type}"
