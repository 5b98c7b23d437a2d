"""Adds random numbers, as small as rounding errors, to what every module of a forward gives."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module


class Noise:
    """While it is entered, the output of each module without children is off by `part` of its deviation.

    What gradients make of that is what they may be off by: where the forward errs by so much, a ReLU
    turns here and there, and the winner of a pooling changes. Uses torch's global hooks, and its own
    random numbers.
    """

    def __init__(self, model: nn.Module, part: float, seed: int) -> None:
        self._leaves = {id(module) for module in model.modules() if not module._modules}
        self._part, self._generator = part, torch.Generator().manual_seed(seed)

    def __enter__(self) -> Self:
        self._handle = torch_module.register_module_forward_hook(self._disturb)
        return self

    def __exit__(self, *raised: object) -> None:
        self._handle.remove()

    def _disturb(self, module: nn.Module, args: Any, output: Any) -> Tensor | None:
        floating = isinstance(output, Tensor) and output.is_floating_point() and output.numel() > 1
        if not floating or id(module) not in self._leaves:
            return None
        # In backward a checkpointed segment runs again, and has to give the same: it does not then.
        if torch._C._current_autograd_node() is not None:
            return None
        numbers = torch.randn(output.shape, generator=self._generator)
        scale = self._part * output.detach().float().std()
        return output + (numbers.to(output.device) * scale).to(output.dtype)
