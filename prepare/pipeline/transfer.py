"""Realises what is wanted of tensors: each is allocated once and copied once; undone on failure."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prepare.core.model.huge_pages import huge_pages
from prepare.core.model.memory_format import span
from prepare.core.utils.signals import held_interrupts
from prepare.errors import PartialError, RefusedError

_PIECE = 2**19  # elements: some megabytes, which a cache holds
_SMALL = 2**15  # elements, below which one kernel is faster than two


@dataclass(frozen=True, slots=True)
class Move:
    """Tensors that are one and the same view, and how they are to be: device, dtype, strides in elements.

    A tensor without strides (sparse, mkldnn) has None for them. `path` is a name for messages.
    """

    path: str
    tensors: Sequence[Tensor]
    device: torch.device
    dtype: torch.dtype
    stride: tuple[int, ...] | None

    def realise(self) -> list[tuple[Tensor, Tensor]]:
        """The new data of each tensor; one allocation, one copy."""
        tensor = self.tensors[0]
        if self.stride is None:
            fresh = tensor.detach().to(self.device, self.dtype)
        else:
            fresh = torch.empty_strided(
                tensor.shape, self.stride, dtype=self.dtype, device=self.device
            )
            _copy(huge_pages(fresh), tensor)
        check_cast(self.path, tensor, fresh)
        return [(each, fresh) for each in self.tensors]


@dataclass(frozen=True, slots=True)
class FlatMove:
    """Views of one storage that stay views of one storage: cast or moved as one, strides kept."""

    path: str
    tensors: Sequence[Tensor]
    device: torch.device
    dtype: torch.dtype

    def realise(self) -> list[tuple[Tensor, Tensor]]:
        """The new data of each tensor; one allocation, one copy."""
        first = min(tensor.storage_offset() for tensor in self.tensors)
        last = max(t.storage_offset() + span(t.shape, t.stride()) for t in self.tensors)
        source = self.tensors[0].detach().as_strided((last - first,), (1,), first)
        fresh = huge_pages(torch.empty(last - first, dtype=self.dtype, device=self.device))
        fresh.copy_(source, non_blocking=True)
        check_cast(self.path, source, fresh)
        return [
            (t, fresh.as_strided(t.shape, t.stride(), t.storage_offset() - first))
            for t in self.tensors
        ]


def check_cast(path: str, old: Tensor, new: Tensor) -> None:
    """Refuses a cast to float16 that makes infinity of a number."""
    if new.dtype is not torch.float16 or old.dtype is new.dtype or old.is_meta or not old.numel():
        return
    if old.layout is not torch.strided:
        return
    largest = torch.finfo(new.dtype).max
    low, high = (bound.item() for bound in torch.aminmax(old))
    if -largest <= low and high <= largest:
        return
    lost = old.isfinite() & ~new.isfinite().to(old.device)
    if lost.any():
        worst = old[lost].abs().max().item()
        wrong = f"holds {worst:.6g}, and the largest float16 is {largest:.0f}"
        remedy = f"steps.half.dtype=bfloat16, or keep it: steps.half.keep=[norms,{_module(path)}]"
        raise RefusedError(
            path, f"{int(lost.sum())} of its values would become inf: it {wrong}", remedy
        )


def _copy(fresh: Tensor, source: Tensor) -> None:
    """Copies; a cast that also turns the dimensions goes piece by piece through the cache.

    torch's kernel for both at once reads and writes one element at a time; a cast of a piece that
    stays in the cache, and then a turn of it, are two fast kernels in its place.
    """
    turned = source.stride() != fresh.stride() and source.dtype != fresh.dtype
    here = {source.device.type, fresh.device.type} == {"cpu"}
    if not (turned and here and source.numel() >= _SMALL):
        fresh.copy_(source, non_blocking=True)
        return
    rows = max(1, _PIECE * len(source) // source.numel())
    for piece, part in zip(fresh.split(rows), source.split(rows), strict=True):
        piece.copy_(part.to(fresh.dtype))


class Transfer:
    """Moves tensors in place: the objects stay the same, their data is exchanged.

    Everything is allocated and copied before the first tensor is touched, so a failure there has
    nothing to undo; `undo` takes back what was exchanged. With `low_memory` each tensor is
    exchanged at once and its old data given up: that cannot be undone.
    """

    def __init__(self, moves: Sequence[Move | FlatMove], *, low_memory: bool = False) -> None:
        self._moves = moves
        self._low_memory = low_memory
        self._old: list[tuple[Tensor, Tensor]] = []

    def run(self) -> None:
        """Allocates, copies, then exchanges.

        Raises:
            RefusedError: a value does not fit the dtype that is wanted.
            PartialError: with `low_memory`, after a failure midway.
        """
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if self._low_memory:
                self._one_by_one()
                return
            fresh = [pair for move in self._moves for pair in move.realise()]
            _settle(self._moves)
            with held_interrupts():
                for tensor, data in fresh:
                    self._old.append((tensor, tensor.data))
                    tensor.data = data

    def undo(self) -> None:
        """Gives every tensor its old data back; may be called again."""
        with held_interrupts():
            while self._old:
                tensor, data = self._old[-1]
                tensor.data = data
                self._old.pop()

    def _one_by_one(self) -> None:
        done: list[str] = []
        try:
            for move in self._moves:
                fresh = move.realise()
                with held_interrupts():
                    for tensor, data in fresh:
                        tensor.data = data
                    done.append(move.path)
        except BaseException as error:
            if not done:
                raise
            left = [move.path for move in self._moves[len(done) :]]
            raise PartialError(error, done, left) from error
        _settle(self._moves)


def _settle(moves: Sequence[Move | FlatMove]) -> None:
    """Waits for copies to an accelerator, so that no tensor is exchanged before its data is there."""
    for device in {move.device for move in moves}:
        if device.type in ("cuda", "xpu", "mps"):
            getattr(torch, device.type).synchronize()


def _module(path: str) -> str:
    return path.rpartition(".")[0] or "'*'"
