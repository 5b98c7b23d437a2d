"""Suggest allowed words for a wrong one."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from typing import Any

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
    "ndhwc": "channels_last_3d",
    "nchw": "contiguous",
    "ncdhw": "contiguous",
    "contiguous_format": "contiguous",
    "both": "by_rank",
    "gpu": "cuda",
}
# A longer list of options is written by families, such as `monai_* (6)`.
_LISTED = 12


def meant(word: Any, allowed: Iterable[Any]) -> str | None:
    """Return the text of `allowed` that `word` is, or is a synonym of; None if it is none of them."""
    name = str(word).removeprefix("torch.")
    texts = [choice for choice in allowed if isinstance(choice, str)]
    if name in texts:
        return name
    low = name.lower()
    known = ALIASES.get(low, low)
    return next((each for each in texts if ALIASES.get(each, each) == known), None)


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
    words = list(allowed)
    return f"{_did_you_mean(word, words)}{noun}: {', '.join(words) or 'none'}"


def choose_option(word: str, group: str, options: Iterable[str]) -> str:
    """Return the remedy for a wrong option of a group: the nearest match, then its options."""
    names = list(options)
    more = f" (--help {group} lists them)" if len(names) > _LISTED else ""
    return f"{_did_you_mean(word, names)}options: {listed(names)}{more}"


def _did_you_mean(word: str, words: list[str]) -> str:
    close = nearest(word, words)
    # The beginning of several words may mean any of them.
    begun = sorted(name for name in close if name.startswith(word)) if len(word) > 2 else []
    return f"did you mean {' or '.join(map(repr, begun[:2] or close[:1]))}? " if close else ""


def listed(options: list[str]) -> str:
    """Return `cpu, cuda`; a long list by families, such as `monai_* (6)`."""
    families = Counter(name.partition("_")[0] for name in options if "_" in name)
    long = len(options) > _LISTED
    several = {family: size for family, size in families.items() if long and size > 1}
    alone = [name for name in options if name.partition("_")[0] not in several]
    return ", ".join([*alone, *(f"{family}_* ({size})" for family, size in several.items())])
