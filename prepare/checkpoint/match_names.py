"""Which tensor of a file goes where in a model: `load_state_dict` says so, on stand-ins without values."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prepare.checkpoint.init_empty import on_meta
from prepare.checkpoint.open_weights import Opened
from prepare.checkpoint.stored_tensor import StoredTensor, problem, several
from prepare.core.model.module_tree import copy_tree
from prepare.core.model.tensors import (
    identity,
    is_lazy,
    is_plain,
    is_wrapper,
    named_modules,
    named_tensors,
)
from prepare.errors import Problem, RefusedError

# A file may hold another of these than the model; of other types the values would be others.
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Matched:
    """`found` maps a place in the model to its tensor in the file, or to values of the module's own code.

    `missing` and `unexpected` are names as `load_state_dict` tells them.
    """

    found: Mapping[str, StoredTensor | Tensor]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def match(model: nn.Module, opened: Opened) -> Matched:
    """What of the file goes where; reads no values, and touches nothing.

    The names, the hooks that rename and leave out, the versions of modules: all of it is torch's
    and the modules' own code, run on a copy of the module tree.

    Raises:
        CheckpointError: a shape or type differs, or a module's own code refuses the file.
        RefusedError: the model is scripted, lazy or sharded.
    """
    if problems := list(_unfit(model)):
        raise RefusedError.of(problems)
    ours: dict[int, Tensor] = {}  # a tensor that stands in two places is one in the copy too
    copy = copy_tree(model, lambda t: ours.setdefault(id(t), on_meta(t) if is_plain(t) else t))
    before = {place.path: place.tensor for place in named_tensors(copy)}
    for module in copy.modules():
        module._load_state_dict_post_hooks.clear()  # they are for a model that holds its values
    stand_ins = {name: _stand_in(one) for name, one in opened.stored.items()}
    by_storage = {t.untyped_storage()._cdata: opened.stored[n] for n, t in stand_ins.items()}
    missing, unexpected = _load(copy, stand_ins, opened)
    found: dict[str, StoredTensor | Tensor] = {}
    problems: list[Problem] = []
    for place in named_tensors(copy):
        if place.tensor is before.get(place.path):
            continue
        source = _source(place.tensor, by_storage)
        if source is None:
            wrong = "is computed from the file by the code of its module, and not read from it"
            remedy = "load it with model.load_state_dict, then apply the pipeline"
            problems.append(problem(opened.path, place.path, wrong, remedy))
            continue
        found[place.path] = source
        problems += _type_problems(source, before.get(place.path))
    if problems:
        raise several(problems)
    return Matched(found, _still_missing(model, found, missing), unexpected)


def _unfit(model: nn.Module) -> Iterator[Problem]:
    """What in a model cannot be given the tensors of a file, or would be changed by its own code."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            wrong = f"is a {type(module).__name__}: its modules cannot be seen or changed"
            yield Problem(name or "the model", wrong, "load first, then script or trace it")
            return
    for place in named_tensors(model):
        if is_lazy(place.tensor):
            remedy = "run one forward pass first, or build it with its sizes"
            yield Problem(place.path, "has no shape yet (a lazy module)", remedy)
        elif is_wrapper(place.tensor):
            wrong = f"is a {type(place.tensor).__name__}, which decides for itself what its data is"
            yield Problem(place.path, wrong, "load before sharding or quantizing")


def _still_missing(
    model: nn.Module, found: Mapping[str, StoredTensor | Tensor], missing: tuple[str, ...]
) -> tuple[str, ...]:
    """Without the other names of what was found: most files hold a tied tensor under one of them."""
    names: dict[Hashable, list[str]] = {}
    for place in named_tensors(model):
        names.setdefault(identity(place.tensor), []).append(place.path)
    there = {name for tied in names.values() if found.keys() & set(tied) for name in tied}
    return tuple(name for name in missing if name not in there)


def _load(
    copy: nn.Module, stand_ins: dict[str, Tensor], opened: Opened
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    state: OrderedDict[str, Tensor] = OrderedDict(stand_ins)
    if opened.versions is not None:
        ordinary = {name: {"version": 1} for name, _ in named_modules(copy)}
        state._metadata = OrderedDict(ordinary | opened.versions)
    held = {place.path: place.tensor for place in named_tensors(copy)}
    try:
        told = copy.load_state_dict(state, strict=False, assign=True)
    except Exception as error:  # torch's RuntimeError, or what the modules' own code raises
        problems = [
            problem(opened.stored[name].file, name, f"has the shape {list(one.shape)} in the file, "
                    f"and {list(held[name].shape)} in the model")
            for name, one in stand_ins.items()
            if name in held and held[name].shape != one.shape
        ]  # fmt: skip
        said = " ".join(str(error).split())[:300]
        wrong = f"does not fit {type(copy).__name__}: {said}"
        raise several(problems or [problem(opened.path, None, wrong)]) from error
    return tuple(told.missing_keys), tuple(told.unexpected_keys)


def _stand_in(stored: StoredTensor) -> Tensor:
    try:
        return torch.empty(stored.shape, dtype=stored.dtype, device="meta")
    except RuntimeError as error:  # a tensor that is expanded beyond what can be counted
        raise stored.error(f"has the shape {list(stored.shape)}, which no tensor has") from error


def _source(tensor: Tensor, by_storage: Mapping[int, StoredTensor]) -> StoredTensor | Tensor | None:
    """The tensor of the file that has come here, or a value that the module made by itself."""
    if not tensor.is_meta:
        return tensor
    stored = by_storage.get(tensor.untyped_storage()._cdata)
    if stored is None or not tensor.is_contiguous() or tensor.dtype is not stored.dtype:
        return None
    same = tuple(tensor.shape) == stored.shape
    # torch takes a tensor of one value, as it was written before 0.4, for one without dimensions.
    return stored if same or (not tensor.dim() and stored.shape == (1,)) else None


def _type_problems(source: StoredTensor | Tensor, tensor: Tensor | None) -> list[Problem]:
    if tensor is None or isinstance(source, Tensor) or source.dtype is tensor.dtype:
        return []
    if source.dtype in _FLOATS and tensor.dtype in _FLOATS:
        return []
    was, now = (str(t.dtype).removeprefix("torch.") for t in (source, tensor))
    wrong = f"has the dtype {was} in the file, and {now} in the model"
    remedy = "only float types are cast into one another"
    return [problem(source.file, source.name, wrong, remedy)]
