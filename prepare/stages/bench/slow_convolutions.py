"""Find the convolutions that are slower in the format of a prepared model than in the unprepared one."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from prepare.core.forward.autocast import Amp, device_of
from prepare.core.forward.compiled import contains_compiled
from prepare.core.forward.run_example import run_example
from prepare.core.model.module_kinds import CONVOLUTIONS_2D_3D
from prepare.core.utils.text import plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from prepare.core.forward.example_input import Example

# A convolution is slower if it takes this much longer in every round.
_SLOWER, _ROUNDS = 1.1, 3
_SHOWN = 3


def slower_note(
    unprepared: nn.Module,
    prepared: nn.Module,
    examples: tuple[Example, Example],
    *,
    amp: Amp,
    seconds: float,
) -> str:
    """Return which convolutions are slower in `prepared`; empty for none, and if this takes over `seconds`.

    `examples` are the inputs of both. Only forwards on a CPU are timed.
    """
    models = (unprepared, prepared)
    if device_of([prepared]).type != "cpu" or any(map(contains_compiled, models)):
        return ""
    start, slower = time.perf_counter(), None
    for number in range(_ROUNDS):
        if number and time.perf_counter() - start > seconds * number / _ROUNDS:
            return ""
        before, after = (
            _seconds(model, example, amp) for model, example in zip(models, examples, strict=True)
        )
        found = {name for name in before if after.get(name, 0.0) > _SLOWER * before[name]}
        slower = found if slower is None else slower & found
    if not slower:
        return ""
    names = [name or type(prepared).__name__ for name in before if name in slower]
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    verb = "is" if len(names) == 1 else "are"
    return f"{plural(len(names), 'convolution')} {verb} slower in this format here: {shown}"


def _seconds(model: nn.Module, example: Example, amp: Amp) -> Mapping[str, float]:
    """Return the seconds of each convolution in a forward."""
    spent: dict[str, float] = defaultdict(float)
    with _timed(model, spent):
        run_example(model, example, amp=amp)
    return spent


@contextmanager
def _timed(model: nn.Module, spent: dict[str, float]) -> Iterator[None]:
    def begin(name: str, *_: Any) -> None:
        spent[name] -= time.perf_counter()

    def end(name: str, *_: Any) -> None:
        spent[name] += time.perf_counter()

    handles = []
    for name, module in model.named_modules():
        if isinstance(module, CONVOLUTIONS_2D_3D):
            handles.append(module.register_forward_pre_hook(partial(begin, name)))
            handles.append(module.register_forward_hook(partial(end, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
