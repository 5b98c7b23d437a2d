"""Work under the transforms of torch.func, the older ones of autograd, and in graphs of torch.fx."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.fx.proxy import TracerBase

# The mode of the older vmap, which `torch.autograd.functional.jacobian(vectorize=True)` uses.
_OLD_VMAP = torch._C._dispatch_key_parse("VmapMode")


def is_transformed() -> bool:
    """Return whether a transform runs, as `vmap`, `grad` or `jvp`; also in a forward that is compiled."""
    if torch._C._are_functorch_transforms_active():
        return True
    if torch.compiler.is_compiling():
        return False
    return torch._C._dispatch_tls_is_dispatch_key_included(_OLD_VMAP)


def rows_copied(x: Tensor) -> Tensor:
    """Return `x` (N, C, *spatial) in channels-last, in operations that every transform knows."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def reshape_for_view(tracer: Any) -> None:
    """Let this tracer record `reshape` for each `view` from now on: the code that runs may replace it.

    Not a tracer with proxies of its own.
    """
    if type(tracer).proxy is TracerBase.proxy:
        tracer.proxy = lambda node: _Reshaping(node, tracer)


def recorded_view(x: Proxy, *sizes: Any, **options: Any) -> Proxy:
    """Record `x.view(*sizes)`, as `reshape` unless a dtype is given."""
    is_shape = bool(sizes) and not options and not isinstance(sizes[0], torch.dtype)
    return x.tracer.create_proxy(
        "call_method", "reshape" if is_shape else "view", (x, *sizes), options
    )


class _Reshaping(Proxy):
    view = recorded_view
