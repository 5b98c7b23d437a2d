"""The options of a tuning: `allow`, the budget and the cache, checked without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from prepare.core.utils.options import read_options, read_size
from prepare.core.utils.wording import argument, words
from prepare.errors import ConfigError, Problem
from prepare.stage import key

Allowed = Literal["bfloat16", "half", "compile", "quantize"]
_INFERENCE_ONLY = {
    "half": "parameters in float16 cannot be trained",
    "quantize": "weights in 8 bits cannot be trained",
}


def _check_memory(value: int | str | None) -> None:
    if value is not None:
        read_size(value)


def _check_calls(calls: int | None) -> None:
    if calls is not None and calls < 1:
        raise ValueError(f"{calls} is not a number of calls", "give one from 1 on, as in 1000")


def _check_budget(budget: float) -> None:
    if not 0 < budget < math.inf:
        raise ValueError(f"{budget} is not a time", "give seconds, as in 60")


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """The group `tune` of the command line, and the options of `tune()`."""

    allow: tuple[Allowed, ...] = key(
        (), "what to try beyond float32 without a compiler", "[bfloat16]"
    )
    budget: Annotated[float, "seconds, as in 60", _check_budget] = key(
        60.0, "seconds for preparing, timing and verifying recipes"
    )
    cache: Annotated[bool | str, "true, false, or a folder"] = key(
        True, "save the result: true, false or a folder"
    )
    max_memory: Annotated[int | str | None, "bytes or a unit, as in 8GiB", _check_memory] = key(
        None,
        "peak memory of a call, without model and input, beyond which a recipe cannot win",
        "8GiB",
    )
    calls: Annotated[int | None, "a whole number, as in 1000", _check_calls] = key(
        None, "calls that the model will get, to weigh the first, which may compile", "1000"
    )


def read_tune(options: Mapping[str, Any], *, mode: str) -> TuneOptions:
    """Check the options and return them.

    Raises:
        ConfigError: one problem for each mistake.
    """
    read = TuneOptions(**read_options(TuneOptions, options, where="tune"))
    if problems := list(mode_problems(read.allow, mode)):
        raise ConfigError.of(problems)
    return read


def mode_problems(allow: Iterable[str], mode: str) -> Iterable[Problem]:
    """Yield a problem for each allowed word that is for inference only."""
    if mode == "train":
        for word in allow:
            if word in _INFERENCE_ONLY:
                wrong, amp = _INFERENCE_ONLY[word], argument("amp", "float16")
                remedy = f"allow bfloat16, or tune under autocast with {amp}"
                where = words(cli="tune.allow", python="allow")
                yield Problem(
                    where,
                    f"{wrong}, and this is {argument('mode', 'train')}",
                    remedy if word == "half" else "allow compile",
                )
