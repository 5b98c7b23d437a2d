"""Hooks that format the tensors of a call, or cast them: device, dtype, canonical strides by rank."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.fx.proxy import TraceError

from prepare.core.forward.call import items_of, map_tensors
from prepare.core.model.memory_format import canonical_stride
from prepare.core.model.module_kinds import NotScriptable, is_transformed, rows_copied
from prepare.core.model.module_tree import remove_hooks
from prepare.core.utils.wording import option

# A tensor whose last dimension is longer is no image with its channels there.
_MOST_IMAGE_CHANNELS = 4


@dataclasses.dataclass(frozen=True)
class Formatter:
    """The device, dtype and memory format for the tensors of a batch; None leaves a property unchanged.

    `formats` maps a number of dimensions to a memory format; 0 means any number.
    """

    device: torch.device | None = None
    dtype: torch.dtype | None = None
    formats: tuple[tuple[int, str], ...] = ()

    def __call__(self, batch: Any) -> Any:
        """Return the formatted batch; the same object if nothing changes."""
        done: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor, so that its id stays its own

        def change(tensor: Tensor) -> Tensor:
            if id(tensor) not in done:
                done[id(tensor)] = tensor, self.tensor(tensor)
            return done[id(tensor)][1]

        return map_tensors(self.tensor if torch.compiler.is_compiling() else change, batch)

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return the formatted tensor; the same object if nothing changes. Differentiable."""
        device, dtype = self._target(tensor)
        memory_format = self.format_of(tensor)
        if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
            memory_format = None  # a compiler chooses strides itself
        stride = canonical_stride(tensor.shape, memory_format) if memory_format else None
        if (device, dtype) == (tensor.device, tensor.dtype) and stride in (None, tensor.stride()):
            return tensor
        tensor = _within_range(tensor, dtype)
        if stride is None:
            return tensor.to(device, dtype, non_blocking=_may_run_on(tensor, device))
        if torch.jit.is_tracing():  # a trace loses the copy into new memory, and reads garbage
            name = "contiguous_format" if memory_format == "contiguous" else memory_format
            return tensor.to(device, dtype).contiguous(memory_format=getattr(torch, str(name)))
        if is_transformed():
            moved = tensor.to(device, dtype)
            return moved.contiguous() if memory_format == "contiguous" else rows_copied(moved)
        # `.contiguous(memory_format=...)` would keep strides that satisfy the format, canonical or not.
        fresh = torch.empty_strided(tensor.shape, stride, dtype=dtype, device=device)
        # torch's copy from float32 to float16 ignores the negative bit.
        source = tensor.resolve_neg()
        return fresh.copy_(source, non_blocking=_may_run_on(source, device))

    def format_of(self, tensor: Tensor) -> str | None:
        """Return the memory format for the tensor; None leaves its strides as they are."""
        if tensor.layout is not torch.strided or tensor.is_nested:
            return None
        for dims, memory_format in self.formats:
            if dims in (tensor.dim(), 0):
                return None if dims and _channels_are_last(tensor.shape) else memory_format
        return None

    def _target(self, tensor: Tensor) -> tuple[torch.device, torch.dtype]:
        device, dtype = self.device or tensor.device, self.dtype or tensor.dtype
        if device.index is None and device.type == tensor.device.type:
            device = tensor.device
        return device, dtype if tensor.is_floating_point() else tensor.dtype


@dataclasses.dataclass(frozen=True)
class FormatHook(NotScriptable):
    """A forward pre-hook that formats positional and keyword arguments; it holds configuration only.

    As plain data it survives pickle and deepcopy, and an equal hook on the model is recognised.
    """

    step = "input_format"
    formatter: Formatter

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        new_args, new_kwargs = self.formatter((args, kwargs))
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_transformed():
            return new_args, new_kwargs
        given = _Arguments(new_args)
        given.made = [(m, _content(m)) for m in _made((args, kwargs), (new_args, new_kwargs))]
        return given, new_kwargs

    def is_on(self, model: nn.Module) -> bool:
        """Return whether `model` has a hook equal to this one."""
        return self in model._forward_pre_hooks.values()

    def install(self, model: nn.Module) -> None:
        """Register the hook before all others, and remove any other formatting hook."""
        FormatHook.remove(model)
        model.register_forward_pre_hook(self, with_kwargs=True, prepend=True)
        model.register_forward_hook(WarnHook())

    @staticmethod
    def remove(model: nn.Module) -> None:
        """Remove every formatting hook from `model`."""
        remove_hooks(model, FormatHook, WarnHook)


@dataclasses.dataclass(frozen=True)
class WarnHook(NotScriptable):
    """A forward hook that warns if forward has written into a copy that formatting made of an argument."""

    step = "input_format"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if any(_content(copy) != before for copy, before in getattr(args, "made", ())):
            warnings.warn(
                f"{type(module).__name__}.forward wrote into an argument that input_format had copied; the "
                "caller's is as it was: drop attach, and give the model pipeline.format(batch)",
                stacklevel=2,
            )


class _Arguments(tuple[Any, ...]):  # noqa: SLOT001  torch hands it on to the hook after forward
    """The arguments of a call, with the copies in them and the content of each."""

    made: list[tuple[Any, Any]]


def _made(before: Any, after: Any) -> Iterator[Any]:
    """Yield the tensors and containers in `after` that are not the caller's own."""
    if after is not before:
        yield after
        for (_, old), (_, new) in zip(items_of(before), items_of(after), strict=True):
            yield from _made(old, new)


def _content(made: Any) -> Any:
    """Return what is another value once a tensor or a container is written to."""
    if isinstance(made, Tensor):
        return None if made.is_inference() else made._version
    return [(key, id(item)) for key, item in items_of(made)]


def _channels_are_last(shape: torch.Size) -> bool:
    """Return whether a shape reads as (N, *spatial, C): in memory it lies as a convolution wants it.

    A network that takes it permutes it at its start. A shape that is not known yet, of a captured
    program, reads as (N, C, *spatial).
    """
    if not all(isinstance(size, int) for size in shape):
        return False
    return shape[-1] <= _MOST_IMAGE_CHANNELS and shape[-1] < min(shape[1:-1])


def _within_range(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor with finite values beyond the range of `dtype` as its largest number.

    torch's cast makes inf of them: of a mask of `finfo(float32).min`, whose rows then become NaN.
    """
    limit = torch.finfo(dtype).max if dtype.is_floating_point else 0.0
    if not limit or not tensor.numel() or limit >= torch.finfo(tensor.dtype).max:
        return tensor
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    if _may_look(tensor):
        low, high = tensor.detach().aminmax()
        if -limit <= low.item() and high.item() <= limit:
            return tensor
    return torch.where(tensor.isinf(), tensor, tensor.clamp(-limit, limit))


def _may_look(tensor: Tensor) -> bool:
    """Return whether values can be read at once: not on an accelerator, nor of a tensor without values."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu
    return is_plain and not (
        torch.compiler.is_compiling() or torch.jit.is_tracing() or is_transformed()
    )


def _may_run_on(tensor: Tensor, device: torch.device) -> bool:
    """Return whether the copy to `device` may still run when the forward begins.

    Not towards the CPU: it would read a batch that has not arrived, while an accelerator queues its work. Not
    from pageable memory, which the caller may write to again, nor in a graph that a compiler makes.
    """
    is_sent = tensor.device.type == "cpu" and device.type not in ("cpu", "meta")
    return is_sent and not torch.compiler.is_compiling() and tensor.is_pinned()


# The step that casts to 16 bits, and puts these hooks on the modules that it keeps.
CAST_STEP = "half"
_LOW = (torch.float16, torch.bfloat16)
_REMEDY = "use torch.export, or undo the step: from prepare.steps import half; half.undo(model)"


@dataclasses.dataclass(frozen=True)
class CastArguments(NotScriptable):
    """A forward pre-hook that casts 16-bit positional and keyword arguments to `dtype`."""

    step = CAST_STEP
    dtype: torch.dtype

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        if args and isinstance(args[0], Proxy):
            text = (
                f"torch.fx.symbolic_trace cannot trace {type(module).__name__}, which half keeps in"
            )
            raise TraceError(f"{text} {self.dtype}: {_REMEDY}")
        return map_tensors(self._cast, args), map_tensors(self._cast, kwargs)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.dtype in _LOW else tensor


@dataclasses.dataclass(frozen=True)
class CastResults(NotScriptable):
    """A forward hook that casts results in the dtype `inside` to the 16-bit dtype `outside`."""

    step = CAST_STEP
    inside: torch.dtype
    outside: torch.dtype

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return map_tensors(self._cast, output)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.outside) if tensor.dtype == self.inside else tensor


def keep_option(name: str) -> str:
    """Return the option that keeps the module `name` in float32, and the norms as by default."""
    return option(CAST_STEP, "keep", ["norms", name])


def call_in_float32(module: nn.Module, casts: CastResults) -> None:
    """Cast the arguments and results of each call of `module`; replaces such casts of before."""
    remove_casts(module)
    arguments = CastArguments(casts.inside)
    module.register_forward_pre_hook(arguments, with_kwargs=True)
    module.register_forward_hook(casts, prepend=True)


def remove_casts(module: nn.Module) -> None:
    """Remove the casts around the calls of `module`, if there are any."""
    remove_hooks(module, CastArguments, CastResults)


def casts_of(module: nn.Module) -> CastResults | None:
    """Return the casts around the calls of `module`, or None."""
    hooks = module._forward_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, CastResults)), None)


@contextmanager
def same_casts(model: nn.Module, source: nn.Module) -> Iterator[None]:
    """Give the modules of `model` the casts of the modules of the same names in `source`, in the block."""
    casts = {name: cast for name, module in source.named_modules() if (cast := casts_of(module))}
    modules = [(m, casts[n]) for n, m in model.named_modules() if n in casts and not casts_of(m)]
    try:
        for module, cast in modules:
            call_in_float32(module, cast)
        yield
    finally:
        for module, _ in modules:
            remove_casts(module)
