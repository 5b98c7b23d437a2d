"""Record the call of every module in one run, and run a module's own code again, alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from prepare.core.forward.autocast import autocast, device_of
from prepare.core.forward.call import Call
from prepare.core.forward.nested import map_tensors, tensors_in
from prepare.core.forward.unchanged import ModelState, unchanged
from prepare.core.utils.process_state import held_interrupts, interruptible
from prepare.stages.verify.execution.determinism import DeterministicMode, Float64Default
from prepare.stages.verify.execution.hooks import repair_convolutions
from prepare.stages.verify.execution.single_run import RunResult, random_gradient, seed_everything

# A function of the call, the module and its arguments, which returns the outputs.
_Handler = Callable[[Callable[[], Any], nn.Module, Call], Any]
# Tensors and their copies, by id and version: a tensor that is later changed in place keeps its values.
Copies = dict[tuple[int, int], tuple[Tensor, Tensor]]


class NotAloneError(Exception):
    """A module's own code cannot be run alone; the message says why."""


@dataclass
class RecordedCall:
    """One call of a module, with copies of its arguments and outputs.

    `output_gradients` are those of its output tensors, `input_gradients` those that the module, run alone,
    returned for its argument tensors; both in order. `children` are the calls that its own code made.
    """

    module: str
    arguments: Call
    outputs: Any = None
    output_gradients: dict[int, Tensor] = field(default_factory=dict)
    input_gradients: list[Tensor | None] = field(default_factory=list)
    children: list[RecordedCall] = field(default_factory=list)

    def keep_outputs(
        self, output: Any, copy: Callable[[Tensor], Tensor], *, gradients: bool = True
    ) -> None:
        """Record what the call returned, and the gradients of that when they arrive."""
        self.outputs = map_tensors(copy, output)
        for index, tensor in enumerate(tensors_in(output) if gradients else ()):
            if tensor.requires_grad:
                tensor.register_hook(partial(keep_gradient, self.output_gradients, index))

    def changed(self, change: Callable[[Tensor], Tensor]) -> RecordedCall:
        """Return this call with `change` applied once to each argument and each output of a child."""
        changed: dict[int, Tensor] = {}

        def once(tensor: Tensor) -> Tensor:
            if id(tensor) not in changed:
                changed[id(tensor)] = change(tensor.detach()).requires_grad_(tensor.requires_grad)
            return changed[id(tensor)]

        children = [
            replace(child, outputs=map_tensors(once, child.outputs)) for child in self.children
        ]
        return replace(self, arguments=self.arguments.map(once), children=children)

    def results(self) -> RunResult:
        """Return the outputs of the recorded run, under the names that a `LoneRun` gives them."""
        roots = [(f"input of {child.module}", child.arguments.tensors()) for child in self.children]
        roots.append(("output", list(tensors_in(self.outputs))))
        result, count = RunResult(), 0
        for name, tensors in roots:
            for index, tensor in enumerate(tensors):
                result.outputs[_root_name(name, count, index)] = tensor.detach()
                count += 1
        return result


class CallInterceptor:
    """While entered, gives every call of a module to `handle`; torch has no hook that can replace a call.

    It is entered once for many runs: each change of `Module.__call__` costs 2 ms with large libraries.
    """

    def __init__(self) -> None:
        self.handle: _Handler | None = None
        self._original, self._thread = nn.Module.__call__, threading.get_ident()

    def __enter__(self) -> Self:
        original = self._original

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.handle is None or threading.get_ident() != self._thread:
                return original(module, *args, **kwargs)
            return self.handle(
                lambda: original(module, *args, **kwargs), module, Call(args, kwargs)
            )

        nn.Module.__call__ = call  # type: ignore[method-assign]
        return self

    def __exit__(self, *raised: object) -> None:
        nn.Module.__call__ = self._original  # type: ignore[method-assign]

    @contextlib.contextmanager
    def handling(self, handle: _Handler) -> Iterator[None]:
        """Give calls to `handle` inside the block."""
        self.handle = handle
        try:
            yield
        finally:
            self.handle = None


class CallRecorder:
    """While entered, records the calls of all modules of a model; `calls` holds children before callers.

    With `forward_only` the run keeps no graph and no gradients, which takes a third of the memory; modules
    then run alone with random gradients.
    """

    def __init__(
        self, model: nn.Module, interceptor: CallInterceptor, *, forward_only: bool = False
    ) -> None:
        self.calls: list[RecordedCall] = []
        self._interceptor, self._forward_only = interceptor, forward_only
        self._names = {id(module): name for name, module in model.named_modules()}
        self._running: list[RecordedCall] = []
        self._copies: Copies = {}
        self._patch = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._patch.enter_context(self._interceptor.handling(self._record))
        self._patch.enter_context(torch.set_grad_enabled(not self._forward_only))
        return self

    def __exit__(self, *raised: object) -> None:
        self._patch.close()
        self._copies.clear()

    def _record(self, run: Callable[[], Any], module: nn.Module, arguments: Call) -> Any:
        name = self._names.get(id(module))
        if name is None or _is_in_backward():  # a checkpointed segment runs again in backward
            return run()
        copy = partial(copy_once, self._copies, differentiable=self._forward_only)
        call = RecordedCall(name, arguments.map(copy))
        self._running.append(call)
        try:
            output = run()
        finally:
            self._running.pop()
        call.keep_outputs(output, copy)
        if self._running:
            self._running[-1].children.append(call)
        self.calls.append(call)
        return output


@dataclass
class LoneRun:
    """Runs one module's own code: calls of its children return what was recorded, so only itself is run.

    `module` is the module in either model, `names` the names of that model's modules by id. `stand_in`
    converts its tensors, `convert` the recorded ones, into the dtype and layout of the run. The forward runs
    under autocast to `amp`, in a `scope` that leaves the module as it was.
    """

    module: nn.Module
    names: dict[int, str]
    interceptor: CallInterceptor
    stand_in: Callable[[Tensor], Tensor]
    convert: Callable[[Tensor], Tensor]
    dtype: torch.dtype | None = None
    repair: bool = False
    amp: str = "none"
    scope: Callable[..., contextlib.AbstractContextManager[ModelState]] = unchanged
    is_random: bool = field(default=False, init=False)
    _leaves: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)
    _roots: list[tuple[str, Tensor, Tensor | None]] = field(default_factory=list, init=False)
    _seeds: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False)

    def run(self, call: RecordedCall, *, backward: bool) -> RunResult:
        """Return outputs and gradients; the inputs of children count as outputs, their outputs as inputs.

        Raises:
            NotAloneError: its own code calls its children in another way than in the recorded run.
        """
        own = _own_tensors(self.module, {child.module for child in call.children}, self.names)
        # A checkpointed segment of its own code runs again in backward.
        children, again = list(call.children), list(call.children)

        def replay(run: Callable[[], Any], module: nn.Module, arguments: Call) -> Any:
            name = self.names.get(id(module))
            if module is self.module or name is None:
                return run()
            left = again if _is_in_backward() else children
            child = next((item for item in left if item.module == name), None)
            if child is None:
                raise NotAloneError(f"calls {name} in another order")
            left.remove(child)
            if left is children:
                known = dict(enumerate(child.input_gradients))
                self._add_roots(f"input of {name}", arguments.tensors(), known)
                return map_tensors(self._leaf, child.outputs)
            # The forward may have been without a graph.
            return map_tensors(lambda tensor: self._leaves[id(tensor)][0].clone(), child.outputs)

        def stand_in(tensor: Tensor) -> Tensor:
            return self.stand_in(tensor) if is_own(tensor) else tensor

        def is_own(tensor: Tensor) -> bool:
            return id(tensor) in own

        with (
            held_interrupts(),
            self.scope(self.module, stand_in=stand_in, values=is_own) as state,
            torch.inference_mode(mode=False),
            torch.set_grad_enabled(True),
            Float64Default() if self.dtype == torch.float64 else contextlib.nullcontext(),
            DeterministicMode(),
        ):
            if self.repair:
                repair_convolutions(self.module)
            seed_everything(0)
            arguments = call.arguments.map(self._leaf)
            with self.interceptor.handling(replay):
                with autocast(self.amp, device_of([self.module], arguments.tensors())):
                    output = interruptible(self.module, *arguments.args, **arguments.kwargs)
                if children:
                    raise NotAloneError(f"does not call {children[0].module}")
                self._add_roots("output", tensors_in(output), call.output_gradients)
                if backward:
                    self._backward()
            return self._result(own, state.stand_ins)

    def argument_gradients(self, call: RecordedCall) -> list[Tensor | None]:
        """Return the gradients of the argument tensors, in order."""
        return [self.gradient_of(tensor) for tensor in call.arguments.tensors()]

    def gradient_of(self, tensor: Tensor) -> Tensor | None:
        """Return the gradient of a recorded tensor: an argument, or the output of a child."""
        return self._leaves[id(tensor)][0].grad if id(tensor) in self._leaves else None

    def _leaf(self, tensor: Tensor) -> Tensor:
        """Return a copy that can be changed in place; one tensor that is passed twice stays one."""
        if id(tensor) not in self._leaves:
            leaf = self.convert(tensor).detach().requires_grad_(tensor.requires_grad)
            self._leaves[id(tensor)] = leaf, leaf.clone()
        return self._leaves[id(tensor)][1]

    def scales(self, result: RunResult) -> dict[str, float]:
        """Return how large the gradient of each input and parameter would be, if nothing in it cancelled.

        A norm of two numbers has a true gradient of zero, as the bias before a norm, and only rounding
        errors. The gradient of an input is estimated as if the operation were linear in it: the gradient
        of the output, times the output, divided by the input. That of a weight is one of its products.
        """
        gradient = max((float(g.abs().max()) for _, g in self._seeds), default=0.0)
        moved = max((float(g.abs().max() * y.abs().max()) for y, g in self._seeds), default=0.0)
        leaves = [leaf.detach() for leaf, _ in self._leaves.values()]
        sizes = {f"input {i}": float(x.abs().max()) for i, x in enumerate(leaves) if x.numel()}
        largest = max(sizes.values(), default=0.0)
        losses = {name: moved / size for name, size in sizes.items() if size}
        for name, tensor in result.parameters.items():
            if tensor is not None:
                losses[name] = gradient * (largest if tensor.dim() > 1 else 1.0)
        return losses

    def _add_roots(
        self, name: str, tensors: Iterable[Tensor], gradients: Mapping[int, Tensor | None]
    ) -> None:
        for index, tensor in enumerate(tensors):
            # A clone, since the code that follows may change the tensor in place.
            label = _root_name(name, len(self._roots), index)
            self._roots.append((label, tensor.clone(), gradients.get(index)))

    def _backward(self) -> None:
        roots, gradients = [], []
        for seed, (_, tensor, gradient) in enumerate(self._roots):
            if tensor.requires_grad:
                roots.append(tensor)
                if gradient is None or gradient.shape != tensor.shape or not gradient.any():
                    self.is_random = True
                    gradients.append(random_gradient(tensor, seed))
                else:
                    gradients.append(self.convert(gradient).to(tensor.dtype))
        if roots:
            interruptible(torch.autograd.backward, roots, gradients)
        self._seeds = [
            (tensor.detach(), gradient)
            for tensor, gradient in zip(roots, gradients, strict=True)
            if tensor.numel()
        ]

    def _result(self, own: dict[int, str], stand_ins: dict[int, Tensor]) -> RunResult:
        leaves = [leaf for leaf, _ in self._leaves.values()]
        parameters = {name: stand_ins[key] for key, name in own.items() if key in stand_ins}
        return RunResult(
            outputs={name: root.detach() for name, root, _ in self._roots},
            inputs={f"input {i}": x.grad for i, x in enumerate(leaves) if x.requires_grad},
            parameters={name: p.grad for name, p in parameters.items() if p.requires_grad},
        )


def _root_name(name: str, count: int, index: int) -> str:
    return f"{name} [{count}, {index}]"


def _own_tensors(module: nn.Module, called: set[str], names: dict[int, str]) -> dict[int, str]:
    """Return the names, by id, of a module's tensors except those of the children that it calls."""
    own: dict[int, str] = {}
    waiting = [("", module)]
    while waiting:
        prefix, part = waiting.pop()
        tables = {**vars(part), **part._buffers, **part._parameters}
        own |= {id(t): prefix + name for name, t in tables.items() if isinstance(t, Tensor)}
        for value in vars(part).values():
            if type(value) is list:
                own |= {id(item): prefix for item in value if isinstance(item, Tensor)} | own
        waiting += [
            (f"{prefix}{name}.", child)
            for name, child in part._modules.items()
            if child is not None and names.get(id(child)) not in called
        ]
    return own


def _is_in_backward() -> bool:
    return torch._C._current_autograd_node() is not None


def copy_once(copies: Copies, tensor: Tensor, *, differentiable: bool = False) -> Tensor:
    """Return a copy without a graph; the same for the same tensor, unless it was changed in place.

    If it is `differentiable`, it requires a gradient wherever one is possible.
    """
    key = id(tensor), -1 if tensor.is_inference() else tensor._version
    if key not in copies or tensor.is_inference():  # it has no version: each time another copy
        with torch.inference_mode(mode=False):
            copy = tensor.detach().clone()
        is_wanted = tensor.requires_grad or differentiable
        copy.requires_grad_(is_wanted and (copy.is_floating_point() or copy.is_complex()))
        copies[key] = tensor, copy
    return copies[key][1]


def keep_gradient(gradients: Any, index: int, gradient: Tensor) -> None:
    """Put a copy of a gradient at `index`, as a hook of a tensor does."""
    gradients[index] = gradient.detach().clone()
