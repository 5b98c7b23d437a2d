"""Follow the layout of activations through one forward, predicted or observed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from prepare.core.forward.compiled import eager_if_compiled, is_compiled
from prepare.core.forward.explain_error import explained
from prepare.core.forward.nested import arguments, tensors_in
from prepare.core.forward.stand_ins import (
    copy_of,
    lazy_parameter,
    real_stand_in,
    stand_ins_for,
    standing_in,
)
from prepare.core.forward.torch_state import isolated
from prepare.core.model.repair_marker import is_repaired
from prepare.errors import RefusedError
from prepare.flow.aggregate import Tally
from prepare.flow.call_sites import ModuleStack, Place
from prepare.flow.fake_tensors import reason_for
from prepare.flow.layout_states import States
from prepare.flow.layouts import layout_of
from prepare.flow.operator_watcher import Watcher, is_followed
from prepare.flow.target_layouts import wanted_layouts

if TYPE_CHECKING:
    from prepare.flow.records import Flow


def predict(
    model: nn.Module, example: Any, *, backward: bool, wanted: Mapping[int, str] | None
) -> Flow:
    """See `prepare.flow.predict`."""
    layouts, tally = wanted_layouts(model, wanted), Tally()
    watcher = Watcher(ModuleStack(model), States(layouts, tally), tally)
    if name := lazy_parameter(model):
        reason = f"{name} has no shape yet; run one forward first"
        return tally.flow(model, "predict", layouts, reason)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # Its answers are kept for the whole process, and a convolution's depends on the number of threads.
    fake.cache_enabled = False

    def stand_in(tensor: Tensor) -> Tensor:
        return fake.from_tensor(tensor, static_shapes=True)

    reason = ""
    try:
        with _watching(model, watcher, stand_in):
            given = stand_ins_for(arguments(example), stand_in)
            _run(model, given, watcher, backward=backward, fake=fake)
    except (
        Exception
    ) as error:  # the model's own code met tensors without data, and may raise anything
        if watcher.fault or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            raise
        reason = reason_for(model, error)
    return tally.flow(model, "predict", layouts, reason)


def observe(
    model: nn.Module, example: Any, *, backward: bool, wanted: Mapping[int, str] | None
) -> Flow:
    """See `prepare.flow.observe`."""
    layouts, tally = wanted_layouts(model, wanted), Tally()
    watcher = Watcher(ModuleStack(model), States(layouts, tally), tally)
    if name := lazy_parameter(model):
        raise RefusedError(name, "this parameter has no shape yet", "run one forward first")
    try:
        with _watching(model, watcher, real_stand_in):
            given = stand_ins_for(arguments(example), copy_of)
            _run(model, given, watcher, backward=backward, fake=None)
    except Exception as error:
        if watcher.fault or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            raise
        raise explained(model, error) from error
    return tally.flow(model, "observe", layouts)


@contextmanager
def _watching(model: nn.Module, watcher: Watcher, stand_in: Any) -> Iterator[None]:
    """Everything that is set up for a run, and set back after it."""
    outputs = _Outputs(watcher)
    watcher.stack.on_enter, watcher.stack.on_exit = outputs.enter, outputs.exit
    with ExitStack() as entered:
        entered.enter_context(isolated())
        entered.enter_context(eager_if_compiled(model))
        for tensor in (*model.parameters(), *model.buffers()):
            watcher.states.hold(tensor, "weight", "a parameter")
        for tensor in entered.enter_context(standing_in(model, stand_in)).values():
            watcher.states.hold(tensor, "weight", "a parameter")
        entered.enter_context(watcher.stack)
        yield


def _run(
    model: nn.Module,
    given: tuple[tuple, dict],
    watcher: Watcher,
    *,
    backward: bool,
    fake: FakeTensorMode | None,
) -> None:
    args, kwargs = given
    for tensor in tensors_in([*args, *kwargs.values()]):
        watcher.states.hold(tensor, "none", "the input")
    # A FakeTensorMode below the watcher: it answers, the watcher asks.
    with torch.inference_mode(mode=False), torch.set_grad_enabled(backward):
        with fake or contextlib.nullcontext(), watcher:
            output = model(*args, **kwargs)
        if not backward:
            return
        roots = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if not roots:
            watcher.tally.note("no output needs a gradient, so there was no backward to follow")
            return
        with fake or contextlib.nullcontext():
            gradients = [torch.ones_like(root) for root in roots]
            for gradient in gradients:
                state = "inside" if watcher.states.is_inside(gradient) else "none"
                watcher.states.hold(gradient, state, "the loss", backward=True)
            # torch.autograd.grad would not do: reentrant checkpoints refuse it.
            with watcher:
                torch.autograd.backward(roots, gradients)


class _Outputs:
    """Notes what each module gave, and takes those that are compiled or repaired as a whole."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self._whole: tuple[nn.Module, list[Tensor], Place] | None = None

    def enter(self, module: nn.Module, args: Any) -> None:
        name = self._name(module)
        if isinstance(module, torch.jit.ScriptModule):
            text = f"{name} is scripted: its operations are seen, its modules are not told apart"
            self.watcher.tally.note(text)
        compiled, repaired = is_compiled(module), is_repaired(module)
        if (compiled or repaired) and self._whole is None:
            given = [tensor for tensor in tensors_in(args) if is_followed(tensor)]
            place = self.watcher.stack.place()
            place.operation = "torch.compile" if compiled else "repair_layout"
            self._whole = (module, given, place)
            self.watcher.hidden, self.watcher.inside = compiled, repaired
        if compiled:
            self.watcher.tally.note(f"{name} is compiled: what happens inside cannot be seen")

    def exit(self, module: nn.Module, output: Any) -> None:
        gave = [tensor for tensor in tensors_in(output) if is_followed(tensor)]
        if self._whole is not None and self._whole[0] is module:
            _, given, place = self._whole
            self.watcher.hidden = self.watcher.inside = False
            self._whole = None
            self.watcher.passed(place, given, gave)
        name = self.watcher.stack.name(module)
        # In backward a checkpointed segment runs again, and says nothing new.
        if (
            name is not None
            and torch._C._current_autograd_node() is None
            and not self.watcher.hidden
        ):
            layouts = (layout_of(tuple(tensor.shape), tensor.stride()) for tensor in gave)
            self.watcher.tally.gave(name, [word for word in layouts if word != "none"])

    def _name(self, module: nn.Module) -> str:
        return self.watcher.stack.name(module) or type(module).__name__
