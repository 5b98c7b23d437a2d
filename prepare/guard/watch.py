"""Hook into the calls of single modules: tell calls apart by a key, and record those that are due."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.nested import named_tensors_in, tensors_in
from prepare.core.model.module_tree import remove_hooks
from prepare.guard.snapshot import copied
from prepare.stages.verify.execution.module_calls import (
    Copies,
    RecordedCall,
    copy_once,
    keep_gradient,
)

if TYPE_CHECKING:
    from collections.abc import Hashable

    from prepare.core.forward.call import Call

_COMPILED = "_compiled_call_impl"


@dataclass
class Watched:
    """A module with hooks, and what is known of it.

    `kind` says how the pipeline changed it; empty for the model if it did not. `known` holds the keys of
    which no look is due, `tries` the looks that failed by key, `why` the reason if no look can be made,
    `hooks` the hooks that it had when the guard was made.
    """

    name: str
    module: nn.Module
    kind: str
    why: str = ""
    known: dict[Hashable, object] = field(default_factory=dict)
    tries: dict[Hashable, int] = field(default_factory=dict)
    hooks: set[int] = field(default_factory=set)
    handles: list[Any] = field(default_factory=list)

    def attach(self, guard: Any) -> None:
        """Give the calls of the module to `guard.acts`; `detach` ends that."""
        hooks = [_Hook(act, running, self.module) for act, running in guard.acts(self)]
        if compiled := vars(self.module).get(_COMPILED):  # it runs no hooks that are added later
            vars(self.module)[_COMPILED] = _CompiledCall(compiled, *hooks)
            return
        before, first, last = hooks
        # The last sees what later hooks return; hooks that the user had may change the output.
        own = self.module._forward_hooks.values()
        self._is_last = all(type(hook).__module__.startswith("prepare.") for hook in own)
        self.handles = [
            self.module.register_forward_pre_hook(before, with_kwargs=True),
            self.module.register_forward_hook(last, prepend=not self._is_last),
            self.module.register_forward_hook(first, prepend=True),
        ]
        self.hooks = _hooks(self.module)

    def has_later_hooks(self) -> bool:
        """Return whether hooks were added since the guard was made, and see what these return."""
        if not self.handles or self.hooks >= _hooks(self.module):
            return False
        if self._is_last:
            self.module._forward_hooks.move_to_end(self.handles[1].id)  # type: ignore[attr-defined]
        return True

    def detach(self) -> None:
        """Take the hooks off."""
        call = vars(self.module).get(_COMPILED)
        if isinstance(call, _CompiledCall):
            vars(self.module)[_COMPILED] = call.compiled
        for handle in self.handles:
            handle.remove()


class WatchedCall:
    """A call that is recorded: the module as it was before it, copies of its arguments and its outputs.

    Without a `key` it is one of a training step. `pairs` are tensors, and their gradients, before and after
    hooks that were added later; `is_changed` says that these replaced them by others.
    """

    def __init__(self, watched: Watched, key: Hashable, call: Call, amp: str, found: int) -> None:
        self.watched, self.key, self.amp = watched, key, amp
        self._copies: Copies = {}
        self.call = RecordedCall("", call.map(partial(copy_once, self._copies)))
        self.before, self.is_compiled = copied(watched.module), watched.kind == "compiled"
        for part in self.before.modules():
            remove_hooks(part, _Hook)
        self.grad, self._numbers = torch.is_grad_enabled(), _numbers()
        self.has_later_hooks, self._given = watched.has_later_hooks(), call.args
        self._raw: Any = None
        self.pairs: list[list[Tensor | None]] = []
        # The differences so far; its outputs are those of its code alone.
        self.found, self.seconds = found, 0.0
        self.is_exact, self.is_changed, self.is_compared = True, False, False

    def end(self, output: Any) -> None:
        """Record what the module's own code returns, and the gradients of that when they arrive."""
        self.is_exact = torch.equal(self._numbers, _numbers())
        keep = partial(copy_once, self._copies)
        self.call.keep_outputs(output, keep, gradients=not self.key)
        self._raw = output

    def follow(self, args: Any, output: Any) -> None:
        """Record what hooks that were added later put in the place of arguments and outputs."""
        raw, self._raw = self._raw, None
        if self.has_later_hooks:
            self._compare(self._given, self.call.arguments.args, args)
            self._compare(raw, self.call.outputs, output)
            for tensor in tensors_in(args) if not self.key else ():
                node: Any = tensor.grad_fn
                if "BackwardHookFunction" in type(node).__name__:
                    node.register_hook(self._keep_passed)
        self._given = ()
        self._copies.clear()

    def _compare(self, *values: Any) -> None:
        old, copies, new = (dict(named_tensors_in(value)) for value in values)
        self.is_changed |= old.keys() != new.keys()
        for name, before in old.items() if not self.is_changed else ():
            after, is_output = new[name], values[0] is not self._given
            self.is_changed |= self.grad and before.requires_grad and not after.requires_grad
            # Its code may change an argument.
            if is_output or before.data_ptr() != after.data_ptr():
                self.pairs.append([copies[name], copy_once({}, after)])
            is_replaced = is_output and after is not before and not self.key
            if is_replaced and before.requires_grad and after.requires_grad:
                pair: list[Tensor | None] = [None, None]
                self.pairs.append(pair)
                before.register_hook(partial(keep_gradient, pair, 0))
                after.register_hook(partial(keep_gradient, pair, 1))

    def _keep_passed(self, into: Any, out: Any) -> None:
        self.pairs += [[a, b] for a, b in zip(into, out, strict=True) if b is not None]


class _Hook:
    """A hook of one watched module, that acts while `running` is not empty; that of a copy does nothing."""

    def __init__(self, act: Any = None, running: Any = (), module: nn.Module | None = None) -> None:
        self._act, self._running, self.module = act, running, module

    def __reduce__(self) -> Any:
        return _Hook, ()

    def __call__(self, module: nn.Module | None, args: Any, other: Any) -> Any:
        if torch.compiler.is_compiling() or not self._running or module is not self.module:
            return None
        return self._act(args, other)


class _CompiledCall:
    """The compiled call of a guarded module, with the guard around it."""

    def __init__(self, compiled: Any, *hooks: _Hook) -> None:
        self.compiled, self._hooks = compiled, hooks
        vars(self).update(vars(compiled))  # what the step compile keeps there

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before, first, last = self._hooks
        before(module := before.module, args, kwargs)
        output = self.compiled(*args, **kwargs)
        changed = first(module, args, output)
        last(module, args, output)
        return output if changed is None else changed


def key_of(module: nn.Module, args: Any, kwargs: Any) -> Hashable:
    """Return what tells two calls apart: of each tensor its shape, strides, dtype and device; the modes."""
    is_any = torch._C._is_any_autocast_enabled()
    is_usual = len(args) == 1 and not kwargs and not is_any and type(tensor := args[0]) is Tensor
    if is_usual and tensor.layout is torch.strided and not tensor.is_nested:  # twice as fast
        modes = module.training, torch.is_grad_enabled()
        return modes, tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    found: list[Any] = [module.training, torch.is_grad_enabled()]
    for tensor in tensors_in((*args, *kwargs.values())):
        strided = tensor.layout is torch.strided and not tensor.is_nested
        shape = (tensor.shape, tensor.stride()) if strided else (tensor.layout,)
        kind = tensor.device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        found += (shape, tensor.dtype, tensor.device, autocast)
    return tuple(found)


def _numbers() -> Tensor:
    """Return the state of torch's random numbers."""
    state = torch.get_rng_state()
    if torch.cuda.is_initialized():
        state = torch.cat([state, torch.cuda.get_rng_state()])
    return state


def _hooks(module: nn.Module) -> set[int]:
    forward = *module._forward_pre_hooks, *module._forward_hooks
    return {*forward, *module._backward_hooks, *module._backward_pre_hooks}
