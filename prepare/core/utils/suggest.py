"""Suggest allowed words for a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Common synonyms; accepted wherever the word on the right is allowed.
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
    """Return up to three of `allowed` that are close to `word`, best first.

    Synonyms come first, then the most similar spellings; case is ignored.
    """
    low = str(word).lower()
    spelt: dict[str, list[str]] = {}
    for choice in dict.fromkeys(map(str, allowed)):
        spelt.setdefault(choice.lower(), []).append(choice)
    synonyms = [name for name in spelt if ALIASES.get(name, name) == ALIASES.get(low, low)]
    close = difflib.get_close_matches(low, spelt, n=3, cutoff=cutoff)
    # Transposed letters rank first: une2td means unet2d, and difflib ranks unet3d as high.
    close.sort(key=lambda name: sorted(name) != sorted(low))
    return [choice for name in dict.fromkeys([*synonyms, *close]) for choice in spelt[name]][:3]


def choose(word: str, allowed: Iterable[str], *, noun: str = "allowed") -> str:
    """Return the remedy for a wrong word: the nearest match, then all allowed words."""
    allowed = list(allowed)
    close = nearest(word, allowed)
    everything = f"{noun}: {', '.join(allowed)}" if allowed else f"{noun}: none"
    return f"did you mean {close[0]!r}? {everything}" if close else everything
