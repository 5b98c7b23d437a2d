"""Run the example input through a model, record the layouts of its convolutions, and explain a failure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.call import describe
from prepare.core.forward.compiled import contains_compiled
from prepare.core.forward.explain_error import explained
from prepare.core.forward.torch_state import autocast, device_of
from prepare.core.forward.unchanged import unchanged, without_gradients
from prepare.core.model.memory_format import FORMATS, satisfied, takes
from prepare.core.model.module_kinds import CONVOLUTIONS_2D_3D
from prepare.core.model.tensors import is_strided
from prepare.core.utils.process_state import interruptible

if TYPE_CHECKING:
    from prepare.core.forward.example_input import Example


@dataclass(frozen=True)
class ConvCall:
    """One call of one convolution, and the formats that the strides of its output satisfy.

    Strides often satisfy several (one channel, or one pixel).
    """

    module: str
    rank: int
    output_formats: tuple[str, ...]


@dataclass(frozen=True)
class LayoutCount:
    """Among the `of` convolutions of one rank, the `gave` whose every output was in `format`.

    `ambiguous`: how many of these outputs also satisfy another memory format. The record of a run
    holds these fields under these names.
    """

    format: str
    gave: int
    of: int
    ambiguous: int


@contextmanager
def watch(model: nn.Module) -> Iterator[list[ConvCall]]:
    """Record every call of a 2-d or 3-d convolution inside the block; change no output.

    Only calls of modules are recorded, not `F.conv2d` in the code of a forward. Nothing is recorded
    for a compiled model: a hook that exists at its first call is compiled into it, and stays.
    """
    calls: list[ConvCall] = []
    if contains_compiled(model):
        yield calls
        return
    handles = [
        module.register_forward_hook(partial(_record, name, calls))
        for name, module in model.named_modules()
        if isinstance(module, CONVOLUTIONS_2D_3D)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def count_layouts(calls: list[ConvCall], formats: Iterable[str] = ()) -> list[LayoutCount]:
    """Return one count for each of `formats` that a called convolution could return.

    For a rank that none of `formats` is for, return the count of the most frequent format.
    """
    counts = []
    for rank in sorted({call.rank for call in calls}):
        of_rank = [call for call in calls if call.rank == rank]
        possible = [_count(of_rank, name) for name in FORMATS if takes(name, rank)]
        requested = [count for count in possible if count.format in formats]
        counts += requested or [max(possible, key=lambda count: count.gave)]
    return counts


def _record(name: str, calls: list[ConvCall], _module: Any, _args: Any, output: Any) -> None:
    if isinstance(output, Tensor):
        fits = satisfied(output.shape, output.stride()) if is_strided(output) else ()
        calls.append(ConvCall(name, output.dim(), fits))


def _count(calls: list[ConvCall], name: str) -> LayoutCount:
    outputs: dict[str, list[tuple[str, ...]]] = {}
    for call in calls:
        outputs.setdefault(call.module, []).append(call.output_formats)
    matching = [formats for formats in outputs.values() if all(name in each for each in formats)]
    ambiguous = sum(all(len(each) > 1 for each in formats) for formats in matching)
    return LayoutCount(name, len(matching), len(outputs), ambiguous)


@dataclass(frozen=True)
class Forward:
    """The inputs and the output of one forward, in words, and the calls of its convolutions."""

    inputs: str
    output: str
    calls: list[ConvCall]
    seconds: float


def run_example(model: nn.Module, example: Example, *, amp: str = "none") -> Forward:
    """Run one forward under autocast to `amp`, record its convolutions, and restore the model and its input.

    It runs without gradients or, if it raises so, with them, as a forward that differentiates needs.

    Raises:
        ModelError: the forward raised; names the innermost module and the likely cause.
    """
    inputs = describe([*example.args, *example.kwargs.values()])

    def run() -> Forward:
        with unchanged(model, example.args, example.kwargs):
            begin = time.perf_counter()
            with watch(model) as calls, autocast(amp, device_of([model])):
                output = interruptible(model, *example.args, **example.kwargs)
            seconds, words = time.perf_counter() - begin, describe(output)
        return Forward(inputs, words, calls, seconds)

    try:
        return without_gradients(run)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise explained(model, error) from error
