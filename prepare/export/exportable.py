"""Make a copy of a prepared model that can be captured: take out what the artefact cannot hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.compiled import is_compiled
from prepare.core.forward.input_formatter import FormatHook
from prepare.core.forward.nested import map_tensors, tensors_in
from prepare.export.input_layouts import contiguous
from prepare.export.records import TakenOut
from prepare.step import TensorStep
from prepare.steps import compile, keep_layout, repair_layout  # noqa: A004
from prepare.steps.input_format import InputFormat

if TYPE_CHECKING:
    from prepare.core.forward.call import Call
    from prepare.core.forward.input_formatter import Formatter
    from prepare.export.exporter import Exporter
    from prepare.pipeline import Pipeline

_CONTIGUOUS_WEIGHTS = (
    "the format's operators take contiguous weights only; their values are the same"
)
_NO_LAYOUTS = "this format chooses layouts itself, and torch's own modules compute the same"
_UNDO: dict[str, Callable[[nn.Module], None]] = {
    "repair_layout": repair_layout.undo,
    "keep_layout": keep_layout.undo,
}


class WithFormat(nn.Module):
    """A model with the conversion of its inputs, which is captured together with the model.

    It returns tensors in tuples, lists and dicts: the process that loads an artefact need not know the
    classes of another package.
    """

    def __init__(self, model: nn.Module, formatter: Formatter, *, strides: bool) -> None:
        super().__init__()
        self.model = model

        # torch.export names the inputs by the signature of this function.
        @wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            def convert(tensor: Tensor) -> Tensor:
                return _converted(tensor, formatter, strides=strides)

            output = model(*map_tensors(convert, args), **map_tensors(convert, kwargs))
            return output if is_plain_output(output) else tuple(tensors_in(output))

        self.forward = forward


def _converted(tensor: Tensor, formatter: Formatter, *, strides: bool) -> Tensor:
    """Convert dtype and strides by operations whose result does not depend on the strides at capture."""
    if formatter.dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(formatter.dtype)
    wanted = formatter._format(tensor.dim()) if strides else None
    if wanted is None or tensor.layout is not torch.strided:
        return tensor
    formats = {"contiguous": torch.contiguous_format}
    return tensor.contiguous(memory_format=formats.get(wanted) or getattr(torch, wanted))


def take_out(model: nn.Module, exporter: Exporter, pipeline: Pipeline) -> Iterator[TakenOut]:
    """Take out of `model`, in place, each step that cannot go along, and yield what was done."""
    kept = set(exporter.keeps)
    if any(isinstance(hook, FormatHook) for hook in model._forward_pre_hooks.values()):
        FormatHook.remove(model)
        reason = "a hook is not captured; the conversion of inputs is put into the program"
        if "input_format" not in kept:
            reason = "a hook is not captured; the program converts the dtype of inputs, not their strides"
        yield TakenOut(step="input_format", modules=("",), reason=reason)
    compiled = [name for name, module in model.named_modules() if is_compiled(module)]
    if compiled or "compile" in pipeline.steps:
        for module in model.modules():
            compile.undo(module)
        reason = "a compiled call is not captured; the exporter compiles, or the format's runtime"
        yield TakenOut(step="compile", modules=tuple(compiled), reason=reason)
    for step, undo in _UNDO.items():
        if step in kept:
            continue
        before = {name: type(module) for name, module in model.named_modules()}
        undo(model)
        after = dict(model.named_modules())
        changed = tuple(name for name, cls in before.items() if type(after[name]) is not cls)
        if changed:
            yield TakenOut(step=step, modules=changed, reason=_NO_LAYOUTS)
    if exporter.contiguous_weights and (changed := _made_contiguous(model)):
        steps = [name for name, step in pipeline.steps.items() if _lays_out_weights(step)]
        step = ", ".join(steps) or "channels-last weights"
        yield TakenOut(step=step, modules=changed, reason=_CONTIGUOUS_WEIGHTS)


def _lays_out_weights(step: Any) -> bool:
    return isinstance(step, TensorStep) and hasattr(step, "memory_format")


def _made_contiguous(model: nn.Module) -> tuple[str, ...]:
    """Make all parameters and buffers contiguous, and return the names of the modules that changed."""
    changed: dict[str, None] = {}
    for name, module in model.named_modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            fresh = contiguous(tensor)
            if tensor.layout is torch.strided and fresh.stride() != tensor.stride():
                tensor.data = fresh
                changed[name] = None
    return tuple(changed)


def is_plain_output(value: Any) -> bool:
    """Return whether an output consists of tensors, numbers, tuples, lists and dicts only."""
    if type(value) in (tuple, list):
        return all(map(is_plain_output, value))
    if type(value) is dict:
        return all(map(is_plain_output, value.values()))
    return isinstance(value, Tensor | int | float | str | None)


def with_format(
    model: nn.Module, pipeline: Pipeline, call: Call, *, strides: bool
) -> tuple[nn.Module, bool]:
    """Return the model with the conversion of its inputs and outputs, and whether inputs are converted.

    It is the model itself if nothing is to be converted.
    """
    steps = list(pipeline.steps.values())
    declared = next((step for step in steps if isinstance(step, InputFormat)), InputFormat())
    formatter = declared.bind(steps)._formatter
    converts = formatter.dtype is not None or bool(strides and formatter.formats)
    wrapped = WithFormat(model, formatter, strides=strides)
    if converts:
        return wrapped, True
    with torch.no_grad():
        plain = is_plain_output(model(*call.args, **call.kwargs))
    return (model if plain else wrapped), False


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first parameter; the CPU without one."""
    return next((each.device for each in model.parameters()), torch.device("cpu"))
