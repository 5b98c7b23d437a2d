"""Move tensors to a device, dtype and strides: one allocation and one copy each, undone on failure."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prepare.core.model.huge_pages import huge_pages
from prepare.core.model.memory_format import span
from prepare.core.utils.signals import held_interrupts
from prepare.core.utils.wording import option, words
from prepare.errors import PartialError, RefusedError

_PIECE = 2**19  # elements: a few megabytes, which fit in a cache
_SMALL = 2**15  # elements; below this, one kernel is faster than two


@dataclass(frozen=True, slots=True)
class Move:
    """Tensors that are the same view, and their new device, dtype and strides (in elements).

    `stride` is None for a tensor without strides (sparse, mkldnn). `path` is a name for messages.
    """

    path: str
    tensors: Sequence[Tensor]
    device: torch.device
    dtype: torch.dtype
    stride: tuple[int, ...] | None

    def new_data(self) -> list[tuple[Tensor, Tensor]]:
        """Return each tensor with its new data; one allocation, one copy."""
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
class StorageMove:
    """Views of one storage that stay views of one storage: cast or moved together, strides kept."""

    path: str
    tensors: Sequence[Tensor]
    device: torch.device
    dtype: torch.dtype

    def new_data(self) -> list[tuple[Tensor, Tensor]]:
        """Return each tensor with its new data; one allocation, one copy."""
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
    """Refuse a cast to float16 that turns a finite value into infinity."""
    if new.dtype is not torch.float16 or old.dtype is new.dtype or old.is_meta or not old.numel():
        return
    if old.layout is not torch.strided:
        return
    largest = torch.finfo(new.dtype).max
    low, high = (bound.item() for bound in torch.aminmax(old))
    if -largest <= low and high <= largest:
        return
    overflowing = old.isfinite() & ~new.isfinite().to(old.device)
    if overflowing.any():
        worst = old[overflowing].abs().max().item()
        count = int(overflowing.sum())
        wrong = (
            f"{count} of its values would become inf: it holds {worst:.6g}, "
            f"and the largest float16 is {largest:.0f}"
        )
        kept = option("half", "keep", ["norms", _module(path)])
        remedy = f"{option('half', 'dtype', 'bfloat16')}, or keep it: {kept}"
        raise RefusedError(path, wrong, remedy)


def _copy(fresh: Tensor, source: Tensor) -> None:
    """Copy `source` into `fresh`; cast in pieces if both dtype and strides change.

    torch's kernel that casts and permutes at once reads and writes one element at a time. Casting a piece
    that fits in the cache, and then permuting it, runs two fast kernels instead.
    """
    cast_and_permuted = source.stride() != fresh.stride() and source.dtype != fresh.dtype
    on_cpu = {source.device.type, fresh.device.type} == {"cpu"}
    if not (cast_and_permuted and on_cpu and source.numel() >= _SMALL):
        fresh.copy_(source, non_blocking=True)
        return
    rows = max(1, _PIECE * len(source) // source.numel())
    for piece, part in zip(fresh.split(rows), source.split(rows), strict=True):
        piece.copy_(part.to(fresh.dtype))


class Transfer:
    """Move tensors in place: the tensor objects stay the same, and their data is exchanged.

    All new data is allocated and copied before the first tensor changes, so a failure until then leaves
    nothing to undo; `undo` reverts the exchange. With `low_memory`, each tensor is exchanged at once and
    its old data freed, which cannot be undone.
    """

    def __init__(self, moves: Sequence[Move | StorageMove], *, low_memory: bool = False) -> None:
        self._moves = moves
        self._low_memory = low_memory
        self._old: list[tuple[Tensor, Tensor]] = []

    def run(self) -> None:
        """Allocate, copy, then exchange.

        Raises:
            RefusedError: a value does not fit the new dtype.
            PartialError: with `low_memory`, after a failure midway.
        """
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if self._low_memory:
                self._one_by_one()
                return
            fresh = [pair for move in self._moves for pair in move.new_data()]
            _synchronize(self._moves)
            with held_interrupts():
                for tensor, data in fresh:
                    self._old.append((tensor, tensor.data))
                    tensor.data = data

    def undo(self) -> None:
        """Give every tensor its old data back; safe to call more than once."""
        with held_interrupts():
            while self._old:
                tensor, data = self._old[-1]
                tensor.data = data
                self._old.pop()

    def _one_by_one(self) -> None:
        done: list[str] = []
        try:
            for move in self._moves:
                fresh = move.new_data()
                with held_interrupts():
                    for tensor, data in fresh:
                        tensor.data = data
                    done.append(move.path)
        except BaseException as error:
            if not done:
                raise
            remaining = [move.path for move in self._moves[len(done) :]]
            raise PartialError(error, done, remaining) from error
        _synchronize(self._moves)


def _synchronize(moves: Sequence[Move | StorageMove]) -> None:
    """Wait for copies to accelerators, so that a tensor is exchanged only after its data has arrived."""
    for device in {move.device for move in moves}:
        if device.type in ("cuda", "xpu", "mps"):
            getattr(torch, device.type).synchronize()


def _module(path: str) -> str:
    return path.rpartition(".")[0] or words(cli="'*'", python="*")
