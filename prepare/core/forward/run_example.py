"""Run the example input through a model, and explain a failure by the module and the likely cause."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from prepare.core.forward.call import describe
from prepare.core.forward.input_formatter import keep_option, note_of
from prepare.core.forward.torch_state import autocast, device_of
from prepare.core.forward.unchanged import unchanged, without_gradients
from prepare.core.utils.packages import described, remedy_of_missing
from prepare.core.utils.process_state import interruptible
from prepare.errors import ModelError

if TYPE_CHECKING:
    from prepare.core.forward.example_input import Example


# What torch says of dtypes that do not go together, or that an operation does not take.
_OF_DTYPE = (
    r"\bdtype|[Ss]calar ?[Tt]ype|same type|type .*should be the same|BFloat16|Half|or double"
)

# The remedy for each pattern of a message of torch.
_HINTS = {
    r"Input type .* and (bias|weight) type|same dtype|expected scalar type": (
        "the input and the weights differ in precision: the example was formatted as the steps say, "
        "but a tensor that the model makes itself stays as it is, and so does the weight of a kept "
        "module that is not called itself"
    ),
    r"view size is not compatible": (
        "this module calls .view on a tensor that is no longer contiguous: use .reshape or .flatten "
        "there, or exclude the convolutions before it"
    ),
    r"missing \d+ required|unexpected keyword|takes .* positional": (
        "forward takes other arguments: give them as input.args=[{shape:[...]},...] and "
        "input.kwargs={NAME:{shape:[...]}}, one dict as input.args=[{NAME:{shape:[...]}}]; "
        "in Python as a tuple or a mapping, one dict as (batch,)"
    ),
    r"to have \d+ channels|Sizes of tensors|must match|[Ss]hapes? .*(cannot be multiplied|invalid)"
    r"|[Ee]xpected .*(input|dimension|size)|Kernel size can't be": (
        "the example input may not fit this model: change input.shape"
    ),
    r"index out of range": ("the example input may hold too large integers: change input.high"),
}


def explained(model: nn.Module, error: Exception, example: Any = None) -> ModelError:
    """Return a ModelError for an error in a forward, with the innermost module and the likely cause.

    Of an error for a dtype it names the arguments in `example`, and the patterns that decide on them.
    """
    lines = str(error).strip().split("\n")
    # The first line of a compiler's error names its backend, the next line the error of the backend.
    message = " ".join(lines[: 2 if lines[0].endswith("raised:") else 1])
    text = str(error)[:5_000]  # the time of the search grows with the square of its length
    hints = [hint for pattern, hint in _HINTS.items() if re.search(pattern, text)]
    if missing := remedy_of_missing(str(error)):
        hints = [missing]
    name = _innermost(model, error)
    kind = type(model.get_submodule(name)).__name__
    if any(each.dtype.itemsize == 2 for each in model.parameters()) and re.search(_OF_DTYPE, text):
        hints = [_instead_of_cast(name), *hints]
    wrong = described(error, message).rstrip(".")
    where = f"{name} ({kind})" if name else kind
    named = example and note_of(model, error, example.args, example.kwargs)
    return ModelError(f"forward of {where}", wrong, "; ".join(filter(None, (*hints[:1], named))))


def _instead_of_cast(name: str) -> str:
    """Return what helps where a module cannot run with weights in 16 bits."""
    autocast = "take precision=float32 with amp=bfloat16, which is torch.autocast"
    return f"keep this module in float32: {keep_option(name)}; or {autocast}" if name else autocast


def _innermost(model: nn.Module, error: Exception) -> str:
    """Return the dotted name of the module whose code was running; empty for the model itself."""
    names = {id(module): name for name, module in model.named_modules()}
    innermost = ""
    for frame, _ in walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(id(module)):
            innermost = names[id(module)]
    return innermost


@dataclass(frozen=True)
class Forward:
    """The inputs and the output of one forward in words, and its seconds."""

    inputs: str
    output: str
    seconds: float


def run_example(model: nn.Module, example: Example, *, amp: str = "none") -> Forward:
    """Run one forward under autocast to `amp`, and restore the model and its input.

    It runs without gradients or, if it raises so, with them, as a forward that differentiates needs.

    Raises:
        ModelError: the forward raised; names the innermost module and the likely cause.
    """
    inputs = describe([*example.args, *example.kwargs.values()])

    def run() -> Forward:
        with unchanged(model, example.args, example.kwargs):
            begin = time.perf_counter()
            with autocast(amp, device_of([model])):
                output = interruptible(model, *example.args, **example.kwargs)
            seconds, words = time.perf_counter() - begin, describe(output)
        return Forward(inputs, words, seconds)

    try:
        return without_gradients(run)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise explained(model, error, example) from error
