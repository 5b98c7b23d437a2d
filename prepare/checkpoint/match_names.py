"""Match the tensors of a file with those of a model: run `load_state_dict` on stand-ins without values."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prepare.checkpoint.init_empty import on_meta
from prepare.checkpoint.open_weights import OpenedWeights
from prepare.checkpoint.stored_tensor import StoredTensor, printable_name, problem, several
from prepare.core.model.module_tree import copy_tree
from prepare.core.model.tensors import (
    identity,
    is_lazy,
    is_plain,
    is_strided,
    is_wrapper,
    layout_name,
    name_of,
    named_modules,
    named_tensors,
    special_form,
)
from prepare.core.utils.files import printable_path
from prepare.core.utils.text import plural
from prepare.errors import Problem, RefusedError
from prepare.pipeline.preconditions import scripted_problems

# More tensors of another shape are one problem.
_LISTED = 3
# A file and a model may differ in these dtypes; a cast between others would change the values.
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Matched:
    """The source of each tensor of a model.

    `sources` maps the path of a tensor to a tensor of the file, or to values that a module computed.
    `missing` and `unexpected` are the names that `load_state_dict` returns.
    """

    sources: Mapping[str, StoredTensor | Tensor]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def match(model: nn.Module, opened: OpenedWeights) -> Matched:
    """Match the tensors of the file with those of `model`; read no values and change nothing.

    Names, hooks and versions are handled by torch and by the modules' own code, which runs on a copy of
    the module tree.

    Raises:
        CheckpointError: a shape or type differs, or a module's own code refuses the file.
        RefusedError: the model is scripted, lazy or sharded.
    """
    if problems := list(_unfit(model)):
        raise RefusedError.of(problems)
    copies: dict[int, Tensor] = {}  # a tensor in two places is one tensor in the copy, too
    copy = copy_tree(model, lambda t: copies.setdefault(id(t), on_meta(t) if is_plain(t) else t))
    before = {place.path: place.tensor for place in named_tensors(copy)}
    for module in copy.modules():
        module._load_state_dict_post_hooks.clear()  # they expect a model with its values
    stand_ins = {name: _stand_in(stored) for name, stored in opened.stored.items()}
    by_storage = {t.untyped_storage()._cdata: opened.stored[n] for n, t in stand_ins.items()}
    missing, unexpected = _load(copy, stand_ins, opened)
    sources: dict[str, StoredTensor | Tensor] = {}
    problems = []
    for place in named_tensors(copy):
        if place.tensor is before.get(place.path):
            continue
        source = _source(place.tensor, by_storage)
        if source is None:
            wrong = "is computed from the file by the code of its module, and not read from it"
            remedy = "load it with model.load_state_dict, then apply the pipeline"
            problems.append(problem(opened.path, place.path, wrong, remedy))
            continue
        sources[place.path] = source
        problems += _type_problems(source, before.get(place.path))
    if problems:
        raise several(problems)
    return Matched(sources, _still_missing(model, sources, missing), unexpected)


def _unfit(model: nn.Module) -> Iterator[Problem]:
    """Yield what prevents a model from taking the tensors of a file."""
    yield from scripted_problems(model, "load first, then script or trace it")
    for place in named_tensors(model):
        if place.tensor.is_nested and not is_wrapper(place.tensor):  # it has no shape
            yield Problem(place.path, "is nested", "load it with model.load_state_dict")
        elif is_lazy(place.tensor):
            remedy = "run one forward pass first, or build it with its sizes"
            yield Problem(place.path, "has no shape yet (a lazy module)", remedy)
        elif is_wrapper(place.tensor):
            wrong = f"is a {type(place.tensor).__name__}, which decides for itself what its data is"
            yield Problem(place.path, wrong, "load before sharding or quantizing")


def _still_missing(
    model: nn.Module, sources: Mapping[str, StoredTensor | Tensor], missing: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the missing names, without other names of found tensors: files hold a tied tensor once."""
    names: dict[Hashable, list[str]] = {}
    for place in named_tensors(model):
        names.setdefault(identity(place.tensor), []).append(place.path)
    there = {name for tied in names.values() if sources.keys() & set(tied) for name in tied}
    return tuple(name for name in missing if name not in there)


def _load(
    copy: nn.Module, stand_ins: dict[str, Tensor], opened: OpenedWeights
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    state: OrderedDict[str, Tensor] = OrderedDict(stand_ins)
    if opened.versions is not None:
        ordinary = {name: {"version": 1} for name, _ in named_modules(copy)}
        metadata = OrderedDict(ordinary | dict(opened.versions))
        state._metadata = metadata  # type: ignore[attr-defined]  # torch keeps it there
    held = {place.path: place.tensor for place in named_tensors(copy)}
    try:
        result = copy.load_state_dict(state, strict=False, assign=True)
    except Exception as error:  # torch's RuntimeError, or what the modules' own code raises
        shapes = {
            name: (list(stand_in.shape), list(held[name].shape))
            for name, stand_in in stand_ins.items()
            if name in held and held[name].shape != stand_in.shape
        }
        problems = list(_shape_problems(opened, shapes))
        message = " ".join(str(error).split())[:300]
        wrong = f"does not fit {type(copy).__name__}: {message}"
        raise several(problems or [Problem(printable_path(opened.path), wrong)]) from error
    return tuple(result.missing_keys), tuple(result.unexpected_keys)


def _shape_problems(
    opened: OpenedWeights, shapes: Mapping[str, tuple[list[int], list[int]]]
) -> Iterator[Problem]:
    """Yield a problem for each tensor whose shapes in file and model differ; for many, only one."""
    if len(shapes) <= _LISTED:
        for name, (stored, held) in shapes.items():
            wrong = f"has the shape {stored} in the file, and {held} in the model"
            yield problem(opened.stored[name].file, name, wrong)
        return
    first, (stored, held) = next(iter(shapes.items()))
    wrong = (
        f"{plural(len(shapes), 'tensor')} have another shape than in the model, "
        f"first {printable_name(first)}: {stored} in the file, {held} in the model"
    )
    remedy = "give the file of this model, or build the model with the sizes that it was saved with"
    yield Problem(printable_path(opened.path), wrong, remedy)


def _stand_in(stored: StoredTensor) -> Tensor:
    try:
        return torch.empty(stored.shape, dtype=stored.dtype, device="meta")
    except RuntimeError as error:  # an expanded tensor with too many elements
        raise stored.error(f"has the shape {list(stored.shape)}, which no tensor has") from error


def _source(tensor: Tensor, by_storage: Mapping[int, StoredTensor]) -> StoredTensor | Tensor | None:
    """Return the tensor of the file that was assigned here, or the value that the module computed."""
    if not tensor.is_meta:
        return tensor
    stored = by_storage.get(tensor.untyped_storage()._cdata)
    if stored is None or not tensor.is_contiguous() or tensor.dtype is not stored.dtype:
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    same = tuple(tensor.shape) == stored.shape
    # torch before 0.4 wrote a scalar with shape (1,), and load_state_dict accepts that.
    return stored if same or (not tensor.dim() and stored.shape == (1,)) else None


def _type_problems(source: StoredTensor | Tensor, tensor: Tensor | None) -> list[Problem]:
    if tensor is None or isinstance(source, Tensor):
        return []
    if not is_strided(tensor) or tensor.is_quantized:
        form = special_form(tensor) or layout_name(tensor)
        wrong = f"is dense in the file, and {form} in the model"
        remedy = "load it with model.load_state_dict, then apply the pipeline"
        return [problem(source.file, source.name, wrong, remedy)]
    if source.dtype is tensor.dtype or {source.dtype, tensor.dtype} <= _FLOATS:
        return []
    was, now = name_of(source.dtype), name_of(tensor.dtype)
    wrong = f"has the dtype {was} in the file, and {now} in the model"
    remedy = "only float types are cast into one another"
    return [problem(source.file, source.name, wrong, remedy)]
