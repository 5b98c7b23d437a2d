"""Read the groups `verify` and `bench`: a level, and the limits of time and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prepare.core.utils.options import as_written, read_size
from prepare.core.utils.suggest import choose
from prepare.errors import Problem

_LEVELS = ("none", "short", "full")
_KEYS = {
    "verify": ("level", "seconds", "memory", "metric", "max_drop"),
    "bench": ("level", "seconds"),
}


@dataclass(frozen=True, kw_only=True)
class VerifyLimits:
    """The seconds and bytes that a verification may use, None for the default; and the user's own limit.

    `metric` is the dotted name of a function, `max_drop` how much lower the prepared model's value may be.
    """

    seconds: float | None = None
    memory: int | None = None
    metric: str | None = None
    max_drop: float | None = None


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
    metric, max_drop = _metric(config.get("verify"), problems)
    read["verify_limits"] = VerifyLimits(**options["verify"], metric=metric, max_drop=max_drop)
    read["bench_seconds"] = options["bench"]["seconds"]
    return read, problems


def _metric(given: Any, problems: list[Problem]) -> tuple[str | None, float | None]:
    """Return the metric and its limit, which need each other."""
    given = given if isinstance(given, dict) else {}
    metric, max_drop = given.get("metric"), given.get("max_drop")
    where = "verify.metric", "verify.max_drop"
    if metric is not None and not (
        isinstance(metric, str)
        and "." in metric
        and all(p.isidentifier() for p in metric.split("."))
    ):
        remedy = "give the dotted name of a function, as in my_package.metrics.accuracy"
        problems.append(Problem(where[0], f"{as_written(metric)} is not a dotted name", remedy))
        metric = None
    is_number = isinstance(max_drop, int | float) and not isinstance(max_drop, bool)
    if max_drop is not None and not (is_number and 0 <= max_drop < math.inf):
        remedy = "give a number from 0 on, as in 0.001"
        problems.append(Problem(where[1], f"{as_written(max_drop)} is not a drop", remedy))
        return metric, None
    if given.get("metric") is not None and max_drop is None:
        problems.append(Problem(where[1], "is missing", "give one, as in verify.max_drop=0.001"))
    if given.get("metric") is None and max_drop is not None:
        remedy = "give verify.metric=package.function"
        problems.append(Problem(where[1], "limits a metric, and there is none", remedy))
    return metric, max_drop


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
    try:
        return read_size(value)
    except ValueError as error:
        problems.append(Problem(where, *error.args))
        return None
