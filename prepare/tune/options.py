"""What a tuning may do: the words of `allow`, the budget and the cache, checked without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from prepare.core.utils.options import read_options
from prepare.errors import ConfigError, Problem

Allowed = Literal["bfloat16", "half", "compile", "openvino"]
_INFERENCE_ONLY = {
    "half": (
        "parameters in float16 cannot be trained (mode=train)",
        "allow bfloat16, or nothing and use torch.autocast around the forward",
    ),
    "openvino": ("OpenVINO is for inference, and this is mode=train", "allow compile"),
}


def _check_budget(budget: float) -> None:
    if not 0 < budget < math.inf:
        raise ValueError(f"{budget} is no time", "give seconds, as in 60")


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """The group `tune` of the command line, and what `tune()` takes."""

    allow: tuple[Allowed, ...] = ()
    """What may be tried beyond float32 without a compiler."""
    budget: Annotated[float, "seconds, as in 60", _check_budget] = 60.0
    """Seconds to build, time and verify candidates in."""
    cache: Annotated[bool | str, "true, false, or a folder"] = True
    """Whether, or in which folder, what was found is kept for the next time."""


def read_tune(options: Mapping[str, Any], *, mode: str) -> TuneOptions:
    """The checked options.

    Raises:
        ConfigError: with one problem for every mistake in them.
    """
    read = TuneOptions(**read_options(TuneOptions, options, where="tune"))
    if problems := list(_unfit(read.allow, mode)):
        raise ConfigError.of(problems)
    return read


def _unfit(allow: Iterable[str], mode: str) -> Iterable[Problem]:
    if mode == "train":
        yield from (
            Problem("tune.allow", *_INFERENCE_ONLY[w]) for w in allow if w in _INFERENCE_ONLY
        )
