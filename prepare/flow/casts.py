"""Count the casts of activations between floating-point dtypes, by module and line of code."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from prepare.flow.call_sites import ModuleStack


class CastSite(NamedTuple):
    """A module, the line of code that casts (empty if a module of torch does), and both dtypes."""

    module: str
    source: str
    dtypes: str


class CastWatcher(TorchDispatchMode):
    """While entered, counts the casts in forward; it must be entered outside of other dispatch modes."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.counts: Counter[CastSite] = Counter()
        self._stack = ModuleStack(model)

    def __enter__(self) -> Self:
        self._stack.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self._stack.__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and self._stack:
            before, after = args[0].dtype, output.dtype
            if before != after and before.is_floating_point and _is_activation(args[0], output):
                site = self._stack.call_site()
                dtypes = f"{before} to {after}".replace("torch.", "")
                self.counts[CastSite(site.module, site.source, dtypes)] += 1
        return output


def _is_activation(before: Tensor, after: Tensor) -> bool:
    is_float = after.is_floating_point() and torch._C._current_autograd_node() is None
    return is_float and not isinstance(before, nn.Parameter)
