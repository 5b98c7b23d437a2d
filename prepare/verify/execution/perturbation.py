"""Changes what every module of a forward gives: adds small random numbers to it, or rounds it."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module


class _Changed:
    """While it is entered, what a module without children gives is changed; uses torch's global hooks."""

    def __init__(self, model: nn.Module) -> None:
        self._leaves = {id(module) for module in model.modules() if not module._modules}

    def __enter__(self) -> Self:
        self._handle = torch_module.register_module_forward_hook(self._on_output)
        return self

    def __exit__(self, *raised: object) -> None:
        self._handle.remove()

    def _on_output(self, module: nn.Module, args: Any, output: Any) -> Tensor | None:
        floating = isinstance(output, Tensor) and output.is_floating_point() and output.numel() > 1
        return self._changed(output) if floating and id(module) in self._leaves else None

    def _changed(self, output: Tensor) -> Tensor | None:
        raise NotImplementedError


class Noise(_Changed):
    """While it is entered, the output of each module without children is off by `part` of its deviation.

    What gradients make of that is what they may be off by: where the forward errs by so much, a ReLU
    turns here and there, and the winner of a pooling changes. Uses its own random numbers.
    """

    def __init__(self, model: nn.Module, part: float, seed: int) -> None:
        super().__init__(model)
        self._part, self._generator = part, torch.Generator().manual_seed(seed)

    def _changed(self, output: Tensor) -> Tensor | None:
        # In backward a checkpointed segment runs again, and has to give the same: it does not then.
        if torch._C._current_autograd_node() is not None:
            return None
        numbers = torch.randn(output.shape, generator=self._generator)
        scale = self._part * output.detach().float().std()
        return output + (numbers.to(output.device) * scale).to(output.dtype)


class Rounded(_Changed):
    """While it is entered, the output of each module without children is rounded to `dtype`.

    Its gradient is, too. So a model in float32 shows about the error that it would have in 16 bits.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(model)
        self._dtype = dtype

    def _changed(self, output: Tensor) -> Tensor:
        return output.to(self._dtype).to(output.dtype)
