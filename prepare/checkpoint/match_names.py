"""Match the tensors of a file with those of a model: torch's own `load_state_dict` replaces stand-ins."""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prepare.checkpoint.init_empty import like, on_meta
from prepare.checkpoint.open_weights import OpenedWeights
from prepare.checkpoint.stored_tensor import printable_name, problem, several
from prepare.core.model.tensors import (
    NamedTensor,
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
from prepare.pipeline.preconditions import context_problems, scripted_problems

# More tensors of another shape are one problem.
_LISTED = 3
# A file and a model may differ in these dtypes; a cast between others would change the values.
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Matched:
    """The values for each tensor of a model.

    `values` maps the path of a tensor to a tensor of the file, or to one that a module computed.
    `missing` and `unexpected` are the names that `load_state_dict` returns.
    """

    values: Mapping[str, Tensor]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def loads_itself(module: nn.Module) -> bool:
    """Return whether code that is not torch's takes part in loading the tensors of `module`."""
    hooks = (getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values())
    code = (type(module)._load_from_state_dict, *hooks)
    return any(not str(getattr(each, "__module__", "")).startswith("torch.") for each in code)


def match(model: nn.Module, opened: OpenedWeights) -> Matched:
    """Match the tensors of the file with those of `model`, which holds its own tensors again afterwards.

    Names, hooks and versions are handled by torch and by the modules' own code. The model holds stand-ins
    while it runs; attributes and tensors that this code adds, or gives another shape, stay: a Snapshot
    restores them, also after an error.

    Raises:
        CheckpointError: a shape or type differs, or a module's own code refuses the file.
        RefusedError: the model is scripted, lazy or sharded.
    """
    if problems := list(_unfit(model)):
        raise RefusedError.of(problems)
    before = named_tensors(model)
    written = {id(place.tensor) for place in before if loads_itself(place.module)}
    empty = {id(place.tensor) for place in before if place.tensor.is_meta}
    # A tensor in two places has one stand-in.
    stand_ins = {id(p.tensor): _stand_in(p.tensor, written) for p in before}
    for place in before:
        put(model, place, stand_ins[id(place.tensor)])
    as_made = {key: (id(stand_in), stand_in._version) for key, stand_in in stand_ins.items()}
    missing, unexpected = _load(model, opened)
    originals = {place.path: place.tensor for place in before}
    values: dict[str, Tensor] = {}
    problems = []
    for place in named_tensors(model):
        value, original, path = place.tensor, originals.get(place.path), place.path
        if original is not None and value.shape == original.shape:
            put(model, place, original)
        # Code that writes into the data of a tensor leaves no other trace than that its name is not missing.
        hidden = path not in missing and id(original) in written and id(original) not in empty
        if as_made.get(id(original)) == (id(value), value._version) and not hidden:
            continue
        if value.is_meta or not is_strided(value):
            wrong = "is computed from the file by the code of its module, and not read from it"
            remedy = "load it with model.load_state_dict, then apply the pipeline"
            problems.append(problem(opened.path, path, wrong, remedy))
        elif original is not None:
            problems += _type_problems(opened, path, value, original)
        values[path] = value
    if problems:
        raise several(problems)
    return Matched(values, _still_missing(model, values, missing), unexpected)


def put(model: nn.Module, place: NamedTensor, tensor: Tensor) -> None:
    """Put `tensor` in a place of the model; by setattr, as a recurrent module keeps its own list of them."""
    setattr(model.get_submodule(place.owner), place.name, tensor)


def _stand_in(tensor: Tensor, written: Collection[int]) -> Tensor:
    """Return a tensor without values, or one that the code of a module may write into."""
    if not is_plain(tensor) or id(tensor) not in written:
        return on_meta(tensor) if is_plain(tensor) else tensor
    return like(
        tensor, torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.clone()
    )


def _unfit(model: nn.Module) -> Iterator[Problem]:
    """Yield what prevents a model from taking the tensors of a file."""
    yield from context_problems()
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
    model: nn.Module, values: Mapping[str, Tensor], missing: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the missing names, without other names of found tensors: files hold a tied tensor once."""
    names: dict[Hashable, list[str]] = {}
    for place in named_tensors(model):
        names.setdefault(identity(place.tensor), []).append(place.path)
    there = {name for tied in names.values() if values.keys() & set(tied) for name in tied}
    return tuple(name for name in missing if name not in there)


def _load(model: nn.Module, opened: OpenedWeights) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Let torch assign the tensors of the file; return the missing and the unexpected names."""
    state = OrderedDict((name, stored.values) for name, stored in opened.stored.items())
    if opened.versions is not None:
        ordinary: dict[str, Any] = {name: {"version": 1} for name, _ in named_modules(model)}
        metadata = OrderedDict(ordinary | dict(opened.versions))
        state._metadata = metadata  # type: ignore[attr-defined]  # torch keeps it there
    held = {place.path: tuple(place.tensor.shape) for place in named_tensors(model)}
    hooks = [
        (m._load_state_dict_post_hooks, [*m._load_state_dict_post_hooks.items()])
        for m in model.modules()
    ]
    for table, _ in hooks:  # they expect a model with its values
        table.clear()
    try:
        result = model.load_state_dict(state, strict=False, assign=True)
    except Exception as error:  # torch's RuntimeError, or what the modules' own code raises
        shapes = {
            name: (list(stored.shape), list(held[name]))
            for name, stored in opened.stored.items()
            if name in held and held[name] != stored.shape
        }
        problems = list(_shape_problems(opened, shapes))
        message = " ".join(str(error).split())[:300]
        wrong = f"does not fit {type(model).__name__}: {message}"
        raise several(problems or [Problem(printable_path(opened.path), wrong)]) from error
    for table, kept in hooks:
        table.update(kept)
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


def _type_problems(
    opened: OpenedWeights, path: str, value: Tensor, original: Tensor
) -> Iterator[Problem]:
    file, name = opened.place_of(path)
    if not is_strided(original) or original.is_quantized:
        form = special_form(original) or layout_name(original)
        wrong = f"is dense in the file, and {form} in the model"
        yield problem(
            file, name, wrong, "load it with model.load_state_dict, then apply the pipeline"
        )
    elif value.dtype is not original.dtype and not {value.dtype, original.dtype} <= _FLOATS:
        was, now = name_of(value.dtype), name_of(original.dtype)
        wrong = f"has the dtype {was} in the file, and {now} in the model"
        yield problem(file, name, wrong, "only float types are cast into one another")
