"""Follow the layout of activations through one forward, predicted or observed, and count what is found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from prepare.core.forward.call import arguments, tensors_in
from prepare.core.forward.compiled import eager_if_compiled, is_compiled
from prepare.core.forward.explain_error import explained
from prepare.core.forward.torch_state import Amp, autocast, device_of, read_amp
from prepare.core.forward.unchanged import (
    copy_of,
    real_stand_in,
    unchanged,
    without_gradients,
)
from prepare.core.model.call_issues import CallIssues, describe
from prepare.core.model.forward_code import forward_code
from prepare.core.model.module_kinds import is_rewritten, operation_of
from prepare.core.model.tensors import lazy_parameter
from prepare.core.utils.process_state import interruptible
from prepare.errors import RefusedError
from prepare.stages.flow.call_sites import CallSite, ModuleStack
from prepare.stages.flow.fake_tensors import Target, explain_failure
from prepare.stages.flow.flow_builder import FlowBuilder
from prepare.stages.flow.layout_states import LayoutStates
from prepare.stages.flow.layouts import choose_target_layouts, layout_of
from prepare.stages.flow.operator_watcher import OperatorWatcher, is_followed
from prepare.stages.flow.records import NOT_ASKED, Flow

# pytorch#184013
WITHOUT_CUDNN = (
    "cuDNN is switched off: torch predicts channels-last outputs of convolutions whose kernels then return "
    "contiguous ones; observe a forward on the GPU to be sure"
)


def predict(
    model: nn.Module,
    example: Any,
    *,
    backward: bool = False,
    wanted: Mapping[int, str] | str | None = None,
    amp: Amp = "none",
    device: torch.device | str | None = None,
) -> Flow:
    """Predict the flow of one forward from shapes and strides, without computing any value.

    Args:
        model: in training or evaluation mode; it is not changed.
        example: a tensor, a tuple of positional or a mapping of named arguments, or an Example.
        backward: also follow the gradients of the sum of all outputs.
        wanted: a format, or `{4: "channels_last", 5: "channels_last_3d"}`; by default the layouts of the
            model's convolution weights, see `prepare.stages.flow.layouts`. If none is in channels-last, there
            is no break to find, and a note says that nothing was asked for.
        amp: run the forward under `torch.autocast` to this dtype; casts of autocast keep the layout.
        device: predict for this device, by default that of the model, and `cpu` for a model on the meta
            device. `cuda` need not be here; a note then says what is not known.

    If forward needs a value, or an operation cannot run without data, the flow has the status
    `cannot predict`, the reason, and the events up to that point. torch's shape functions are wrong for a
    few operations (in backward ReLU6); for these only `observe` is right.
    The result holds for the current number of threads: with a single one, torch 2.13 runs 1x1x1
    convolutions of float32 on its reference path, which returns a contiguous tensor.

    Raises:
        ConfigError: `wanted` does not name a layout, or `device` no device.
        RefusedError: `amp` is unknown, or `device` is neither here nor `cuda`.
    """
    amp = read_amp(amp)

    def run() -> Flow:
        watcher = _watcher_for(model, wanted)
        layouts, builder = watcher.states.wanted, watcher.builder
        present = device_of([model], tensors_in(example))
        target = Target.of(present, device)
        watcher.as_cuda, builder.device = target.is_elsewhere, str(target.device)
        if target.note:
            builder.add_note(target.note)
        if target.device.type == "cuda" and not torch.backends.cudnn.enabled:
            builder.add_note(WITHOUT_CUDNN)
        if name := lazy_parameter(model):
            reason = f"{name} has no shape yet; run one forward first"
            return builder.build(model, "predict", layouts, reason)
        watcher.fake = fake = FakeTensorMode(allow_non_fake_inputs=True)

        def stand_in(tensor: Tensor) -> Tensor:
            if device is None and not tensor.is_meta:
                return fake.from_tensor(tensor, static_shapes=True)
            return target.stand_in(fake, tensor)

        reason = ""
        try:
            with _watching(model, example, watcher, stand_in):
                inputs = tree_map_only(Tensor, stand_in, arguments(example))
                _run(model, inputs, watcher, backward=backward, fake=fake, amp=amp)
        except Exception as error:  # the model's code may raise anything on tensors without data
            if watcher.internal_error or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
                raise
            reason = explain_failure(model, error)
        return builder.build(model, "predict", layouts, reason)

    if backward:
        return run()
    with torch.no_grad():
        flow = run()
    if flow.reason:  # a forward that differentiates cannot run so
        with torch.enable_grad():
            again = run()
        return flow if again.reason else again
    return flow


def observe(
    model: nn.Module,
    example: Any,
    *,
    backward: bool = False,
    wanted: Mapping[int, str] | str | None = None,
    amp: Amp = "none",
) -> Flow:
    """Observe the flow of one real forward; the arguments are those of `predict`.

    Gradients are enabled only with `backward`, and for a forward that differentiates. The model, the example
    and all global state are as before afterwards, see `prepare.core.forward.unchanged`.

    Raises:
        ConfigError: `wanted` does not name a layout.
        RefusedError: `amp` is unknown, or a lazy module has no parameters yet.
        ModelError: the forward or backward raised; names the innermost module.
    """
    amp = read_amp(amp)

    def run() -> Flow:
        watcher = _watcher_for(model, wanted)
        watcher.builder.device = str(device_of([model], tensors_in(example)))
        if name := lazy_parameter(model):
            raise RefusedError(name, "this parameter has no shape yet", "run one forward first")
        try:
            with _watching(model, example, watcher, real_stand_in):
                inputs = tree_map_only(Tensor, copy_of, arguments(example))
                _run(model, inputs, watcher, backward=backward, fake=None, amp=amp)
        except Exception as error:
            if watcher.internal_error or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
                raise
            raise explained(model, error) from error
        return watcher.builder.build(model, "observe", watcher.states.wanted)

    return run() if backward else without_gradients(run)


def _watcher_for(model: nn.Module, wanted: Mapping[int, str] | str | None) -> OperatorWatcher:
    layouts, builder = choose_target_layouts(model, wanted), FlowBuilder()
    if wanted is None and set(layouts.values()) == {"contiguous"}:
        builder.add_note(NOT_ASKED)
    return OperatorWatcher(ModuleStack(model), LayoutStates(layouts, builder), builder)


@contextmanager
def _watching(
    model: nn.Module, example: Any, watcher: OperatorWatcher, stand_in: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Set up a run: isolated global state, stand-ins for the model's tensors, hooks on its modules."""
    hooks = _ModuleHooks(watcher, CallIssues(watcher.builder.device.partition(":")[0]))
    watcher.stack.on_enter, watcher.stack.on_exit = hooks.enter, hooks.exit
    with ExitStack() as contexts:
        contexts.enter_context(eager_if_compiled(model))
        state = contexts.enter_context(unchanged(model, arguments(example), stand_in=stand_in))
        for tensor in (*model.parameters(), *model.buffers()):
            watcher.states.register(tensor, "weight", "a parameter")
        for tensor in state.stand_ins.values():
            watcher.states.register(tensor, "weight", "a parameter")
        contexts.enter_context(watcher.stack)
        yield


def _run(
    model: nn.Module,
    inputs: tuple[tuple, dict],
    watcher: OperatorWatcher,
    *,
    backward: bool,
    fake: FakeTensorMode | None,
    amp: str,
) -> None:
    args, kwargs = inputs
    given = list(tensors_in([*args, *kwargs.values()]))
    for tensor in given:
        watcher.states.register(tensor, "unknown", "the input")
    # A forward without data is quick, and torch's own code is not safe from an interrupt there.
    call = _at_once if fake else interruptible
    # The FakeTensorMode is below the watcher: it computes what the watcher dispatches.
    enabled = backward or torch.is_grad_enabled()
    with torch.inference_mode(mode=False), torch.set_grad_enabled(enabled):
        cast = autocast(amp, device_of([model], given))
        with fake or contextlib.nullcontext(), watcher, cast:
            output = call(model, *args, **kwargs)
        if not backward:
            return
        roots = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if not roots:
            watcher.builder.add_note("no output requires a gradient, so no backward was followed")
            return
        with fake or contextlib.nullcontext():
            gradients = [torch.ones_like(root) for root in roots]
            for gradient in gradients:
                state = "in_layout" if watcher.states.is_in_layout(gradient) else "unknown"
                watcher.states.register(gradient, state, "the loss", backward=True)
            # torch.autograd.grad does not work here: reentrant checkpoints refuse it.
            with watcher:
                call(torch.autograd.backward, roots, gradients)


def _at_once(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


class _ModuleHooks:
    """Records each module's output layouts, and follows a compiled or repaired module as one operation.

    A call that has a known issue because of its size becomes a note.
    """

    def __init__(self, watcher: OperatorWatcher, issues: CallIssues) -> None:
        self.watcher, self.issues = watcher, issues
        # The outermost module that is followed as one operation, its inputs and its call site.
        self._opaque: tuple[nn.Module, list[Tensor], CallSite] | None = None

    def enter(self, module: nn.Module, args: Any) -> None:
        name = self.watcher.stack.name(module) or type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            note = f"{name} is scripted: its operations are followed, but not attributed to its modules"
            self.watcher.builder.add_note(note)
        given = list(tensors_in(args))
        for issue in self.issues.of(module, given[0].shape) if given else ():
            self.watcher.builder.add_note(f"{name} is {describe(issue)}")
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
        outputs = [tensor for tensor in tensors_in(output) if is_followed(tensor)]
        if self._opaque is not None and self._opaque[0] is module:
            _, inputs, site = self._opaque
            self.watcher.in_compiled = self.watcher.in_repaired = False
            self._opaque = None
            self.watcher.follow_module(site, inputs, outputs)
        name = self.watcher.stack.name(module)
        if name is not None and self._is_recorded():
            words = [word for word in map(layout_of, outputs) if word != "none"]
            self.watcher.builder.add_module_call(name, words)

    def _is_recorded(self) -> bool:
        # In backward a checkpointed segment runs again; its modules were recorded in forward.
        return torch._C._current_autograd_node() is None and not self.watcher.in_compiled
