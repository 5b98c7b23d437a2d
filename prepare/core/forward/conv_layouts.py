"""Watches the convolutions in one forward: which layout each was given, and which it gave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from prepare.core.forward.compiled import contains_compiled
from prepare.core.model.memory_format import FORMATS, satisfied, takes

_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Call:
    """One call of one convolution: the formats that its input's and its output's strides satisfy.

    Strides often satisfy several (one channel, or one pixel), so both are sets of formats.
    """

    module: str
    rank: int
    given: tuple[str, ...]
    gave: tuple[str, ...]


@dataclass(frozen=True)
class Seen:
    """What was seen of one format: how many of the convolutions of its rank gave it, in every call.

    `ambiguous` of those gave what can be read as another format as well.
    """

    format: str
    gave: int
    of: int
    ambiguous: int


@contextmanager
def watch(model: nn.Module) -> Iterator[list[Call]]:
    """Notes every call of a 2-d or 3-d convolution while it lasts; changes no output.

    Only calls of the modules themselves are seen, not a `F.conv2d` in someone's forward, and nothing
    of a compiled model: a hook that is there at its first call is compiled into it, and stays.
    """
    calls: list[Call] = []
    if contains_compiled(model):
        yield calls
        return
    handles = [
        module.register_forward_hook(_Watcher(name, calls), with_kwargs=True)
        for name, module in model.named_modules()
        if isinstance(module, _CONVOLUTIONS)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def seen(calls: list[Call], wanted: tuple[str, ...] = ()) -> list[Seen]:
    """One entry for each of the `wanted` formats that some convolution could give.

    Where none is wanted, one for the format that most of them gave, for each rank.
    """
    found = []
    for rank in sorted({call.rank for call in calls}):
        here = [call for call in calls if call.rank == rank]
        formats = [name for name in FORMATS if takes(name, rank)]
        entries = [_seen(here, name) for name in formats if name in wanted]
        found += entries or [max((_seen(here, name) for name in formats), key=lambda one: one.gave)]
    return found


class _Watcher:
    def __init__(self, name: str, calls: list[Call]) -> None:
        self.name, self.calls = name, calls

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        given = args[0] if args else kwargs.get("input")
        if isinstance(given, Tensor) and isinstance(output, Tensor):
            self.calls.append(Call(self.name, output.dim(), _formats(given), _formats(output)))
        # Anything else would take the place of the module's output.
        return None  # noqa: PLR1711, RET501


def _formats(tensor: Tensor) -> tuple[str, ...]:
    try:
        return satisfied(tensor.shape, tensor.stride())
    except RuntimeError:  # sparse, nested and mkldnn tensors have no strides
        return ()


def _seen(calls: list[Call], name: str) -> Seen:
    by_module: dict[str, list[Call]] = {}
    for call in calls:
        by_module.setdefault(call.module, []).append(call)
    gave = [made for made in by_module.values() if all(name in call.gave for call in made)]
    ambiguous = sum(all(len(call.gave) > 1 for call in made) for made in gave)
    return Seen(name, len(gave), len(by_module), ambiguous)
