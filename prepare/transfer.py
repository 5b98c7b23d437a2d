"""Realises a table of wants: each tensor is allocated once and copied once; undone on failure."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor and how it is to be: its device, dtype and strides (in elements).

    A tensor without strides (sparse, mkldnn) has None for them.
    """

    tensor: Tensor
    device: torch.device
    dtype: torch.dtype
    stride: tuple[int, ...] | None


class Transfer:
    """Moves tensors in place: the objects stay the same, their data is exchanged.

    Everything is allocated and copied before the first tensor is touched, so a failure there has
    nothing to undo; `undo` takes back what was exchanged.
    """

    def __init__(self, moves: Iterable[Move]) -> None:
        self._moves = list(moves)
        self._old: list[tuple[Tensor, Tensor]] = []

    def run(self) -> None:
        """Allocates, copies, then exchanges."""
        with torch.no_grad():
            fresh = [_realise(move) for move in self._moves]
            for move, data in zip(self._moves, fresh, strict=True):
                self._old.append((move.tensor, move.tensor.data))
                move.tensor.data = data

    def undo(self) -> None:
        """Gives every tensor its old data back."""
        while self._old:
            tensor, data = self._old.pop()
            tensor.data = data


def _realise(move: Move) -> Tensor:
    if move.stride is None:
        return move.tensor.detach().to(move.device, move.dtype)
    fresh = torch.empty_strided(
        move.tensor.shape, move.stride, dtype=move.dtype, device=move.device
    )
    return fresh.copy_(move.tensor)
