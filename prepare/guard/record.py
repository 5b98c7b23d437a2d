"""Tell calls of a model apart, and record the calls of some of its modules while a forward runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Iterator
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from prepare.core.forward.call import Call
from prepare.core.forward.compiled import is_compiled
from prepare.core.forward.nested import tensors_in
from prepare.core.model.memory_format import satisfied
from prepare.core.utils.signals import interruptible
from prepare.stages.verify.execution.module_calls import CallRecorder, RecordedCall

if TYPE_CHECKING:
    from prepare.stages.verify.execution.module_calls import CallInterceptor

# Gets a recorded call, the module and its output; returns the output to use.
Look = Callable[[RecordedCall, nn.Module, Any], Any]


def key_of(module: nn.Module, args: Any, kwargs: Any) -> Hashable:
    """Return what tells two calls apart: of each tensor its shape, strides, dtype and device; the modes."""
    found: list[Any] = [module.training, torch.is_grad_enabled()]
    device = "cpu"
    for value in (*args, *kwargs.values()) if kwargs else args:
        for tensor in (value,) if isinstance(value, Tensor) else tensors_in(value):
            strided = tensor.layout is torch.strided and not tensor.is_nested
            shape = (tensor.shape, tensor.stride()) if strided else (tensor.layout,)
            found += (shape, tensor.dtype, tensor.device)
            device = tensor.device.type
    if torch.is_autocast_enabled(device):
        found.append(torch.get_autocast_dtype(device))
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


class Watcher(CallRecorder):
    """While entered, records each call of the modules `wanted`, and gives it to `look`.

    The calls that their own code makes are recorded too. A module whose calls need more than `max_bytes` is
    left out: its name is added to `refused`. `interrupted` is called if an interrupt has left the model's
    call, for which torch runs no hook: at once in a module, else when the model is called again.
    """

    def __init__(
        self,
        model: nn.Module,
        interceptor: CallInterceptor,
        *,
        wanted: Collection[str],
        look: Look,
        max_bytes: int,
        interrupted: Callable[[], object],
    ) -> None:
        super().__init__(model, interceptor)
        self.interceptor, self._interrupted, self._is_inside = interceptor, interrupted, False
        self._model, self._wanted, self._look, self._max_bytes = model, set(wanted), look, max_bytes
        self.refused: set[str] = set()
        self._root: RecordedCall | None = None
        self._frame: FrameType | None = None

    def begin(self, args: Any, kwargs: Any) -> Self:
        """Record the arguments of the model itself, whose call has begun."""
        if "" in self._wanted:
            self._root = RecordedCall("", Call(args, kwargs).map(self._copy))
            self._running.append(self._root)
        if not is_compiled(self._model):
            self._frame = next(_frames(nn.Module._call_impl.__code__), None)
            self._patch.enter_context(self._interceptor)
            self._patch.enter_context(self._interceptor.handling(self._handle))
        return self

    def end(self, output: Any, *, raised: bool) -> Any:
        """Record the output of the model itself, and return the output to use."""
        root, self._root, self._interceptor.handle = self._root, None, None
        self._frame = None
        try:
            if root is not None and not raised and "" not in self.refused:
                self._keep_outputs(root, output)
                output = self._look(root, self._model, output)
            return output
        finally:
            self._patch.close()
            self._running.clear()
            self._copies.clear()

    def _handle(self, run: Callable[[], Any], module: nn.Module, arguments: Call) -> Any:
        if self._is_inside:
            return self._record(run, module, arguments)
        if module is self._model and all(frame is not self._frame for frame in _frames()):
            self._interrupted()
            return run()
        self._is_inside = True
        try:
            return self._record(lambda: interruptible(run), module, arguments)
        except Exception:
            raise
        except BaseException:
            self._interrupted()
            raise
        finally:
            self._is_inside = False

    def _record(self, run: Callable[[], Any], module: nn.Module, arguments: Call) -> Any:
        name = self._names.get(id(module))
        wanted = self._wanted - self.refused
        inside = bool(self._running) and self._running[-1].module in wanted
        if name is None or not (inside or name in wanted):
            return run()
        look = self._look
        if is_compiled(module):
            run, look = self._unpatched(run), self._unpatched(look)
        self._refuse_if_large(arguments)
        count = len(self.calls)
        output = super()._record(run, module, arguments)
        if len(self.calls) > count:  # not in a backward
            call = self.calls.pop()
            if name in self._wanted and name not in self.refused:
                interceptor = self._interceptor
                handle, interceptor.handle = interceptor.handle, None
                try:
                    output = look(call, module, output)
                finally:
                    interceptor.handle = handle
            call.children.clear()
        if not self._running:
            self._copies.clear()
        return output

    def _copy(self, tensor: Tensor) -> Tensor:
        if not tensor.is_inference():
            return super()._copy(tensor)
        with torch.inference_mode(mode=False):  # it has no version: each time another copy
            return tensor.clone()

    def _refuse_if_large(self, arguments: Call) -> None:
        """Give up the modules whose calls are being recorded if the copies need too much memory."""
        held = sum(copy.nbytes for _, copy in self._copies.values())
        if held + sum(tensor.nbytes for tensor in arguments.tensors()) > self._max_bytes:
            self.refused |= {call.module for call in self._running}
            for call in self._running:
                call.children.clear()
            self._copies.clear()

    def _unpatched(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `run` with torch's own way to call a module, which a compiler may be about to trace."""

        def call(*args: Any) -> Any:
            self._interceptor.__exit__()
            try:
                return run(*args)
            finally:
                self._interceptor.__enter__()

        return call


def _frames(code: CodeType | None = None) -> Iterator[FrameType]:
    """Yield the frames of this thread, the innermost first; with `code` those that run it."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if code in (None, frame.f_code):
            yield frame
