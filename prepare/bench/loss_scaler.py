"""Scale the gradients of a training step in float16, as a training loop does with a GradScaler."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class LossScaler:
    """A GradScaler for steps without an optimizer; its factor adapts from step to step."""

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._scaler = torch.amp.GradScaler(device.type)
        # It unscales the gradients of an optimizer; this one only holds them.
        self._optimizer = torch.optim.SGD(parameters, lr=0.0)

    def backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Run backward from scaled outputs, then unscale the gradients and look for infinite ones.

        The gradients are those of a mean: without that, the scaled ones of an output in float16 overflow.
        """
        scaled = [
            self._scaler.scale(root.float() / root.numel()) if root.is_floating_point() else root
            for root in roots
        ]
        torch.autograd.backward(
            scaled, [g.to(s.dtype) for g, s in zip(gradients, scaled, strict=True)]
        )
        self._scaler.unscale_(self._optimizer)
        self._scaler.update()
