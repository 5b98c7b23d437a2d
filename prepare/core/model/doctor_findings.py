"""Find the known issues on this machine, by the last `doctor` or else by the table, and those of one call."""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare.core.model.forward_code import forward_code, torch_class
from prepare.core.model.issue_sizes import SIZES
from prepare.core.model.known_issues import (
    FINE,
    FOUND,
    ONLY,
    Issue,
    issues,
    standing,
)
from prepare.core.model.memory_format import canonical_stride
from prepare.core.model.tensors import name_of
from prepare.core.utils.environment import machine_identity
from prepare.core.utils.files import read_text
from prepare.core.utils.folders import cache_folder
from prepare.core.utils.json_records import LIMIT, parse_json
from prepare.errors import FileError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn


# After this many seconds an answer is not asked any more.
_FRESH = 30 * 86400
_FORMATS = {4: ("contiguous", "channels_last"), 5: ("contiguous", "channels_last_3d")}


def answers_file(device: str) -> Path:
    """Return the file of the answers for this type of device; its name is a digest of the machine."""
    identity = {"device": device.partition(":")[0], **machine_identity()}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder("doctor") / f"{digest}.json"


def fresh_answers(device: str) -> Mapping[str, str]:
    """Return the verdict for each name of an issue; empty without a `doctor` in the last 30 days.

    A change of torch, the accelerator's libraries or the processor makes the answers of before void.
    """
    path = answers_file(device)
    try:
        changed = path.stat().st_mtime
    except OSError:
        return {}
    return _read(path, changed) if time.time() - changed < _FRESH else {}


def standing_here(device: str) -> list[Issue]:
    """Return the issues of this type of device: by a fresh `doctor`, else by the table."""
    answers = fresh_answers(device)
    by_table = set(standing(device))
    return [
        issue
        for issue in issues()
        if (answers.get(issue.name) in FOUND)
        or (issue in by_table and answers.get(issue.name) != FINE)
    ]


@cache
def _read(path: Path, _changed: float) -> Mapping[str, str]:
    try:
        findings = parse_json(read_text(path, limit=LIMIT))["findings"]
        return {each["name"]: each["verdict"] for each in findings}
    except (FileError, ValueError, LookupError, TypeError, RecursionError):
        return {}


class CallIssues:
    """The known issues with one effect, by default wrong numbers, that a device has at some sizes only."""

    def __init__(self, device: str, effect: str = "wrong") -> None:
        self._by_class: dict[str, list[Issue]] = defaultdict(list)
        for issue in standing_here(device):
            for operation in issue.operations if issue.sizes and issue.effect == effect else ():
                self._by_class[operation].append(issue)

    def of(self, module: nn.Module, shape: Sequence[int]) -> list[Issue]:
        """Return the issues that a call has for certain, given the shape of the module's input."""
        cls: Any = type(module)  # a class is hashable, which mypy denies
        kind = (torch_class(cls) or cls).__name__
        if not (issues := self._by_class.get(kind)):
            return []
        weight = module._parameters.get("weight", vars(module).get("weight"))
        if weight is None:
            return []
        if (code := forward_code(module)).repaired or not code.runs_torchs:
            return []
        formats, dtypes = formats_of(weight), [name_of(weight.dtype)]
        return [
            issue
            for issue in issues
            if issue.concerns(kind, formats, dtypes)
            and ONLY[issue.only](module)
            and SIZES[issue.sizes].holds(module, shape)
        ]


def describe(issue: Issue) -> str:
    """Return the sizes and the name of an issue, as the end of a sentence about a module."""
    sizes = SIZES[issue.sizes].what
    return f"wrong on this device {sizes}, as in this call: {issue.what} [{issue.name}]"


def formats_of(weight: Tensor) -> list[str]:
    """Return the formats that the strides of a weight satisfy; all of them for another rank."""
    names = _FORMATS.get(weight.dim())
    if names is None:
        return ["contiguous", "channels_last", "channels_last_3d"]
    return [name for name in names if canonical_stride(weight.shape, name) == weight.stride()]
