"""Make a copy of a prepared model that can be captured: only what the format can hold is left in it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.compiled import is_compiled
from prepare.core.forward.input_formatter import FormatHook, Formatter
from prepare.core.forward.nested import NUMBERS, map_tensors, numbers_as_tensors, tensors_in
from prepare.core.forward.unchanged import unchanged
from prepare.core.model.replaced_method import replaced_methods
from prepare.pipeline.collect_wants import format_steps
from prepare.registry import STEPS
from prepare.stages.export.layout_checks import contiguous
from prepare.stages.export.records import TakenOut

if TYPE_CHECKING:
    from prepare.core.forward.call import Call
    from prepare.pipeline import Pipeline
    from prepare.stages.export.exporter import Exporter

_CONTIGUOUS_WEIGHTS = (
    "the format's operators take contiguous weights only; their values are the same"
)
_NO_LAYOUTS = "this format chooses layouts itself, and torch's own modules compute the same"


class WithFormat(nn.Module):
    """A model with the conversion of its inputs, which is captured together with the model.

    It returns tensors in tuples, lists and dicts: the process that loads an artefact need not know the
    classes of another package.
    """

    def __init__(self, model: nn.Module, formatter: Formatter, exporter: Exporter) -> None:
        super().__init__()
        self.model = model
        self.strides = FormatHook.step in exporter.keeps

        # torch.export names the inputs by the signature of this function.
        @wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            def convert(tensor: Tensor) -> Tensor:
                return _converted(tensor, formatter, strides=self.strides)

            output = model(*map_tensors(convert, args), **map_tensors(convert, kwargs))
            return _plain(output, exporter)

        # The signature of the bound method: `wraps` copies that of a function with `self`, if it was set.
        forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
        self.forward = forward


def _converted(tensor: Tensor, formatter: Formatter, *, strides: bool) -> Tensor:
    """Convert dtype and strides by operations whose result does not depend on the strides at capture."""
    if formatter.dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(formatter.dtype)
    wanted = formatter.format_of(tensor) if strides else None
    if wanted is None:
        return tensor
    name = "contiguous_format" if wanted == "contiguous" else wanted
    return tensor.contiguous(memory_format=getattr(torch, name))


def take_out(model: nn.Module, exporter: Exporter, pipeline: Pipeline) -> Iterator[TakenOut]:
    """Take out of `model`, in place, each step that cannot go along, and yield what was done."""
    if any(isinstance(hook, FormatHook) for hook in model._forward_pre_hooks.values()):
        FormatHook.remove(model)
        reason = "a hook is not captured; the conversion of inputs is put into the program"
        if FormatHook.step not in exporter.keeps:
            reason = "a hook is not captured; the program converts the dtype of inputs, not their strides"
        yield TakenOut(step=FormatHook.step, modules=("",), reason=reason)
    compiled = [name for name, module in model.named_modules() if is_compiled(module)]
    compiling = STEPS["compile"]
    if compiled or compiling.name in pipeline.steps:
        for module in model.modules():
            compiling.undo(module)
        reason = "a compiled call is not captured; the exporter compiles, or the format's runtime"
        yield TakenOut(step=compiling.name, modules=tuple(compiled), reason=reason)
    for step, cls in STEPS.items():
        if step in exporter.keeps or not cls.only_layouts:
            continue
        before = {name: _code_of(module) for name, module in model.named_modules()}
        cls.undo(model)
        after = dict(model.named_modules())
        changed = tuple(name for name, code in before.items() if _code_of(after[name]) != code)
        if changed:
            yield TakenOut(step=step, modules=changed, reason=_NO_LAYOUTS)
    if exporter.contiguous_weights and (changed := _made_contiguous(model)):
        step = ", ".join(format_steps(pipeline.steps.values(), model)) or "channels-last weights"
        yield TakenOut(step=step, modules=changed, reason=_CONTIGUOUS_WEIGHTS)


def _code_of(module: nn.Module) -> tuple[Any, ...]:
    """Return what a step may have changed of the code that a module runs."""
    return type(module), *dict(replaced_methods(module))


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


def _plain(output: Any, exporter: Exporter) -> Any:
    """Return an output in a form that the format can hold; the same object if it is so already."""
    if exporter.only_tensors:
        output = numbers_as_tensors(output)
    return output if _is_plain(output) else tuple(tensors_in(numbers_as_tensors(output)))


def _is_plain(value: Any) -> bool:
    """Return whether an output consists of tensors, numbers, tuples, lists and dicts only."""
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (Tensor, str, *NUMBERS))


def with_format(
    model: nn.Module, pipeline: Pipeline, call: Call, exporter: Exporter
) -> tuple[nn.Module, bool]:
    """Return the model with the conversion of its inputs and outputs, and whether inputs are converted.

    It is the model itself if nothing is to be converted.
    """
    formatter = pipeline.input_format()._formatter
    wrapped = WithFormat(model, formatter, exporter)
    if formatter.dtype is not None or (wrapped.strides and formatter.formats):
        return wrapped, True
    with unchanged(model, call.args, call.kwargs), torch.no_grad():
        output = model(*call.args, **call.kwargs)
        plain = _plain(output, exporter) is output
    return (model if plain else wrapped), False
