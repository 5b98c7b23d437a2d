"""Suggest what a wrong word may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Other words that people use for the same thing; accepted wherever the word on the right is allowed.
ALIASES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
    "long": "int64",
    "nhwc": "channels_last",
    "cl": "channels_last",
    "channels_last_2d": "channels_last",
    "ndhwc": "channels_last_3d",
    "cl3": "channels_last_3d",
    "nchw": "contiguous",
    "ncdhw": "contiguous",
    "contiguous_format": "contiguous",
    "both": "by_rank",
    "gpu": "cuda",
}


def nearest(word: str, allowed: Iterable[str], *, cutoff: float = 0.55) -> list[str]:
    """Up to three of `allowed` that `word` may have been meant to be, best first.

    Another word for the same thing comes first, then what is spelt most alike; case does not count.
    """
    low = str(word).lower()
    spelt: dict[str, list[str]] = {}
    for choice in dict.fromkeys(map(str, allowed)):
        spelt.setdefault(choice.lower(), []).append(choice)
    same = [name for name in spelt if ALIASES.get(name, name) == ALIASES.get(low, low)]
    close = difflib.get_close_matches(low, spelt, n=3, cutoff=cutoff)
    # Letters that only changed places tell une2td from unet3d; difflib alone does not.
    close.sort(key=lambda name: sorted(name) != sorted(low))
    return [choice for name in dict.fromkeys([*same, *close]) for choice in spelt[name]][:3]


def choose(word: str, allowed: Iterable[str], *, noun: str = "allowed") -> str:
    """The remedy for a wrong word: the nearest match, then all that is allowed."""
    allowed = list(allowed)
    close = nearest(word, allowed)
    everything = f"{noun}: {', '.join(allowed)}" if allowed else f"{noun}: none"
    return f"did you mean {close[0]!r}? {everything}" if close else everything
