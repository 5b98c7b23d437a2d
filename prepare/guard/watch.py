"""Watch the calls of single modules: tell them apart by a key, and record those that are due."""

from __future__ import annotations

import sys
import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.float32_calls import CastResults
from prepare.core.forward.nested import map_tensors, tensors_in
from prepare.core.model.memory_format import satisfied
from prepare.guard.apart import can_look
from prepare.stages.verify.execution.module_calls import RecordedCall

if TYPE_CHECKING:
    from types import FrameType

    from prepare.core.forward.call import Call

_COMPILED = "_compiled_call_impl"
_HOOKS = ("_forward_hooks", "_backward_hooks")


@dataclass
class Watched:
    """A module with hooks, and what is known of it.

    `kind` says how the pipeline changed it; empty if its calls are recorded only as a part of others. `known`
    holds the keys of which no look is due, `tries` the looks that failed by key, `why` the reason if no look
    can be made, `hooks` the hooks that it had when the guard was made.
    """

    name: str
    module: nn.Module
    kind: str
    why: str = ""
    known: dict[Hashable, object] = field(default_factory=dict)
    tries: dict[Hashable, int] = field(default_factory=dict)
    hooks: set[int] = field(default_factory=set)
    handles: list[Any] = field(default_factory=list)
    last: Any = None

    def attach(self, guard: Any) -> None:
        """Give the calls of the module to `guard.before` and `guard.after`; `detach` ends that."""
        module = self.module
        if compiled := vars(module).get(
            _COMPILED
        ):  # hooks that are added after the compiler do not run
            vars(module)[_COMPILED] = _CompiledCall(guard, self, compiled)
            return
        self.hooks = set(_hooks(module))
        self.handles = [
            module.register_forward_pre_hook(Before(guard, self), with_kwargs=True),
            # The first: the hooks of others may change what it gets.
            module.register_forward_hook(After(guard, self), prepend=True),
        ]

    def detach(self) -> None:
        """Take the hooks off."""
        call = vars(self.module).get(_COMPILED)
        if isinstance(call, _CompiledCall):
            vars(self.module)[_COMPILED] = call.compiled
        for handle in self.handles:
            handle.remove()

    def follow_hooks(self, guard: Any) -> None:
        """See what hooks that were added since the guard was made put in the place of the output."""
        table = self.module._forward_hooks
        if not self.handles or isinstance(table[next(reversed(table))], After):
            return
        others = (table[key] for key in table.keys() & self.hooks)
        if all(isinstance(hook, CastResults) for hook in others):
            self.last.remove() if self.last else None
            self.last = self.module.register_forward_hook(Last(guard, self))
            self.handles[2:] = [self.last]

    @property
    def is_followed(self) -> bool:
        """Return whether a second hook sees the output."""
        return self.last is not None and self.last.id in self.module._forward_hooks


@dataclass
class WatchedCall:
    """A call that runs: the module as it was before it, its arguments, and those of the calls inside.

    `frame` is that of torch around the module's code. `copies` hold each tensor once, by its id and version.
    `passed` are pairs of gradients that a hook passes on, which should be equal.
    """

    watched: Watched
    key: Hashable
    is_due: bool
    frame: FrameType | None
    copies: dict[tuple[int, int], tuple[Tensor, Tensor]]
    call: RecordedCall
    before: Any = None
    amp: str = "none"
    raw: Any = None
    numbers: Any = None
    draws: bool = False
    detached: bool = False
    found: Any = None
    seconds: float = 0.0

    def draw(self) -> None:
        """Note whether its own code has drawn random numbers in train mode, since `numbers`."""
        drew = not torch.equal(self.numbers, numbers())
        self.draws |= drew and any(part.training for part in self.watched.module.modules())

    passed: list[dict[str, Tensor | None]] = field(default_factory=list)


class Calls(dict[int, list[WatchedCall]]):
    """The calls that run and are recorded, innermost last, by their threads."""

    def begin(
        self, watched: Watched, key: Hashable, call: Call, *, is_due: bool
    ) -> WatchedCall | None:
        """WatchedCall the arguments of a call that is due, or that the code of such a call makes."""
        thread, running = threading.get_ident(), set(frames())
        # One that was left by an exception does not run any more.
        stack = [record for record in self.pop(thread, []) if record.frame in running]
        outer, record = stack[-1] if stack else None, None
        if (is_due or (outer and outer.is_due)) and can_look(call.tensors()):
            copies = outer.copies if outer else {}
            copied = RecordedCall(watched.name, call.map(partial(copy_of, copies)))
            frame, now = sys._getframe(4), numbers()
            record = WatchedCall(watched, key, is_due, frame, copies, copied, numbers=now)
            if outer:
                outer.draw()
            stack.append(record)
        if stack:
            self[thread] = stack
        return record

    def bytes_of(self, record: WatchedCall) -> int:
        """Return the memory of the copies so far."""
        return sum(copy.nbytes for _, copy in record.copies.values())

    def find(self, frame: FrameType) -> WatchedCall | None:
        """Return the record of the call that runs in `frame`; forget those inside that did not end."""
        stack = self.get(threading.get_ident(), [])
        if all(record.frame is not frame for record in stack):
            return None
        while stack[-1].frame is not frame:
            stack.pop()
        return stack[-1]

    def leave(self, record: WatchedCall) -> None:
        """Forget the innermost record, and add its call to those of the code around it."""
        stack = self[threading.get_ident()]
        stack.pop()
        record.frame = record.raw = None
        if stack:
            stack[-1].call.children.append(record.call)
            stack[-1].numbers = numbers()
        else:
            del self[threading.get_ident()]
            record.copies.clear()


class _Hook:
    """A hook of one watched module; that of a copy does nothing."""

    def __init__(self, guard: Any = None, watched: Watched | None = None) -> None:
        self._guard, self._watched = guard, watched

    def __reduce__(self) -> Any:
        return type(self), ()


class Before(_Hook):
    """The forward pre-hook; it comes after those that the module had."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a record if the call is due."""
        if torch.compiler.is_compiling() or self._guard is None:
            return
        watched = self._watched
        if watched is not None and watched.module is module:  # not in a replica
            self._guard.before(watched, args, kwargs)


class After(_Hook):
    """The first forward hook."""

    is_last = False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """End a record, if there is one; return the output to use, or None."""
        if torch.compiler.is_compiling() or self._guard is None or not self._guard.running:
            return None
        return self._guard.after(self._watched, args, output, is_last=self.is_last)


class Last(After):
    """The last forward hook, after those that were added since the guard was made."""

    is_last = True


class _CompiledCall:
    """The compiled call of a guarded module, with the guard around it."""

    def __init__(self, guard: Any, watched: Watched, compiled: Any) -> None:
        self.compiled = compiled
        self._hooks = Before(guard, watched), After(guard, watched)
        self._module = watched.module
        vars(self).update(vars(compiled))  # what the step compile keeps there

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._hooks[0](self._module, args, kwargs)
        output = self.compiled(*args, **kwargs)
        changed = self._hooks[1](self._module, args, output)
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
        found += (shape, tensor.dtype, tensor.device)
        kind = tensor.device.type
        found.append(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind))
    return tuple(found)


def describe_call(module: nn.Module, call: Call, amp: str) -> str:
    """Return a call in words: `[2, 3, 8, 8] float32 channels_last, eval`."""
    words = []
    for tensor in call.tensors()[:3]:
        formats: tuple[str, ...] = ()
        if tensor.layout is torch.strided and not tensor.is_nested:
            formats = satisfied(tuple(tensor.shape), tensor.stride())
        dtype = str(tensor.dtype).removeprefix("torch.")
        words.append(f"{list(tensor.shape)} {dtype} {formats[0] if formats else ''}".rstrip())
    words += [f"autocast to {amp}"] if amp != "none" else []
    return ", ".join([*words, "train" if module.training else "eval"])


def numbers() -> Tensor:
    """Return the state of torch's random numbers."""
    state = torch.get_rng_state()
    if torch.cuda.is_initialized():
        state = torch.cat([state, torch.cuda.get_rng_state()])
    return state


def frames() -> Iterator[FrameType]:
    """Yield the frames of this thread, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


def copy_of(copies: dict[tuple[int, int], tuple[Tensor, Tensor]], tensor: Tensor) -> Tensor:
    """Return a copy without a graph; the same for the same tensor, unless it was changed in place."""
    with torch.inference_mode(mode=False):
        copy = tensor.detach().clone()
        copy.requires_grad_(tensor.requires_grad)
    if tensor.is_inference():  # it has no version: each time another copy
        return copy
    return copies.setdefault((id(tensor), tensor._version), (tensor, copy))[1]


def keep_output(record: WatchedCall, args: Any, output: Any) -> None:
    """WatchedCall what a call returned, and the gradients of that when they arrive."""
    call = record.call
    call.outputs = map_tensors(partial(copy_of, record.copies), output)
    if record.before is None or not torch.is_grad_enabled():
        return
    for index, tensor in enumerate(tensors_in(output)):
        if tensor.requires_grad:
            tensor.register_hook(partial(_keep, call.output_gradients, index))
    # What hooks put in the place of arguments and outputs.
    given = zip(call.arguments.tensors(), tensors_in(args), strict=False)
    record.detached = any(a.requires_grad and not b.requires_grad for a, b in given)
    for raw, tensor in zip(tensors_in(record.raw), tensors_in(output), strict=False):
        if raw is not tensor and raw.requires_grad and tensor.requires_grad:
            pair: dict[str, Tensor | None] = {"before": None, "after": None}
            record.passed.append(pair)
            raw.register_hook(partial(_keep, pair, "before"))
            tensor.register_hook(partial(_keep, pair, "after"))
    module = record.watched.module
    if set(module._backward_hooks) - record.watched.hooks:
        for tensor in tensors_in(args):
            node = tensor.grad_fn
            if node is not None and type(node).__name__ == "BackwardHookFunctionBackward":
                node.register_hook(partial(_keep_passed, record.passed))


def _keep(gradients: dict[Any, Any], key: Any, gradient: Tensor) -> None:
    gradients[key] = gradient.detach().clone()


def _keep_passed(pairs: list[Any], into: Any, out: Any) -> None:
    for before, after in zip(into, out, strict=True):
        if after is not None:
            pairs.append({"before": before, "after": after})


def _hooks(module: nn.Module) -> Iterator[int]:
    for name in _HOOKS:
        yield from getattr(module, name)
