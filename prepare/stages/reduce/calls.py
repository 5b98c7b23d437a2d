"""Collect the calls of torch's own modules in a forward, as plain data that a script can repeat."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.call import call_of
from prepare.core.model.memory_format import satisfied
from prepare.core.model.module_kinds import class_before_repair
from prepare.core.model.tensors import name_of, named_modules
from prepare.stages.reduce.records import ALLOWED, ModuleCall
from prepare.stages.reduce.script import plain_options
from prepare.stages.verify.execution.hooks import OutputHook
from prepare.stages.verify.execution.single_run import run_model, same_stand_in
from prepare.stages.verify.inputs import user_call

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline

_SKIPPED = (nn.modules.dropout._DropoutNd, nn.Identity, nn.Flatten, nn.Unflatten)


def collect_calls(
    model: nn.Module, batch: Any, *, pipeline: Pipeline | None, training: bool
) -> list[ModuleCall]:
    """Return the calls of a forward of the prepared model in the order of execution, equal ones once."""
    collector = _Collector(model, training=training)
    call = call_of(batch).map(Tensor.detach)
    call = call if pipeline is None else user_call(call, model, pipeline)
    flags = {name: module.training for name, module in model.named_modules()}
    run_model(model, call, same_stand_in, flags=flags, backward=False, context=collector)
    return collector.calls


class _Collector(OutputHook):
    """While entered, collects the calls of modules that a script can repeat."""

    def __init__(self, model: nn.Module, *, training: bool) -> None:
        self.calls: list[ModuleCall] = []
        self._training = training
        self._names = {id(module): name for name, module in named_modules(model)}

    def on_output(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._names.get(id(module))
        one = len(args) == 1 and isinstance(args[0], Tensor) and isinstance(output, Tensor)
        is_leaf = next(module.children(), None) is None
        if name is None or not (is_leaf and one and output.is_floating_point()):
            return
        found = call_of_module(name, module, args[0], output, training=self._training)
        if found is not None and found not in self.calls:
            self.calls.append(found)


def call_of_module(
    name: str, module: nn.Module, given: Tensor, output: Tensor, *, training: bool
) -> ModuleCall | None:
    """Return a call as plain data; None if a script with torch alone cannot repeat it."""
    cls = class_before_repair(type(module))
    dtype = name_of(max((given.dtype, output.dtype), key=_coarseness))
    if getattr(nn, cls.__name__, None) is not cls or isinstance(module, _SKIPPED):
        return None
    options = _options(cls, module)
    if options is None or dtype not in ALLOWED or given.numel() < 2:
        return None
    values = given.detach().double()
    return ModuleCall(
        name=name,
        kind=cls.__name__,
        arguments=options[0],
        options=options[1],
        shape=tuple(given.shape),
        format=_format(given, getattr(module, "weight", None)),
        dtype=dtype,
        device=name_of(given.device),
        training=training,
        mean=_rounded(values.mean().item()),
        deviation=_rounded(values.std().item()) or 1.0,
    )


def _coarseness(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _format(given: Tensor, weight: Any) -> str:
    """Return the channels-last format of the input, or else of the weight; contiguous without one."""
    for tensor in (given, weight):
        if isinstance(tensor, Tensor) and tensor.dim() == given.dim():
            names = satisfied(tuple(tensor.shape), tensor.stride())
            if names and names[0] != "contiguous":
                return names[0]
    return "contiguous"


def _options(cls: type, module: nn.Module) -> tuple[Any, Any] | None:
    """Return the arguments without a default and the changed options of a constructor."""
    required, changed = {}, {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if name in ("device", "dtype", "args", "kwargs"):
            continue
        value = getattr(module, name, parameter.default)
        if isinstance(value, Tensor) or (name == "bias" and value is None):
            value = value is not None
        if isinstance(value, list | torch.Size):
            value = tuple(value)
        if isinstance(value, tuple) and len(set(value)) == 1 and name != "normalized_shape":
            value = value[0]
        if parameter.default is inspect.Parameter.empty:
            required[name] = value
        elif value != parameter.default:
            changed[name] = value
    if not plain_options(required | changed):
        return None
    return tuple(required.items()), tuple(changed.items())


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")
