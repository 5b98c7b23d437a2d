"""What is known to be wrong or slow in torch, by device, version, operation, format and dtype.

The facts stand in `known_issues.yaml` beside this file, each with its evidence. An entry retires by
itself with the torch that mends it: give it an `until`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from prepare.core.utils import plain_yaml

FILE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class Issue:
    """One entry of the file; the comment at its top says what each field means."""

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
        """Whether this torch has it on this type of device (`cpu`, `cuda`)."""
        now = _numbers(torch_version)
        ended = self.until is not None and _numbers(self.until) <= now
        return device in self.devices and _numbers(self.since) <= now and not ended

    def concerns(self, operation: str, formats: Iterable[str], dtypes: Iterable[str]) -> bool:
        """Whether a module of the class `operation` meets it, where convolutions have these formats."""
        here = {name for name in formats if _agree(_rank(name), _rank(operation))}
        return (
            operation in self.operations
            and not here.isdisjoint(self.formats)
            and (not self.dtypes or not set(dtypes).isdisjoint(self.dtypes))
        )


@cache
def issues() -> tuple[Issue, ...]:
    """Every entry of the file, in its order."""
    read = plain_yaml.read(FILE.read_bytes(), FILE.name, remedy="")
    return tuple(
        Issue(name, **{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()})
        for name, entry in read.value.items()
    )


def standing(device: str, torch_version: str | None = None) -> list[Issue]:
    """What holds on this type of device with this torch; the one that is installed if none is given."""
    if torch_version is None:
        import torch

        torch_version = torch.__version__
    return [issue for issue in issues() if issue.stands(device.partition(":")[0], torch_version)]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:2])


def _rank(name: str) -> int | None:
    """The number of dimensions that a format or a class is for; None where it is for any."""
    if name.endswith(("3d", "3D")):
        return 5
    return 4 if name.endswith("2d") or name == "channels_last" else None


def _agree(one: int | None, other: int | None) -> bool:
    return None in (one, other) or one == other
