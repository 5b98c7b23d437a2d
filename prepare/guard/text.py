"""Say in words what a guard looks at, when, and what it did so far."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from prepare.core.forward.nested import describe
from prepare.core.model.memory_format import satisfied
from prepare.core.utils.text import plural, size

if TYPE_CHECKING:
    from torch import nn

    from prepare.core.forward.call import Call

_ACTION = {"raise": "raises", "warn": "warns once", "fallback": "puts torch's own class back"}


def text_of(guard: Any) -> str:
    """Return what a guard looks at, within which limits, and what it has left out."""
    if not guard.watched:
        why = "no module is changed, or their weights are sharded"
        return f"guard of {type(guard._model).__name__}: it looks for drift alone: {why}"
    kinds = Counter(kind for name, kind in guard.watched.items() if not guard._hooked[name].why)
    what = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "nothing"
    limits = f"{guard._seconds:g} s and {size(guard._max_bytes)} in each"
    used = f"{plural(guard.looks, 'look')} in {guard.seconds_used:.3g} s"
    lines = [
        f"guard of {type(guard._model).__name__}: {what}",
        f"  serving   all at the first call of each shape, layout, dtype and mode; at most {limits}",
        f"  training  each once in {turn_of(guard)}",
        f"  then      {_ACTION[guard._response.action]}",
        f"  so far    {used}, {plural(len(guard.differences), 'difference')}",
    ]
    lines += [f"  left out  {name or 'the model'}: {why}" for name, why in guard.left_out.items()]
    return "\n".join(lines)


def turn_of(guard: Any) -> str:
    """Return in how many training steps every module is looked at once, in words."""
    steps = guard._turns.steps_of_all(len(guard._looked_at()))
    count = plural(guard._every, "step")
    if steps > guard._every:
        count = f"about {round(steps, 2 - len(str(steps))):,} steps, not {guard._every:,}"
    limit = f"in at most {100 * guard._share:g} % of" if guard._share < 1 else "without a limit of"
    return f"{count}, {limit} the time"


def describe_call(module: nn.Module, call: Call, amp: str) -> str:
    """Return a call in words: `[2, 3, 8, 8] float32 channels_last, eval`."""
    words = []
    for tensor in call.tensors()[:3]:
        formats = satisfied(tuple(tensor.shape), tensor.stride())  # all of them are strided
        words.append(" ".join([describe(tensor), *formats[:1]]))
    words += [f"autocast to {amp}"] if amp != "none" else []
    return ", ".join([*words, "train" if module.training else "eval"])
