"""Known issues of torch: wrong or slow operations by device, version, memory format and dtype.

`known_issues.yaml` beside this file holds the entries, each with its evidence. An entry with an
`until` no longer applies from that version of torch on.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from prepare.core.utils import plain_yaml

FILE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class Issue:
    """One entry of the file; the comment at the top of the file explains each field."""

    name: str
    effect: str
    part: str
    devices: tuple[str, ...]
    operations: tuple[str, ...]
    only: str
    formats: tuple[str, ...]
    dtypes: tuple[str, ...]
    since: str
    until: str | None
    repair: str
    what: str
    evidence: str

    def stands(self, device: str, torch_version: str) -> bool:
        """Return whether this version of torch has the issue on this type of device (`cpu`, `cuda`)."""
        now = _numbers(torch_version)
        ended = self.until is not None and _numbers(self.until) <= now
        return device in self.devices and _numbers(self.since) <= now and not ended

    def concerns(self, operation: str, formats: Iterable[str], dtypes: Iterable[str]) -> bool:
        """Return whether a module of the class `operation` has the issue, given the convolutions' formats."""
        same_rank = {name for name in formats if _agree(_rank(name), _rank(operation))}
        return (
            operation in self.operations
            and not same_rank.isdisjoint(self.formats)
            and (not self.dtypes or not set(dtypes).isdisjoint(self.dtypes))
        )


@cache
def issues() -> tuple[Issue, ...]:
    """Return every entry of the file, in its order."""
    entries: Any = plain_yaml.read(FILE.read_bytes(), FILE.name, remedy="").value
    return tuple(_issue(name, entry) for name, entry in entries.items())


def _issue(name: str, entry: dict[str, Any]) -> Issue:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
    return Issue(name, **values)


def standing(device: str, torch_version: str | None = None) -> list[Issue]:
    """Return the issues on this type of device in this version of torch (default: the installed one)."""
    if torch_version is None:
        import torch

        torch_version = torch.__version__
    return [issue for issue in issues() if issue.stands(device.partition(":")[0], torch_version)]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:2])


def _rank(name: str) -> int | None:
    """Return the number of dimensions of a format or a class; None for any number."""
    if name.endswith(("3d", "3D")):
        return 5
    return 4 if name.endswith("2d") or name == "channels_last" else None


def _agree(one: int | None, other: int | None) -> bool:
    return None in (one, other) or one == other
