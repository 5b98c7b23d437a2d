"""What a tuning found, kept for the next time: one file for each set of conditions."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from prepare.core.forward.call import call_of
from prepare.core.model.fingerprint import structure
from prepare.core.model.tensors import is_strided, name_of
from prepare.core.utils.environment import environment
from prepare.core.utils.text import plural
from prepare.errors import FileError, TuneError
from prepare.tune.records import Tuning

if TYPE_CHECKING:
    from prepare.tune.candidates import Candidate

# Where the unprepared model differs so much from itself, another time may say more.
_TOO_NOISY = 1.25
_UNITS = ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))


def conditions(
    model: nn.Module, batch: Any, candidates: Sequence[Candidate], *, mode: str
) -> dict[str, Any]:
    """All that the answer depends on, but for the numbers in the model and its input; plain data.

    What may be tried (`allow`, what was declared, the steps that there are) is in the candidates.
    """
    found = environment()
    tried = json.dumps([each.steps for each in candidates], sort_keys=True)
    try:
        version = metadata.version("torch-prepare")
    except metadata.PackageNotFoundError:
        version = None
    return {
        "structure": structure(model),
        "inputs": [_described(tensor) for tensor in call_of(batch).tensors()],
        "candidates": hashlib.sha256(tried.encode("utf-8", "surrogatepass")).hexdigest(),
        "mode": mode,
        "devices": found["devices"],
        "cpu": found["cpu"],
        "instructions": found["instructions"],
        "cores": found["cores"],
        "threads": found["threads"],
        "matmul": torch.get_float32_matmul_precision(),
        "torch": found["torch"],
        "prepare": version,
    }


class Cache:
    """A folder of tunings. What cannot be read or written there is said in `notes`, and is no error."""

    def __init__(self, where: bool | str) -> None:  # noqa: FBT001
        self.notes: list[str] = []
        self._folder = default_folder() if where is True else Path(where) if where else None

    def find(self, asked: dict[str, Any], *, budget: float) -> Tuning | None:
        """What was found under these conditions with at least this budget; None where nothing was."""
        path = self._path(asked)
        if path is None or not path.is_file():
            return None
        try:
            found = Tuning.load(path)
        except (FileError, TuneError) as error:
            self.notes.append(f"the cache was not used: {error.problems[0]}")
            return None
        return found if found.conditions == asked and found.budget >= budget else None

    def keep(self, found: Tuning) -> None:
        """Writes it, whole or not at all; not what was found on a machine too busy to tell."""
        path = self._path(found.conditions)
        if path is None or len(found.rows) == 1:
            return
        if found.noise is None or found.noise > _TOO_NOISY:
            self.notes.append(
                "not kept for the next time: there was too much noise, or too little time"
            )
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            found.save(path)
        except (OSError, FileError) as error:
            said = error.problems[0] if isinstance(error, FileError) else error
            self.notes.append(f"not kept for the next time: {said}")

    def _path(self, asked: dict[str, Any]) -> Path | None:
        if self._folder is None:
            return None
        text = json.dumps(asked, sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def default_folder() -> Path:
    """`prepare/tune` where this system keeps what can be made again."""
    home = Path("~").expanduser()
    if folder := os.environ.get("XDG_CACHE_HOME"):
        cache = Path(folder)
    elif sys.platform == "darwin":
        cache = home / "Library" / "Caches"
    elif sys.platform == "win32":
        cache = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    else:
        cache = home / ".cache"
    return cache / "prepare" / "tune"


def age(made: str) -> str:
    """How long ago that was, in words: `3 hours ago`."""
    passed = datetime.now().astimezone() - datetime.fromisoformat(made)
    seconds = max(passed, timedelta(0)).total_seconds()
    size, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return f"{plural(int(seconds // size), unit)} ago"


def _described(tensor: torch.Tensor) -> str:
    strides = list(tensor.stride()) if is_strided(tensor) else str(tensor.layout)
    return f"{list(tensor.shape)} {name_of(tensor.dtype)} {strides} {tensor.device.type}"
