"""Move tensors to a device, dtype and strides: one allocation and one copy each, undone on failure."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prepare.core.model.huge_pages import huge_pages
from prepare.core.model.memory_format import span
from prepare.core.model.threads import OneThreadWorkers
from prepare.core.model.wait import wait_for
from prepare.core.utils.signals import act_on_interrupts, held_interrupts
from prepare.core.utils.wording import option, words
from prepare.errors import PartialError, RefusedError
from prepare.pipeline import copy_parts

# With `low_memory`, this share of the new data exists beside the old tensors at a time, or the largest one.
# For a smaller group, starting its copies takes longer than they do.
_LOW_MEMORY_SHARE = 1 / 32
# Elements of all tensors; with fewer, starting threads takes longer than the copies.
_LEAST_FOR_THREADS = 2**20


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

    def source(self) -> Tensor:
        """Return the data to copy."""
        return self.tensors[0].detach()

    def allocate(self) -> Tensor:
        """Return the new data, filled only if the tensor has no strides."""
        if self.stride is None:
            return self.source().to(self.device, self.dtype)
        shape = self.tensors[0].shape
        fresh = torch.empty_strided(shape, self.stride, dtype=self.dtype, device=self.device)
        return huge_pages(fresh)

    def new_data(self, fresh: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each tensor with its new data."""
        return [(each, fresh) for each in self.tensors]


@dataclass(frozen=True, slots=True)
class StorageMove:
    """Views of one storage that stay views of one storage: cast or moved together, strides kept."""

    path: str
    tensors: Sequence[Tensor]
    device: torch.device
    dtype: torch.dtype

    def source(self) -> Tensor:
        """Return the data to copy: the storage from the first element of a view to the last."""
        first = min(tensor.storage_offset() for tensor in self.tensors)
        last = max(t.storage_offset() + span(t.shape, t.stride()) for t in self.tensors)
        return self.tensors[0].detach().as_strided((last - first,), (1,), first)

    def allocate(self) -> Tensor:
        """Return the new data, empty."""
        return huge_pages(torch.empty(len(self.source()), dtype=self.dtype, device=self.device))

    def new_data(self, fresh: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each tensor with its new data."""
        first = self.source().storage_offset()
        return [
            (t, fresh.as_strided(t.shape, t.stride(), t.storage_offset() - first))
            for t in self.tensors
        ]


AnyMove = Move | StorageMove


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


class Transfer:
    """Move tensors in place: the tensor objects stay the same, and their data is exchanged.

    All new data is allocated and copied before the first tensor changes, so a failure until then leaves
    nothing to undo; `undo` reverts the exchange. With `low_memory`, a few tensors at a time are exchanged
    and their old data freed, which cannot be undone.
    """

    def __init__(self, moves: Sequence[AnyMove], *, low_memory: bool = False) -> None:
        self._moves = moves
        self._low_memory = low_memory
        self._old: list[tuple[Tensor, Tensor]] = []

    def run(self) -> None:
        """Allocate, copy, then exchange.

        Raises:
            RefusedError: a value does not fit the new dtype.
            PartialError: with `low_memory`, after a failure midway.
        """
        with (
            torch.no_grad(),
            torch._C.DisableTorchFunctionSubclass(),
            OneThreadWorkers(_use_threads(self._moves)) as workers,
        ):
            if self._low_memory:
                self._one_by_one(workers)
                return
            fresh = _new_data(self._moves, workers)
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

    def _one_by_one(self, workers: OneThreadWorkers) -> None:
        done: list[str] = []
        try:
            for moves in _groups(self._moves):
                fresh = _new_data(moves, workers)
                with held_interrupts():
                    for tensor, data in fresh:
                        tensor.data = data
                    done += [move.path for move in moves]
        except BaseException as error:
            if not done:
                raise
            remaining = [move.path for move in self._moves[len(done) :]]
            raise PartialError(error, done, remaining) from error


def _new_data(moves: Sequence[AnyMove], workers: OneThreadWorkers) -> list[tuple[Tensor, Tensor]]:
    """Return each tensor with its new data; one allocation and one copy for each move."""
    sources = [move.source() for move in moves]
    allocated = [move.allocate() for move in moves]
    doubtful = [source.layout is not torch.strided for source in sources]
    parts = [
        (index, part)
        for index, pair in enumerate(zip(allocated, sources, strict=True))
        if not doubtful[index]
        for part in copy_parts.split(*pair)
    ]

    def copy(item: tuple[int, copy_parts.CopyPart]) -> None:
        index, part = item
        if not copy_parts.copy(part):
            doubtful[index] = True

    waiting = deque(item for item in parts if item[1].is_on_cpu)
    while waiting:  # an interrupt stops the workers, and its handler may not raise
        workers.run(copy, waiting)
        act_on_interrupts()
    for item in parts:
        if not item[1].is_on_cpu:
            copy(item)
            act_on_interrupts()
    # Copies to and from an accelerator run there: new data must have arrived before old data is given up.
    wait_for(tensor.device for pair in zip(allocated, sources, strict=True) for tensor in pair)
    pairs = []
    for move, fresh, source, look in zip(moves, allocated, sources, doubtful, strict=True):
        if look:
            check_cast(move.path, source, fresh)
        pairs += move.new_data(fresh)
    return pairs


def _groups(moves: Sequence[AnyMove]) -> Iterator[Sequence[AnyMove]]:
    """Yield the moves, small ones together, up to the largest one or a share of all new data."""
    sizes = [_elements(move) * move.dtype.itemsize for move in moves]
    largest = max(sizes, default=0)
    most = max(largest, sum(sizes) * _LOW_MEMORY_SHARE) if _use_threads(moves) else 0
    start = total = 0
    for place, size in enumerate(sizes):
        if place > start and total + size > most:
            yield moves[start:place]
            start, total = place, 0
        total += size
    if moves:
        yield moves[start:]


def _use_threads(moves: Sequence[AnyMove]) -> bool:
    return sum(map(_elements, moves)) >= _LEAST_FOR_THREADS


def _elements(move: AnyMove) -> int:
    return max(tensor.numel() for tensor in move.tensors)


def _module(path: str) -> str:
    return path.rpartition(".")[0] or words(cli="'*'", python="*")
