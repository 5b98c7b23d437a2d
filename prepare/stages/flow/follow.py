"""Follow the layout of activations through one forward, predicted or observed, and count what is found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from prepare.core.forward.call import arguments, tensors_in
from prepare.core.forward.compiled import eager_if_compiled, is_compiled
from prepare.core.forward.run_example import explained
from prepare.core.forward.torch_state import Amp, autocast, device_of, read_amp
from prepare.core.forward.unchanged import (
    copy_of,
    real_stand_in,
    unchanged,
    without_gradients,
)
from prepare.core.model.forward_code import forward_code
from prepare.core.model.module_kinds import is_rewritten, operation_of
from prepare.core.model.tensors import lazy_parameter
from prepare.core.utils.process_state import interruptible
from prepare.errors import RefusedError
from prepare.stages.flow.call_sites import CallSite, ModuleStack
from prepare.stages.flow.fake_tensors import Target, explain_failure
from prepare.stages.flow.layout_states import LayoutStates, Operand, Operation
from prepare.stages.flow.layouts import choose_target_layouts
from prepare.stages.flow.operator_watcher import OperatorWatcher, is_followed
from prepare.stages.flow.records import NOT_ASKED, Flow, FlowBuilder

# pytorch#184013
WITHOUT_CUDNN = (
    "cuDNN is switched off: torch predicts channels-last outputs of convolutions whose kernels then return "
    "contiguous ones; observe a forward on the GPU to be sure"
)


def predict(
    model: nn.Module,
    example: Any,
    *,
    wanted: Mapping[int, str] | str | None = None,
    amp: Amp = "none",
    device: torch.device | str | None = None,
) -> Flow:
    """Predict the flow of one forward from shapes and strides, without computing any value.

    Args:
        model: in training or evaluation mode; it is not changed.
        example: a tensor, a tuple of positional or a mapping of named arguments, or an Example.
        wanted: a format, or `{4: "channels_last", 5: "channels_last_3d"}`; by default the layouts of the
            model's convolution weights, see `prepare.stages.flow.layouts`. If none is in channels-last, there
            is no break to find, and a note says that nothing was asked for.
        amp: run the forward under `torch.autocast` to this dtype; casts of autocast keep the layout.
        device: predict for this device, by default that of the model, and `cpu` for a model on the meta
            device. `cuda` need not be here; a note then says what is not known.

    If forward needs a value, or an operation cannot run without data, the flow has the status
    `cannot predict`, the reason, and the events up to that point. torch's shape functions are wrong for a
    few operations; for these only `observe` is right.
    The result holds for the current number of threads: with a single one, torch 2.13 runs 1x1x1
    convolutions of float32 on its reference path, which returns a contiguous tensor.

    Raises:
        ConfigError: `wanted` does not name a layout, or `device` no device.
        RefusedError: `amp` is unknown, or `device` is neither here nor `cuda`.
    """
    amp, watched = read_amp(amp), list[OperatorWatcher]()
    layouts = choose_target_layouts(model, wanted)
    target = Target.of(device_of([model], tensors_in(example)), device)

    def run() -> Flow:
        watched.append(watcher := _watcher(model, layouts, target.device, asked=wanted is not None))
        watcher.as_cuda = target.device != target.runs_on
        if target.note:
            watcher.builder.add_note(target.note)
        if target.device.type == "cuda" and not torch.backends.cudnn.enabled:
            watcher.builder.add_note(WITHOUT_CUDNN)
        if name := lazy_parameter(model):
            return watcher.builder.build(
                "predict", f"{name} has no shape yet; run one forward first"
            )
        watcher.fake = fake = FakeTensorMode(allow_non_fake_inputs=True)

        def stand_in(tensor: Tensor) -> Tensor:
            if device is None and not tensor.is_meta:
                return fake.from_tensor(tensor, static_shapes=True)
            return target.stand_in(fake, tensor)

        _follow(model, example, watcher, (stand_in, stand_in), amp)
        return watcher.builder.build("predict")

    try:
        return without_gradients(run)
    except Exception as error:  # the model's code may raise anything on tensors without data
        watcher = watched[-1]
        if watcher.internal_error or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            raise
        return watcher.builder.build("predict", explain_failure(model, error))


def observe(
    model: nn.Module,
    example: Any,
    *,
    wanted: Mapping[int, str] | str | None = None,
    amp: Amp = "none",
) -> Flow:
    """Observe the flow of one real forward; the arguments are those of `predict`.

    Gradients are enabled only for a forward that differentiates. The model, the example
    and all global state are as before afterwards, see `prepare.core.forward.unchanged`.

    Raises:
        ConfigError: `wanted` does not name a layout.
        RefusedError: `amp` is unknown, or a lazy module has no parameters yet.
        ModelError: the forward raised; names the innermost module.
    """
    amp, watched = read_amp(amp), list[OperatorWatcher]()
    layouts = choose_target_layouts(model, wanted)
    if name := lazy_parameter(model):
        raise RefusedError(name, "this parameter has no shape yet", "run one forward first")

    def run() -> Flow:
        present = device_of([model], tensors_in(example))
        watched.append(watcher := _watcher(model, layouts, present, asked=wanted is not None))
        _follow(model, example, watcher, (real_stand_in, copy_of), amp)
        return watcher.builder.build("observe")

    try:
        return without_gradients(run)
    except Exception as error:
        is_ours = watched[-1].internal_error is not None
        if is_ours or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            raise
        raise explained(model, error) from error


def _watcher(
    model: nn.Module, layouts: dict[int, str], device: torch.device, *, asked: bool
) -> OperatorWatcher:
    builder = FlowBuilder(str(device), layouts)
    if not asked and set(layouts.values()) == {"contiguous"}:
        builder.add_note(NOT_ASKED)
    return OperatorWatcher(ModuleStack(model), LayoutStates(layouts, builder), builder)


def _follow(
    model: nn.Module,
    example: Any,
    watcher: OperatorWatcher,
    stand_ins: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]],
    amp: str,
) -> None:
    """Call the model with stand-ins for its tensors and for those of the example, and watch."""
    hooks = _ModuleHooks(watcher)
    watcher.stack.on_enter, watcher.stack.on_exit = hooks.enter, hooks.exit
    given = arguments(example)
    with eager_if_compiled(model), unchanged(model, given, stand_in=stand_ins[0]) as state:
        for tensor in (*model.parameters(), *model.buffers(), *state.stand_ins.values()):
            watcher.states.register(tensor, "weight", "a parameter")
        args, kwargs = tree_map_only(Tensor, stand_ins[1], given)
        tensors = list(tensors_in([*args, *kwargs.values()]))
        for tensor in tensors:
            watcher.states.register(tensor, "unknown", "the input")
        # The FakeTensorMode is below the watcher: it computes what the watcher dispatches.
        fake = watcher.fake or contextlib.nullcontext()
        # A forward without data is quick, and torch's own code is not safe from an interrupt there.
        call = model if watcher.fake else partial(interruptible, model)
        enabled, cast = torch.is_grad_enabled(), autocast(amp, device_of([model], tensors))
        with watcher.stack, torch.inference_mode(mode=False), torch.set_grad_enabled(enabled):  # noqa: SIM117
            with fake, watcher, cast:
                call(*args, **kwargs)


class _ModuleHooks:
    """Follows a compiled or repaired module as one operation."""

    def __init__(self, watcher: OperatorWatcher) -> None:
        self.watcher = watcher
        # The outermost module that is followed as one operation, its inputs and its call site.
        self._opaque: tuple[nn.Module, list[Tensor], CallSite] | None = None

    def enter(self, module: nn.Module, args: Any) -> None:
        name = self.watcher.stack.name(module) or type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            note = f"{name} is scripted: its operations are followed, but not attributed to its modules"
            self.watcher.builder.add_note(note)
        given = list(tensors_in(args))
        # The forward of a repaired subclass is the user's, whose lines may lose a layout.
        code, compiled = forward_code(module), is_compiled(module)
        repaired = code.repaired and (code.alone or bool(code.replaced_by))
        if (compiled or repaired) and self._opaque is None:
            inputs = [tensor for tensor in given if is_followed(tensor)]
            site = self.watcher.stack.call_site()
            repair = operation_of(module) if is_rewritten(module) else "repair_layout"
            site.operation = "torch.compile" if compiled else repair
            self._opaque = (module, inputs, site)
            self.watcher.in_compiled, self.watcher.in_repaired = compiled, repaired
        if compiled:
            self.watcher.builder.add_note(f"{name} is compiled: its operations cannot be followed")

    def exit(self, module: nn.Module, output: Any) -> None:
        if self._opaque is not None and self._opaque[0] is module:
            _, inputs, site = self._opaque
            outputs = [tensor for tensor in tensors_in(output) if is_followed(tensor)]
            self.watcher.in_compiled = self.watcher.in_repaired = False
            self._opaque = None
            states = self.watcher.states
            operands = [Operand(f"input {i}", t, states.of(t)) for i, t in enumerate(inputs)]
            states.follow(Operation("compile", site), operands, outputs)
