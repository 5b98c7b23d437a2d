"""Perturb or round the outputs or inputs of modules in a forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from prepare.core.model.quantized import rounded_inputs


class _ChangedOutputs:
    """While entered, changes the output of each module without children; uses torch's global hooks."""

    def __init__(self, model: nn.Module) -> None:
        self._leaves = {id(module) for module in model.modules() if not module._modules}

    def __enter__(self) -> Self:
        self._handle = torch_module.register_module_forward_hook(self._on_output)
        return self

    def __exit__(self, *raised: object) -> None:
        self._handle.remove()

    def _on_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        is_float = isinstance(output, Tensor) and output.is_floating_point() and output.numel() > 1
        return self._changed(output) if is_float and id(module) in self._leaves else None

    def _changed(self, output: Tensor) -> Tensor | None:
        raise NotImplementedError


class Perturbed(_ChangedOutputs):
    """While entered, adds noise of `fraction` of its standard deviation to the output of each leaf module.

    The change of the gradients is the error that they may have: with a forward error of this size, some
    ReLUs switch and the maximum of some pooling windows changes. Uses its own random numbers.
    """

    def __init__(self, model: nn.Module, fraction: float, seed: int) -> None:
        super().__init__(model)
        self._fraction, self._generator = fraction, torch.Generator().manual_seed(seed)

    def _changed(self, output: Tensor) -> Tensor | None:
        # In backward a checkpointed segment runs again, without noise: new noise would not match.
        if torch._C._current_autograd_node() is not None:
            return None
        noise = torch.randn(output.shape, generator=self._generator)
        scale = self._fraction * output.detach().float().std()
        return output + (noise.to(output.device) * scale).to(output.dtype)


class Rounded(_ChangedOutputs):
    """While entered, rounds the output of each leaf module, and its gradient, to `dtype`.

    So a model in float32 has about the error that it would have in 16 bits.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(model)
        self._dtype = dtype

    def _changed(self, output: Tensor) -> Tensor:
        return output.to(self._dtype).to(output.dtype)


class RoundedInputs:
    """While entered, rounds the inputs of modules, by their ids, as they do with their quantized weights."""

    def __init__(self, weights: Mapping[int, Tensor]) -> None:
        self._weights = weights

    def __enter__(self) -> Self:
        self._handle = torch_module.register_module_forward_pre_hook(self._on_inputs)
        return self

    def __exit__(self, *raised: object) -> None:
        self._handle.remove()

    def _on_inputs(self, module: nn.Module, args: Any) -> Any:
        weight = self._weights.get(id(module))
        if weight is None or not args:
            return None
        return rounded_inputs(args[0], weight), *args[1:]
