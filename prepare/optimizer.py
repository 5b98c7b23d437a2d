"""Keeps the state of an optimizer in line with its parameters: type, device and every stride."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from prepare.transfer import FlatMove, Move, Transfer


class KeepInLine:
    """A hook that runs after `optimizer.load_state_dict`, which keeps the strides of the file.

    torch's fused CPU optimizers walk parameter and state by raw pointers, so a state in another
    layout than its parameter corrupts the weights without a word.
    """

    def __call__(self, optimizer: Optimizer) -> None:
        Transfer(list(state_moves(optimizer, {}))).run()

    def install(self, optimizer: Optimizer) -> None:
        """Registers the hook, once."""
        hooks = optimizer._optimizer_load_state_dict_post_hooks.values()
        if not any(isinstance(hook, KeepInLine) for hook in hooks):
            optimizer.register_load_state_dict_post_hook(self)


def state_moves(optimizer: Optimizer, moves: dict[int, Move | FlatMove]) -> Iterator[Move]:
    """What is to be done to the state of `optimizer` when its parameters make `moves` (by object id).

    A state tensor of its parameter's shape (a moment, a maximum) gets the parameter's device,
    dtype and strides; integers keep their dtype, and step counters are left alone.
    """
    for parameter, state in optimizer.state.items():
        device, dtype, stride = _becomes(parameter, moves.get(id(parameter)))
        for name, tensor in state.items():
            if (
                not isinstance(tensor, Tensor)
                or tensor.shape != parameter.shape
                or not tensor.dim()
            ):
                continue
            to = dtype if tensor.is_floating_point() else tensor.dtype
            if (tensor.device, tensor.dtype, tensor.stride()) != (device, to, stride):
                yield Move(f"optimizer state {name}", [tensor], device, to, stride)


def _becomes(parameter: Tensor, move: Move | FlatMove | None) -> tuple[Any, ...]:
    if move is None:
        return parameter.device, parameter.dtype, parameter.stride()
    stride = move.stride if isinstance(move, Move) else parameter.stride()
    return move.device, move.dtype, stride


def trains_in_float16(optimizer: Optimizer, moves: dict[int, Move | FlatMove]) -> bool:
    """Whether a parameter of `optimizer` would be float16: GradScaler refuses those, and Adam's eps is 0."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return any(
        _becomes(parameter, moves.get(id(parameter)))[1] is torch.float16
        for parameter in parameters
    )
