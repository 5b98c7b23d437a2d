"""Read the groups `verify` and `bench`: a level, and the limits of time and memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prepare.core.utils.options import as_written
from prepare.core.utils.suggest import choose
from prepare.errors import Problem

_LEVELS = ("none", "short", "full")
_KEYS = {"verify": ("level", "seconds", "memory"), "bench": ("level", "seconds")}
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class VerifyLimits:
    """The seconds and bytes that a verification may use; None for the default."""

    seconds: float | None = None
    memory: int | None = None


def read_levels(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the fields of the settings for both groups, and every problem.

    A value may be the level alone, `short`, or a mapping with the level and the limits.
    """
    problems: list[Problem] = []
    read: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {}
    for group, keys in _KEYS.items():
        value = config.get(group, "short")
        given = value if isinstance(value, dict) else {"level": value}
        for key in given:
            if key not in keys:
                remedy = choose(str(key), keys, noun="keys")
                problems.append(Problem(f"{group}.{key}", "no such key", remedy))
        level = given.get("level", "short")
        if level not in _LEVELS:
            wrong = f"{level!r}" if isinstance(level, str) else as_written(level)
            problems.append(Problem(group, f"{wrong} is not allowed", choose(str(level), _LEVELS)))
        read[group] = level
        options[group] = {
            "seconds": _seconds(given.get("seconds"), f"{group}.seconds", problems),
            "memory": _bytes(given.get("memory"), f"{group}.memory", problems),
        }
    read["verify_limits"] = VerifyLimits(**options["verify"])
    read["bench_seconds"] = options["bench"]["seconds"]
    return read, problems


def _seconds(value: Any, where: str, problems: list[Problem]) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        problems.append(
            Problem(where, f"{as_written(value)} is not a time", "give seconds, as in 60")
        )
        return None
    return float(value)


def _bytes(value: Any, where: str, problems: list[Problem]) -> int | None:
    if value is None:
        return None
    match = None if isinstance(value, bool) else _SIZE.fullmatch(str(value))
    count = int(float(match[1]) * 2 ** _UNITS[match[2].upper()]) if match else 0
    if count <= 0:
        remedy = "give bytes or a unit, as in 8GiB"
        problems.append(Problem(where, f"{as_written(value)} is not a size", remedy))
        return None
    return count
