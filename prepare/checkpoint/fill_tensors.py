"""Fill a model with the values of a file: make each tensor once, in its final form, and copy into it."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from prepare.checkpoint.init_empty import like
from prepare.checkpoint.match_names import Matched, put
from prepare.checkpoint.open_weights import OpenedWeights
from prepare.checkpoint.stored_tensor import StoredTensor, digest, drop_pages, problem, several
from prepare.core.model.memory_format import canonical_stride, satisfied
from prepare.core.model.tensors import identity, is_expanded
from prepare.core.utils.signals import act_on_interrupts
from prepare.errors import Problem, RefusedError
from prepare.pipeline.collect_wants import make_table
from prepare.pipeline.preconditions import model_problems
from prepare.pipeline.tensor_table import RequestTable, TensorRequest, preserved_stride
from prepare.pipeline.transfer import Move, Transfer
from prepare.step import TensorStep

_CPU = torch.device("cpu")
_MOST_THREADS = 4


class _MappedMove(Move):
    """A move out of a mapped file, whose pages are given back when they have been copied."""

    def new_data(self, fresh: Tensor) -> list[tuple[Tensor, Tensor]]:
        source = self.tensors[0]
        # Only a tensor without gaps, in any order of its dimensions: it has these pages for itself.
        if satisfied(tuple(source.shape), source.stride()):
            drop_pages(source)
        return super().new_data(fresh)


def check_hashes(opened: OpenedWeights, unused: Collection[str] = ()) -> None:
    """Compare the sha256 of each tensor of the file with that of the manifest, but of those in `unused`.

    Raises:
        CheckpointError: a tensor is not what was saved.
    """
    used = (stored for name, stored in opened.stored.items() if name not in unused)
    stored = list({id(each): each for each in used if each.name in opened.digests}.values())
    pool = ThreadPoolExecutor(max(1, min(_MOST_THREADS, torch.get_num_threads())))
    try:
        for each, digest in zip(stored, pool.map(StoredTensor.digest, stored), strict=True):
            act_on_interrupts()
            if digest != opened.digests[each.name]:
                wrong = "is not what was saved: its sha256 is another"
                raise each.error(wrong, "fetch or save the file again")
    finally:
        pool.shutdown(cancel_futures=True)


def fill(
    model: nn.Module,
    opened: OpenedWeights,
    matched: Matched,
    steps: Sequence[TensorStep],
    *,
    changed: bool,
) -> Callable[[], None]:
    """Put the matched values into `model`, each tensor in the form that `steps` want.

    A tensor on meta is replaced by a new object; a tensor that holds values stays, and gets new data.
    The model is not changed before everything has been read and checked. `changed` says that the code of a
    module may have written into the mapped tensors. Return a callback that restores the data; a Snapshot
    of the modules restores the objects.

    Raises:
        CheckpointError: the file is damaged, or leaves a tensor without values.
        RefusedError: the model cannot be changed now, or a dtype cannot hold the values.
    """
    table = make_table(model, steps)
    pairs = [(request, _value(opened, matched, request)) for request in table.requests]
    filled = [(request, value) for request, value in pairs if value is not None]
    _refuse(model, table, [request for request, _ in filled])
    if empty := [request for request, value in pairs if value is None and request.tensor.is_meta]:
        wrong = "is not in the file, and on the meta device it holds no values"
        remedy = "give a function that builds the model, or a model that holds values"
        raise several([problem(opened.path, r.path, wrong, remedy) for r in empty])
    mapped = {s.values.untyped_storage()._cdata for s in opened.stored.values() if s.droppable}
    mapped = set() if changed else mapped
    transfer = Transfer([_move(request, value, mapped) for request, value in filled])
    fresh = list(zip((request for request, _ in filled), transfer.copies(), strict=True))
    # A tensor on meta cannot get the data of another device: a new object takes all its places.
    new = {id(t): like(t, data) for r, data in fresh for t in r.tensors if t.is_meta}
    for request, _ in fresh:
        for place in request.places:
            if place.tensor.is_meta:
                put(model, place, new[id(place.tensor)])
    transfer.exchange([(t, data) for r, data in fresh for t in r.tensors if not t.is_meta])
    return transfer.undo


def _value(opened: OpenedWeights, matched: Matched, request: TensorRequest) -> Tensor | None:
    """Return the values for one tensor, the same in all its places; None if the file has none."""
    paths = [place.path for place in request.places if place.path in matched.values]
    if not paths:
        return None
    first = matched.values[paths[0]]
    for path in paths[1:]:
        both = matched.values[path], first
        here, there = ("", "") if identity(both[0]) == identity(first) else map(digest, both)
        if here != there:
            wrong = f"is another tensor than {opened.place_of(paths[0])[1]}, and in the model they are one"
            remedy = f"sha256 {here[:8]} and {there[:8]}"
            raise several([problem(*opened.place_of(path), wrong, remedy)])
    return first


def _move(request: TensorRequest, value: Tensor, mapped: Collection[int]) -> Move:
    """Return the copy of the values into the final form of a tensor."""
    move, tensor = request.move(), request.tensor
    device, dtype = (move.device, move.dtype) if move else (tensor.device, tensor.dtype)
    stride = (move and move.stride) or preserved_stride(tensor)
    if is_expanded(tensor):
        stride = canonical_stride(tensor.shape, "contiguous")
    device = _CPU if device.type == "meta" else device
    kind = _MappedMove if value.untyped_storage()._cdata in mapped else Move
    return kind(request.path, [value], device, dtype, stride, request.clamp)


def _refuse(model: nn.Module, table: RequestTable, filled: list[TensorRequest]) -> None:
    """Refuse a model that cannot be changed now, or whose views of one storage would be separated."""
    problems: list[Problem] = []
    if any(request.move() for request in table.requests if not request.tensor.is_meta):
        problems += model_problems(model, table)
    requested = {id(request) for request in filled}
    for views in table.shared:
        if len(views.requests) > 1 and any(id(request) in requested for request in views.requests):
            wrong = "shares its storage with other tensors, and would be torn from them"
            remedy = "load it with model.load_state_dict, then apply the pipeline"
            problems.append(Problem(views.requests[0].path, wrong, remedy))
    if problems:
        raise RefusedError.of(problems)
