"""Move tensors to a device, dtype and strides: one allocation and one copy each, undone on failure."""

from cmath import isfinite
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from prepare.core.forward.input_formatter import CAST_STEP, keep_option
from prepare.core.model.devices import wait_for, with_threads
from prepare.core.model.memory_format import span
from prepare.core.model.tensors import is_plain, name_of, special_form, stored_values, with_bits_of
from prepare.core.utils.process_state import act_on_interrupts, held_interrupts
from prepare.errors import PartialError, RefusedError

# With `low_memory`, this share of the new data exists beside the old tensors at a time, or the largest one.
# For a smaller group, starting its copies takes longer than they do.
_LOW_MEMORY_SHARE = 1 / 32
# Elements of a part, which one thread copies. On two processors at load 10, networks of 20 to 500 MB took 1.8
# to 8.6 times as long (the minima of 9 to 40 pairs), and 5 to 15 times the processor time, with torch's own
# parallel loops in place of parts: its threads wait for each other. Two threads that each took the next part
# were 0.97 to 1.10 times as fast as one, for the same processor time.
_PART = 2**18
# With fewer elements, one kernel is faster than two.
_SMALL = 2**15


@dataclass(frozen=True, slots=True)
class Move:
    """Tensors that are the same view, and their new device, dtype and strides (in elements).

    `stride` is None for a sparse tensor. `path` is a name for messages. With `clamp`, values beyond the
    range of the new dtype become its largest number. With `paths`, their names, the tensors are different
    views of one storage, and stay so: they are cast or moved together, as one row of numbers.
    """

    path: str
    tensors: Sequence[Tensor]
    device: torch.device
    dtype: torch.dtype
    stride: tuple[int, ...] | None
    clamp: bool = False
    paths: Sequence[str] = ()

    def source(self) -> Tensor:
        """Return the data to copy: of views, from the first element of one to the last."""
        first = self.tensors[0].detach()
        if not self.paths:
            # torch's copy from float32 to float16 ignores the negative bit.
            return first.resolve_neg()
        start = self._start()
        last = max(t.storage_offset() + span(t.shape, t.stride()) for t in self.tensors)
        return with_bits_of(self.tensors[0], first).as_strided((last - start,), (1,), start)

    def _start(self) -> int:
        return min(int(tensor.storage_offset()) for tensor in self.tensors)

    def allocate(self, source: Tensor) -> Tensor:
        """Return the new data of `source`, filled only if the tensor has no strides."""
        if self.stride is None:
            # To be clamped, the values of one place must be added up before.
            source = source.coalesce() if self.clamp and not source.is_coalesced() else source
            return source.to(self.device, self.dtype)
        return torch.empty_strided(source.shape, self.stride, dtype=self.dtype, device=self.device)

    def new_data(self, fresh: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each tensor with its new data."""
        if not self.paths:
            return [(each, fresh) for each in self.tensors]
        start = self._start()
        return [
            (t, with_bits_of(t, fresh.as_strided(t.shape, t.stride(), t.storage_offset() - start)))
            for t in self.tensors
        ]

    def check_cast(self, fresh: Tensor) -> None:
        """Clamp or refuse values that the new dtype cannot hold; what lies between views is free."""
        if self.clamp or not self.paths:
            check_cast(self.path, self.source(), fresh, clamp=self.clamp)
            return
        for path, (tensor, data) in zip(self.paths, self.new_data(fresh), strict=True):
            check_cast(path, tensor.detach(), data)


Part = tuple[Tensor, Tensor]  # what a copy fills, and with what


def check_cast(path: str, old: Tensor, new: Tensor, *, clamp: bool = False) -> None:
    """Refuse a cast of `old`, which is in `new`, that turns a finite value into infinity.

    With `clamp`, give such values in `new` the largest finite number instead.

    Raises:
        RefusedError: a finite value has become infinite; it names the tensor `path`.
    """
    if old.is_meta or new.is_meta or not is_narrower(new.dtype, old.dtype):
        return
    if old.layout is torch.sparse_coo:
        # Values of one place are added up, and their sum may be infinite.
        old, new = (stored_values(each.coalesce()) for each in (old, new))
    # A copy from an accelerator to main memory may still be running.
    arrived = new.device.type != "cpu" or old.device.type == "cpu"
    cast = new if arrived else old.to(new.dtype)
    cast = cast.float() if cast.dtype.itemsize == 1 else cast  # float8 has few operators
    if not cast.numel() or cast.sum().isfinite():
        return
    lost = old.isfinite() & ~cast.isfinite().to(old.device)
    if not lost.any():
        return
    values, largest = old[lost], torch.finfo(new.dtype).max
    if clamp and not old.is_complex():
        new[lost.to(new.device)] = values.clamp(-largest, largest).to(new.device, new.dtype)
        return
    worst, name = values[values.abs().argmax()].item(), name_of(new.dtype)
    wrong = (
        f"{len(values)} of its values would become inf: it holds {worst:.6g}, "
        f"and the largest {name} is {largest:.6g}"
    )
    raise RefusedError(path, wrong, _remedy(path, abs(worst), new.dtype, old.dtype))


def _remedy(path: str, worst: float, new: torch.dtype, old: torch.dtype) -> str:
    if new.itemsize > 2:
        return f"keep it in {name_of(old)}, or change the value"
    module = path.rpartition(".")[0] or "*"
    remedy = f"keep it: {keep_option(module)}, or clamp it: steps.{CAST_STEP}.clamp=true"
    fits = new is torch.float16 and worst <= torch.finfo(torch.bfloat16).max
    return f"steps.{CAST_STEP}.dtype=bfloat16, or {remedy}" if fits else remedy


class Transfer:
    """Move tensors in place: the tensor objects stay the same, and their data is exchanged.

    All new data is allocated and copied before the first tensor changes, so a failure until then leaves
    nothing to undo; `undo` reverts the exchange. With `low_memory`, a few tensors at a time are exchanged
    and their old data freed, which cannot be undone.
    """

    def __init__(self, moves: Sequence[Move], *, low_memory: bool = False) -> None:
        self._moves = moves
        self._low_memory = low_memory
        self._old: list[tuple[Tensor, Tensor]] = []
        self._freed: list[str] = []

    def run(self) -> None:
        """Allocate, copy, then exchange.

        Raises:
            RefusedError: a value does not fit the new dtype, or a tensor has a form that stays as it is, or
                is shared with other processes.
        """
        _check_forms(self._moves)
        with _copying():
            for moves in _groups(self._moves) if self._low_memory else [self._moves]:
                fresh = _new_data(moves)
                with held_interrupts():
                    for tensor, data in fresh:
                        self._old.append((tensor, tensor.data))
                        tensor.data = data
                    if self._low_memory:
                        self._old.clear()
                        self._freed += [move.path for move in moves]

    def copies(self) -> list[Tensor]:
        """Return the new data of each move, and leave the tensors as they are.

        Raises:
            RefusedError: a value does not fit the new dtype.
        """
        with _copying():
            return [data for move in self._moves for _, data in _new_data([move])]

    def undo(self) -> None:
        """Give every tensor its old data back; safe to call more than once."""
        with held_interrupts():
            while self._old:
                tensor, data = self._old[-1]
                tensor.data = data
                self._old.pop()

    def raise_partial(self, error: BaseException) -> None:
        """Raise PartialError if the old data of changed tensors is freed, so that nothing can be undone."""
        if self._freed:
            remaining = [move.path for move in self._moves[len(self._freed) :]]
            raise PartialError(error, self._freed, remaining) from error


@contextmanager
def _copying() -> Iterator[None]:
    """Copy in one thread, without autograd and the code of subclasses."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), with_threads(1):
        yield


def _check_forms(moves: Sequence[Move]) -> None:
    forms = [(move.path, form) for move in moves if (form := special_form(move.tensors[0]))]
    for path, form in forms:
        wrong = f"is {form}, whose parts cannot be changed in place"
        remedy = "store it dense or as sparse COO, or keep it out of the steps"
        raise RefusedError(path, wrong, remedy)
    shared = [move.path for move in moves if _is_shared(move)]
    if shared:
        more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        wrong = "in memory that other processes may share, and would go on using as it is"
        remedy = "prepare the model before model.share_memory(), or prepare copy.deepcopy(model)"
        raise RefusedError(shared[0] + more, wrong, remedy)


def _is_shared(move: Move) -> bool:
    """Return whether a move takes a tensor out of shared memory; to another device is meant as a copy."""
    tensor = move.tensors[0]
    if not (is_plain(tensor) and tensor.is_cpu) or move.device != tensor.device:
        return False
    return tensor.untyped_storage().is_shared()


def _new_data(moves: Sequence[Move]) -> list[tuple[Tensor, Tensor]]:
    """Return each tensor with its new data; one allocation and one copy for each move."""
    copies = [(move.allocate(source), source) for move in moves for source in [move.source()]]
    doubtful: set[int] = set()
    for index, (target, source) in enumerate(copies):
        if source.layout is not torch.strided:
            doubtful.add(index)
            continue
        for part in _split(target, source):
            if not copy_part(part):
                doubtful.add(index)
            act_on_interrupts()
    # Copies to and from an accelerator run there: new data must have arrived before old data is given up.
    wait_for(tensor.device for pair in copies for tensor in pair)
    exchanged = []
    for index, (move, (fresh, _)) in enumerate(zip(moves, copies, strict=True)):
        if index in doubtful:
            move.check_cast(fresh)
        for tensor, data in (pairs := move.new_data(fresh)):
            if not torch._has_compatible_shallow_copy_type(tensor, data):
                wrong = f"is on {tensor.device}, and torch cannot give it data on {data.device}"
                raise RefusedError(move.path, wrong, "build the model there")
        exchanged += pairs
    return exchanged


def _groups(moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
    """Yield the moves, small ones together, up to the largest one or a share of all new data."""
    sizes = [max(t.numel() for t in move.tensors) * move.dtype.itemsize for move in moves]
    most = max([*sizes, sum(sizes) * _LOW_MEMORY_SHARE])
    start = total = 0
    for place, size in enumerate(sizes):
        if place > start and total + size > most:
            yield moves[start:place]
            start, total = place, 0
        total += size
    if moves:
        yield moves[start:]


def _split(target: Tensor, source: Tensor) -> Iterable[Part]:
    """Return the copies that fill `target` with `source`: one of all on an accelerator, or if it is small."""
    if source.numel() <= _PART or not (target.is_cpu and source.is_cpu):
        return [(target, source)]
    if target.stride() == source.stride() and span(source.shape, source.stride()) == source.numel():
        target, source = (t.as_strided((t.numel(),), (1,)) for t in (target, source))
    rows = max(1, _PART * len(source) // source.numel())
    return zip(target.split(rows), source.split(rows), strict=True)


def copy_part(part: Part) -> bool:
    """Copy the second tensor into the first; return whether no cast can have made a value infinite."""
    target, source = part
    on_cpu = target.is_cpu and source.is_cpu
    value = source
    if on_cpu and source.numel() >= _SMALL and source.stride() != target.stride():
        # torch's kernel that casts and permutes at once goes element by element.
        value = source.to(target.dtype)
    target.copy_(value, non_blocking=True)
    if not is_narrower(target.dtype, source.dtype):
        return True
    # The sum of values that are not all finite is not finite.
    return on_cpu and target.dtype.itemsize > 1 and isfinite(target.sum().item())


@cache
def is_narrower(new: torch.dtype, old: torch.dtype) -> bool:
    """Return whether a cast from `old` to `new` can make a finite number infinite."""
    if not all(dtype.is_floating_point or dtype.is_complex for dtype in (new, old)):
        return False
    return torch.finfo(new).max < torch.finfo(old).max
