"""Record `reshape` for `Tensor.view` in a graph of torch.fx whose tensors may lie in channels-last."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Proxy
from torch.fx.proxy import TracerBase


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
