"""Call a module of a 16-bit model in float32: cast its arguments before the call, and its results after it.

The casts are two hooks next to the module's own code. As plain data they survive pickle and deepcopy, and
equal hooks are recognised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.fx.proxy import TraceError

from prepare.core.forward.call import map_tensors
from prepare.core.model.module_tree import remove_hooks
from prepare.core.model.replaced_method import NotScriptable
from prepare.core.utils.wording import option

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
