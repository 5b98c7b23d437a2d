"""Fill a model with the values of a file: make each tensor once, in its final form, and read into it."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from prepare.checkpoint.init_empty import like, without_values
from prepare.checkpoint.match_names import Matched
from prepare.checkpoint.open_weights import OpenedWeights
from prepare.checkpoint.stored_tensor import StoredTensor, problem, raw, several
from prepare.core.model.memory_format import canonical_stride
from prepare.core.model.tensors import is_expanded
from prepare.core.utils.signals import act_on_interrupts, held_interrupts
from prepare.errors import Problem, RefusedError
from prepare.pipeline.collect_wants import make_table
from prepare.pipeline.preconditions import context_problems, model_problems
from prepare.pipeline.tensor_table import RequestTable, TensorRequest, preserved_stride
from prepare.pipeline.transfer import check_cast
from prepare.step import TensorStep

_CPU = torch.device("cpu")
_MOST_THREADS = 4


class _TensorRead(NamedTuple):
    """A tensor of the model, the source of its values, and its final form; `aliases` must hold the same."""

    request: TensorRequest
    source: StoredTensor | Tensor
    aliases: list[StoredTensor]
    device: torch.device
    dtype: torch.dtype
    stride: tuple[int, ...]


def fill(
    model: nn.Module, opened: OpenedWeights, matched: Matched, steps: Sequence[TensorStep]
) -> Callable[[], None]:
    """Put the matched values into `model`, each tensor in the form that `steps` want.

    A tensor on meta is replaced by a new object; a tensor that holds values stays, and gets new data.
    The model is not changed before everything has been read and checked. Return a callback that
    restores the data; a Snapshot of the modules restores the objects.

    Raises:
        CheckpointError: the file is damaged, or leaves a tensor without values.
        RefusedError: the model cannot be changed now, or a dtype cannot hold the values.
    """
    table = make_table(model, steps)
    planned = [(request, _plan_read(request, matched)) for request in table.requests]
    reads = [read for _, read in planned if read]
    _refuse(model, table, reads)
    if empty := [request for request, read in planned if not read and request.tensor.is_meta]:
        wrong = "is not in the file, and on the meta device it holds no values"
        remedy = "give a function that builds the model, or a model that holds values"
        raise several([problem(opened.path, r.places[0].path, wrong, remedy) for r in empty])
    with torch.no_grad():
        fresh = _read_all(reads, opened)
        return _exchange(model, zip(reads, fresh, strict=True))


def _plan_read(request: TensorRequest, matched: Matched) -> _TensorRead | None:
    """Return the read of one tensor; None if the file has no values for it."""
    sources = [matched.sources[p.path] for p in request.places if p.path in matched.sources]
    if not sources:
        return None
    stored = list({id(s): s for s in sources if isinstance(s, StoredTensor)}.values())
    move, tensor = request.move(), request.tensor
    device, dtype = (move.device, move.dtype) if move else (tensor.device, tensor.dtype)
    stride = (move and move.stride) or preserved_stride(tensor)
    if is_expanded(tensor):
        stride = canonical_stride(tensor.shape, "contiguous")
    source = stored[0] if stored else sources[0]
    device = _CPU if device.type == "meta" else device
    return _TensorRead(request, source, stored[1:], device, dtype, stride)


def _refuse(model: nn.Module, table: RequestTable, reads: list[_TensorRead]) -> None:
    """Refuse a model that cannot be changed now, or whose views of one storage would be separated."""
    problems = list(context_problems())
    if any(w.move() for w in table.requests if not w.tensor.is_meta):
        problems += model_problems(model, table)
    requested = {id(read.request) for read in reads}
    for views in table.shared:
        if len(views.requests) > 1 and any(id(request) in requested for request in views.requests):
            wrong = "shares its storage with other tensors, and would be torn from them"
            remedy = "load it with model.load_state_dict, then apply the pipeline"
            problems.append(Problem(views.requests[0].places[0].path, wrong, remedy))
    if problems:
        raise RefusedError.of(problems)


def _read_all(reads: list[_TensorRead], opened: OpenedWeights) -> list[Tensor]:
    workers = max(1, min(_MOST_THREADS, torch.get_num_threads(), len(reads)))
    pool = ThreadPoolExecutor(workers)
    try:
        filled = []
        for fresh in pool.map(partial(_read, opened=opened), reads):
            act_on_interrupts()
            filled.append(fresh)
        return filled
    finally:
        pool.shutdown(cancel_futures=True)


@torch.no_grad()  # the setting belongs to each thread
def _read(read: _TensorRead, opened: OpenedWeights) -> Tensor:
    tensor, source = read.request.tensor, read.source
    fresh = torch.empty_strided(tensor.shape, read.stride, dtype=read.dtype, device=read.device)
    if isinstance(source, Tensor):
        fresh.copy_(source.resolve_neg())
        check_cast(read.request.path, source, fresh, clamp=read.request.clamp)
        return fresh
    _fill_one(fresh, source, read.request, opened)
    for alias in read.aliases:
        if (digest := _digest(alias, opened)) != (first := _digest(source, opened)):
            wrong = f"is another tensor than {source.name}, and in the model they are one"
            raise alias.error(wrong, f"sha256 {digest[:8]} and {first[:8]}")
    return fresh


def _fill_one(
    fresh: Tensor, source: StoredTensor, request: TensorRequest, opened: OpenedWeights
) -> None:
    """Read the values of `source` into `fresh`, the requested tensor; check hash and cast."""
    rows = fresh if fresh.dim() else fresh.unsqueeze(0)
    expected = opened.digests.get(source.name)
    digest = hashlib.sha256()
    # Cast first, then copy into the layout: torch's kernel for both at once goes element by element.
    # Reuse one buffer: to free and allocate memory for each piece costs more than the cast.
    cast: Tensor | None = None
    for row, piece in source.pieces():
        if expected:
            digest.update(raw(piece))
        part = rows[row : row + len(piece)]
        if part.device.type == "cpu" and part.dtype is not piece.dtype:
            cast = torch.empty_like(piece, dtype=part.dtype) if cast is None else cast
            part.copy_(cast[: len(piece)].copy_(piece))
        else:
            part.copy_(piece)
        check_cast(request.path, piece, part, clamp=request.clamp)
    if expected and digest.hexdigest() != expected:
        wrong = "is not what was saved: its sha256 is another"
        raise source.error(wrong, "fetch or save the file again")


def _digest(source: StoredTensor, opened: OpenedWeights) -> str:
    """Return the sha256 of the values of a tensor in the file."""
    if (known := opened.digests.get(source.name)) is not None:
        return known
    digest = hashlib.sha256()
    for _, piece in source.pieces():
        digest.update(raw(piece))
    return digest.hexdigest()


def _exchange(model: nn.Module, filled: Iterable[tuple[_TensorRead, Tensor]]) -> Callable[[], None]:
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
                for tensor in read.request.tensors:
                    if tensor.is_meta:
                        _replace(model, read.request, tensor, fresh)
                    else:
                        old.append((tensor, tensor.data))
                        tensor.data = fresh
        if empty := without_values(model):
            wrong = "holds no values: it was made on the meta device, and no file holds it"
            remedy = "give a function that builds the model, in place of a model on meta"
            raise several([Problem(name, wrong, remedy) for name in empty])
    except BaseException:
        undo()
        raise
    return undo


def _replace(model: nn.Module, request: TensorRequest, tensor: Tensor, fresh: Tensor) -> None:
    """Put a new object in every place of a meta tensor, whose data cannot be set to another device's."""
    new = like(tensor, fresh)
    for place in request.places:
        if place.tensor is tensor:
            # By setattr: a recurrent module keeps its own list of parameters.
            setattr(model.get_submodule(place.owner), place.name, new)
