"""Hooks that format the tensors of a call, or cast them: device, dtype, canonical strides by rank."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.fx.proxy import TraceError

from prepare.core.forward.call import map_named, map_tensors, placed, tensors_in
from prepare.core.forward.unchanged import unchanged
from prepare.core.model.memory_format import canonical_stride
from prepare.core.model.module_kinds import NotScriptable, is_transformed, rows_copied
from prepare.core.model.module_tree import remove_hooks
from prepare.core.model.tensors import name_of
from prepare.core.utils.process_state import interruptible
from prepare.core.utils.text import list_option

# A tensor whose last dimension is longer is no image with its channels there.
_MOST_IMAGE_CHANNELS = 4
_ACTIVATIONS = (torch.float32, torch.float16, torch.bfloat16)
_STEP = "input_format"
# torch 2.5 has no such function.
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)
_MOVED = (
    "the model was cast or moved after it was prepared, and its hook still makes inputs {}: prepare it "
    "again, or remove the hook: from prepare.steps import input_format; input_format.undo(model)"
)
# What torch says where two dtypes meet that do not go together.
DTYPE_ERROR = (
    r"Input type .* and (bias|weight) type|(same|different) dtype|expected scalar type|mixed dtype"
    r"|but found .*(Half|BFloat16|Float|Double)"
)


@dataclasses.dataclass(frozen=True)
class Formatter:
    """The device, dtype and memory format for the tensors of a batch; None leaves a property unchanged.

    `formats` maps a number of dimensions to a memory format; 0 means any number. Cast to `dtype` are tensors
    of two dimensions or more that are not float64, and those that `include` names; not those of `exclude`.
    """

    device: torch.device | None = None
    dtype: torch.dtype | None = None
    formats: tuple[tuple[int, str], ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __call__(self, batch: Any, name_of: Callable[[str], str] = str) -> Any:
        """Return the formatted batch; the same object if nothing changes.

        `name_of` is given the place of a tensor in the batch, and returns the name that patterns match.
        """
        return map_named(lambda tensor, place: self.tensor(tensor, name_of(place)), batch)

    def tensor(self, tensor: Tensor, name: str = "0") -> Tensor:
        """Return the formatted tensor; the same object if nothing changes. Differentiable."""
        device, dtype = self._target(tensor, name)
        memory_format = self.format_of(tensor)
        if torch.compiler.is_dynamo_compiling() and not _is_exporting():
            memory_format = None  # a compiler chooses strides itself
        stride = canonical_stride(tensor.shape, memory_format) if memory_format else None
        if (device, dtype) == (tensor.device, tensor.dtype) and stride in (None, tensor.stride()):
            return tensor
        if (fits := _within_range(tensor, dtype)) is None:
            wrong = (
                f"{name} holds numbers beyond {name_of(dtype)}, and stays {name_of(tensor.dtype)}"
            )
            remedy = list_option(_STEP, "exclude", [name])
            warnings.warn(f"{wrong}; scale them, or say so: {remedy}", stacklevel=2)
            dtype = tensor.dtype
        tensor = tensor if fits is None else fits
        if stride is None:
            return tensor.to(device, dtype, non_blocking=_may_run_on(tensor, device))
        # A trace loses the copy into new memory, and reads garbage.
        if torch.jit.is_tracing() or is_transformed():
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

    def _target(self, tensor: Tensor, name: str) -> tuple[torch.device, torch.dtype]:
        device = self.device or tensor.device
        if device.index is None and device.type == tensor.device.type:
            device = tensor.device
        is_cast = may_be_activation(tensor)
        if tensor.is_floating_point() and (self.include or self.exclude):
            is_cast = (is_cast or is_named(name, self.include)) and not is_named(name, self.exclude)
        return device, (self.dtype if is_cast else None) or tensor.dtype


@dataclasses.dataclass(frozen=True)
class FormatHook(NotScriptable):
    """A forward pre-hook that formats positional and keyword arguments; it holds configuration only.

    As plain data it survives pickle and deepcopy, and an equal hook on the model is recognised.
    """

    step = _STEP
    formatter: Formatter
    names: tuple[str, ...] = ()
    """Of the positional parameters of forward."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        new_args, new_kwargs = self.formatter((args, kwargs), self.name_of)
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_transformed():
            return new_args, new_kwargs
        given = _Arguments(new_args)
        own = set(map(id, tensors_in((args, kwargs))))
        new = [each for each in tensors_in((new_args, new_kwargs)) if id(each) not in own]
        given.copies = [(each, each._version) for each in new if not each.is_inference()]
        return given, new_kwargs

    @classmethod
    def of(cls, model: nn.Module, formatter: Formatter) -> FormatHook:
        """Return the hook for `model`, which knows the names of its arguments."""
        names: tuple[str, ...] = ()
        with contextlib.suppress(ValueError, TypeError):  # of a scripted module
            taken = inspect.signature(model.forward).parameters.values()
            names = tuple(each.name for each in taken if each.kind <= each.POSITIONAL_OR_KEYWORD)
        return cls(formatter, names)

    def name_of(self, place: str) -> str:
        """Return the name of a place in (args, kwargs): `x` for `0.0`, `targets.0` for `1.targets.0`."""
        kind, first, *rest = place.split(".")
        if kind == "0" and int(first) < len(self.names):
            first = self.names[int(first)]
        return ".".join((first, *rest))

    def install(self, model: nn.Module) -> None:
        """Register the hook before all others, and remove any other formatting hook."""
        FormatHook.remove(model)
        model.register_forward_pre_hook(self, with_kwargs=True, prepend=True)
        model.register_forward_hook(WarnHook(), prepend=True, with_kwargs=True, always_call=True)

    @staticmethod
    def remove(model: nn.Module) -> None:
        """Remove every formatting hook from `model`."""
        remove_hooks(model, FormatHook, WarnHook)


@dataclasses.dataclass(frozen=True)
class WarnHook(NotScriptable):
    """A forward hook that warns if forward has written into a copy that formatting made of an argument.

    If forward raises for a dtype, the error gets a note that names the arguments.
    """

    step = _STEP

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if torch.compiler.is_compiling():
            return
        error = sys.exception() if output is None else None
        if error and (note := note_of(module, error, args, kwargs)):
            error.add_note(note)
        if any(copy._version != before for copy, before in getattr(args, "copies", ())):
            warnings.warn(
                f"{type(module).__name__}.forward wrote into an argument that input_format had copied; the "
                "caller's is as it was: drop attach, and give the model pipeline.format(batch)",
                stacklevel=2,
            )


class _Arguments(tuple[Any, ...]):  # noqa: SLOT001  torch hands it on to the hook after forward
    """The arguments of a call, with the copies in them and the version of each."""

    copies: list[tuple[Tensor, int]]


def _channels_are_last(shape: torch.Size) -> bool:
    """Return whether a shape reads as (N, *spatial, C): in memory it lies as a convolution wants it.

    A network that takes it permutes it at its start. A shape that is not known yet, of a captured
    program, reads as (N, C, *spatial).
    """
    if not all(isinstance(size, int) for size in shape):
        return False
    return shape[-1] <= _MOST_IMAGE_CHANNELS and shape[-1] < min(shape[1:-1])


def may_be_activation(tensor: Tensor) -> bool:
    """Return whether a layer may take it: no scalar or vector, and no float64, which is one on purpose."""
    return tensor.dim() > 1 and tensor.dtype in _ACTIVATIONS


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern matches an argument `targets.0.boxes`, what holds it, or its name in there."""
    parts = name.split(".")
    names = [".".join(parts[a:b]) for a in (0, 1) for b in range(a + 1, len(parts) + 1)]
    return any(fnmatchcase(each, pattern) for pattern in patterns for each in names)


# A compiler cannot trace a regular expression. torch.compiler.assume_constant_result sets this too, but
# imports the compiler.
is_named._dynamo_marked_constant = torch.__version__ >= "2.6"  # type: ignore[attr-defined]


def note_of(model: nn.Module, error: BaseException, args: Any, kwargs: Any) -> str:
    """Return which arguments have another dtype than the weights, if a forward has raised for a dtype."""
    dtypes = {each.dtype for each in model.parameters() if each.is_floating_point()}
    hooked = next((h for h in model._forward_pre_hooks.values() if isinstance(h, FormatHook)), None)
    wanted, devices = hooked and hooked.formatter, {each.device.type for each in model.parameters()}
    if wanted and wanted.dtype and dtypes and dtypes.isdisjoint({wanted.dtype}):
        return _MOVED.format(name_of(wanted.dtype))
    if wanted and wanted.device and devices and devices.isdisjoint({wanted.device.type}):
        return _MOVED.format(wanted.device)
    if not dtypes or not re.search(DTYPE_ERROR, str(error)):
        return ""
    dtype = min(dtypes, key=lambda each: (each.itemsize, str(each)))
    hook, told = FormatHook.of(model, Formatter()), []
    floats = [each for each in placed((args, kwargs)) if each[1].is_floating_point()]
    for key, is_cast in (("include", False), ("exclude", True)):
        names = [hook.name_of(place) for place, t in floats if (t.dtype == dtype) is is_cast]
        if names:
            is_in = f"in {name_of(dtype)}" if is_cast else f"not in {name_of(dtype)}"
            option = list_option(_STEP, key, names)
            told.append(f"{', '.join(names)}: {is_in}; to change that: {option}")
    return "; ".join(told)


def needless(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> list[str]:
    """Return patterns of the arguments in `dtype` with which forward runs in float32 too; changes nothing.

    No convolution and no linear layer gets those: each needs the dtype of its weights.
    """
    hook, left = FormatHook.of(model, Formatter()), dict[tuple[str, ...], None]()

    def patterns(place: str) -> tuple[str, ...]:
        kind, first, *rest = place.split(".")
        inside = ".".join("*" if each.isdigit() else each for each in rest)
        if kind == "1":
            return (f"{first}.{inside}" if inside else first,)
        return (inside,) if inside else (hook.name_of(place), first)

    cast = [place for place, t in placed((args, kwargs)) if t.dim() > 1 and t.dtype == dtype]
    with unchanged(model, args, kwargs) as state, torch.no_grad():
        for tried in dict.fromkeys(map(patterns, cast)):
            FormatHook.remove(model)  # it would cast what is tried
            wide = {*left, tried}

            def widen(tensor: Tensor, place: str, wide: Any = wide) -> Tensor:
                return tensor.float() if patterns(place) in wide else tensor

            given = map_named(widen, (args, kwargs))
            with contextlib.suppress(Exception):  # it is needed, or the model does not run at all
                interruptible(model, *given[0], **given[1])
                left[tried] = None
            state.restore()
    return [pattern for each in left for pattern in each]


def _within_range(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the tensor with the least and the largest numbers of its dtype as those of `dtype`.

    These are masks, of which torch's cast makes inf, and then rows of NaN. Return None if `dtype` cannot hold
    another finite value. A compiler or a transform cannot look: there all are limited.
    """
    limit = torch.finfo(dtype).max if dtype.is_floating_point else 0.0
    if not limit or not tensor.numel() or limit >= torch.finfo(tensor.dtype).max:
        return tensor
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    if _may_look(tensor, limit):
        large = tensor.detach().abs()
        large = large[(large > limit) & large.isfinite()]
        if not large.numel():
            return tensor
        if (large < torch.finfo(torch.bfloat16).max).any():
            return None
    wide = tensor if tensor.dtype.itemsize > 2 else tensor.float()  # bfloat16 rounds the limit up
    return torch.where(wide.isinf(), wide, wide.clamp(-limit, limit))


def _may_look(tensor: Tensor, limit: float) -> bool:
    """Return whether values can be read at once: not of a tensor without values, nor needlessly on a GPU.

    There it waits for the device, and between bfloat16 and float32 lie only masks.
    """
    is_plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
    is_needed = tensor.is_cpu or limit < torch.finfo(torch.bfloat16).max
    return (is_plain and is_needed) and not (
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
            kept = f"half keeps {type(module).__name__} in {self.dtype}"
            raise TraceError(f"torch.fx.symbolic_trace: {kept}; {_REMEDY}")
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
    return list_option(CAST_STEP, "keep", ["norms", name])


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
