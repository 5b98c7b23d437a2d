"""Gives a model the values of a file: each tensor is made once, as it is to be, and read into its place."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from prepare.checkpoint.init_empty import like, without_values
from prepare.checkpoint.match_names import Matched
from prepare.checkpoint.open_weights import Opened
from prepare.checkpoint.stored_tensor import StoredTensor, problem, raw, several
from prepare.core.model.huge_pages import huge_pages
from prepare.core.model.memory_format import canonical_stride
from prepare.core.model.tensors import is_expanded
from prepare.core.utils.signals import held_interrupts
from prepare.errors import Problem, RefusedError
from prepare.pipeline.collect_wants import make_table
from prepare.pipeline.preconditions import context_problems, model_problems
from prepare.pipeline.tensor_table import RequestTable, TensorRequest, preserved_stride
from prepare.pipeline.transfer import check_cast
from prepare.step import TensorStep

_CPU = torch.device("cpu")
_AT_ONCE = 4


class _Read(NamedTuple):
    """A tensor of the model, where its values are, and how it is to be."""

    wanted: TensorRequest
    source: StoredTensor | Tensor
    also: list[StoredTensor]
    device: torch.device
    dtype: torch.dtype
    stride: tuple[int, ...]


def fill(
    model: nn.Module, opened: Opened, matched: Matched, steps: Sequence[TensorStep]
) -> Callable[[], None]:
    """Puts the values that were matched into `model`, each tensor as `steps` want it to be.

    What is on meta gets its first memory, in a new object; a tensor that holds values keeps its own,
    and gets new data. Nothing is touched before all has been read and checked. Gives the way back for
    data; for objects it is a Snapshot of the modules.

    Raises:
        CheckpointError: the file is damaged, or leaves a tensor without values.
        RefusedError: the model cannot take values in now, or a type cannot hold them.
    """
    table = make_table(model, steps)
    reads = [read for wanted in table.requests if (read := _planned(wanted, matched))]
    _refuse(model, table, reads)
    _nothing_left_out(opened, table, reads)
    with torch.no_grad():
        fresh = _read_all(reads, opened)
        return _exchange(model, zip(reads, fresh, strict=True))


def _planned(wanted: TensorRequest, matched: Matched) -> _Read | None:
    """What is to be read for one tensor; None where the file has nothing for it."""
    sources = [matched.found[p.path] for p in wanted.places if p.path in matched.found]
    if not sources:
        return None
    stored = list({id(s): s for s in sources if isinstance(s, StoredTensor)}.values())
    move, tensor = wanted.move(), wanted.tensor
    device, dtype = (move.device, move.dtype) if move else (tensor.device, tensor.dtype)
    stride = move.stride if move else preserved_stride(tensor)
    if is_expanded(tensor):
        stride = canonical_stride(tensor.shape, "contiguous")
    source = stored[0] if stored else sources[0]
    device = _CPU if device.type == "meta" else device
    return _Read(wanted, source, stored[1:], device, dtype, stride)


def _refuse(model: nn.Module, table: RequestTable, reads: list[_Read]) -> None:
    """Refuses what would be wrong: to act here and now, or to tear apart views of one storage."""
    problems = list(context_problems())
    if any(w.move() for w in table.requests if not w.tensor.is_meta):
        problems += model_problems(model, table)
    ours = {id(read.wanted) for read in reads}
    for views in table.storage_groups():
        if len(views.requests) > 1 and any(id(wanted) in ours for wanted in views.requests):
            wrong = "shares its storage with other tensors, and would be torn from them"
            remedy = "load it with model.load_state_dict, then apply the pipeline"
            problems.append(Problem(views.requests[0].places[0].path, wrong, remedy))
    if problems:
        raise RefusedError.of(problems)


def _nothing_left_out(opened: Opened, table: RequestTable, reads: list[_Read]) -> None:
    """That every tensor on meta gets its values: from the file, as nothing else has them."""
    ours = {id(read.wanted) for read in reads}
    problems = []
    for wanted in table.requests:
        path = wanted.places[0].path
        if wanted.tensor.is_meta and id(wanted) not in ours:
            remedy = "give a function that builds the model, or a model that holds values"
            wrong = "is not in the file, and on the meta device it holds no values"
            problems.append(problem(opened.path, path, wrong, remedy))
    if problems:
        raise several(problems)


def _read_all(reads: list[_Read], opened: Opened) -> list[Tensor]:
    workers = max(1, min(_AT_ONCE, torch.get_num_threads(), len(reads)))
    pool = ThreadPoolExecutor(workers)
    try:
        return list(pool.map(partial(_read, opened=opened), reads))
    finally:
        pool.shutdown(cancel_futures=True)


@torch.no_grad()  # which is each thread's own
def _read(read: _Read, opened: Opened) -> Tensor:
    tensor, source = read.wanted.tensor, read.source
    fresh = torch.empty_strided(tensor.shape, read.stride, dtype=read.dtype, device=read.device)
    if isinstance(source, Tensor):
        return fresh.copy_(source)
    _fill_one(huge_pages(fresh), source, read.wanted.places[0].path, opened)
    for other in read.also:
        if (one := _values(other, opened)) != (first := _values(source, opened)):
            wrong = f"is another tensor than {source.name}, and in the model they are one"
            raise other.error(wrong, f"sha256 {one[:8]} and {first[:8]}")
    return fresh


def _fill_one(fresh: Tensor, source: StoredTensor, path: str, opened: Opened) -> None:
    """Reads the values of `source` into `fresh`, which is `path` in the model; checks them on the way."""
    rows = fresh if fresh.dim() else fresh.unsqueeze(0)
    wanted = opened.digests.get(source.name)
    digest = hashlib.sha256()
    # A cast, and then a turn: torch's kernel for both at once goes element by element. Into the same
    # memory each time: what is freed and asked for again costs more than the cast.
    cast: Tensor | None = None
    for row, piece in source.pieces():
        if wanted:
            digest.update(raw(piece))
        part = rows[row : row + len(piece)]
        if part.device.type == "cpu" and part.dtype is not piece.dtype:
            cast = torch.empty_like(piece, dtype=part.dtype) if cast is None else cast
            part.copy_(cast[: len(piece)].copy_(piece))
        else:
            part.copy_(piece)
        check_cast(path, piece, part)
    if wanted and digest.hexdigest() != wanted:
        wrong = "is not what was saved: its sha256 is another"
        raise source.error(wrong, "fetch or save the file again")


def _values(source: StoredTensor, opened: Opened) -> str:
    """The sha256 of the values of a tensor, as it is in the file."""
    if (known := opened.digests.get(source.name)) is not None:
        return known
    digest = hashlib.sha256()
    for _, piece in source.pieces():
        digest.update(raw(piece))
    return digest.hexdigest()


def _exchange(model: nn.Module, filled: Iterable[tuple[_Read, Tensor]]) -> Callable[[], None]:
    old: list[tuple[Tensor, Tensor]] = []

    def undo() -> None:
        with held_interrupts():
            while old:
                tensor, data = old[-1]
                tensor.data = data
                old.pop()

    try:
        with held_interrupts():
            for read, fresh in filled:
                for tensor in read.wanted.tensors:
                    if tensor.is_meta:
                        _replace(model, read.wanted, tensor, fresh)
                    else:
                        old.append((tensor, tensor.data))
                        tensor.data = fresh
        if left := without_values(model):
            wrong = "holds no values: it was made on the meta device, and no file holds it"
            remedy = "give a function that builds the model, in place of a model on meta"
            raise several([Problem(name, wrong, remedy) for name in left])
    except BaseException:
        undo()
        raise
    return undo


def _replace(model: nn.Module, wanted: TensorRequest, tensor: Tensor, fresh: Tensor) -> None:
    """Puts a new object into every place of one on meta, which cannot be given data of another device."""
    new = like(tensor, fresh)
    for place in wanted.places:
        if place.tensor is tensor:
            # Through the module itself: a recurrent one keeps a list of its own.
            setattr(model.get_submodule(place.owner), place.name, new)
