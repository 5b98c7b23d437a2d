"""Weights in files: read what safetensors and torch wrote, load it into a prepared model, and save it."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from prepare import errors, recipe
from prepare.checkpoint.paths import INDEX, check_suffix, instead
from prepare.core.model.memory_format import canonical_stride
from prepare.core.model.module_tree import Snapshot
from prepare.core.model.tensors import (
    identity,
    is_expanded,
    is_lazy,
    is_plain,
    is_strided,
    is_wrapper,
    named_tensors,
    unregistered_tensors,
)
from prepare.core.utils import files, json_records
from prepare.core.utils.process_state import held_interrupts
from prepare.core.utils.suggest import choose
from prepare.errors import CheckpointError, ConfigError, Problem, RefusedError, raise_problems
from prepare.pipeline import Pipeline
from prepare.pipeline.apply import fsdp_problems, scripted_problems
from prepare.pipeline.known_issue_checks import KnownIssues, check_known_issues
from prepare.pipeline.tensor_table import TensorRequest, make_table, preserved_stride
from prepare.pipeline.transfer import Move, Transfer, check_cast
from prepare.step import ModuleStep, TensorStep

_Model = TypeVar("_Model", bound=nn.Module)
_Names = tuple[tuple[str, ...], tuple[str, ...]]
_MOST_PROBLEMS = 20
_COMPILED = "_orig_mod."
_AGAIN = "save it with torch.save(model.state_dict(), FILE), and nothing but tensors in it"
_TRUSTED = (
    'it holds objects. If you trust it: torch.load(FILE, weights_only=False)["state_dict"] (or "model") '
    "gives the weights; then model.load_state_dict, and apply the pipeline"
)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[_Model]):
    """A prepared model with the weights of a file.

    Attributes:
        model: the model.
        pipeline: the pipeline that prepared it: that of the call, or that of the recipe in the file; its
            `format` prepares batches.
        missing: names of the model that are not in the file; empty unless `strict=False`.
        unexpected: names of the file that are not in the model; empty unless `strict=False`.
    """

    model: _Model
    pipeline: Pipeline
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def load(
    path: str | Path,
    model: _Model | Callable[[], _Model],
    *,
    pipeline: Pipeline | None = None,
    device: str | None = None,
    strict: bool = True,
    strip: str | None = None,
    key: str | None = None,
    known_issues: KnownIssues = "error",
) -> Loaded[_Model]:
    """Load weights straight into a prepared model: each tensor is made once, in its final form.

    No code in a file is ever run. If anything fails, a `model` that was passed is unchanged.

    Create the optimizer after this call, then call `pipeline.apply(model, optimizer=optimizer)`, and
    only then load the optimizer's state: this keeps the state in the layout of the parameters.

    Args:
        path: a .safetensors file, a file of `torch.save`, or the .index.json of several files.
        model: best a function that builds the model; it is called so that parameters take no memory.
            A model on the meta device, or one that holds values, is filled in place.
        pipeline: prepares the model. The default is the recipe in the file, or else no step.
        device: replaces the device that the pipeline names.
        strict: raise if a tensor is missing or unexpected; else return the names.
        strip: a prefix of the names in the file that those of the model lack: `module.` of
            DistributedDataParallel, `_orig_mod.` of torch.compile, `model.` of a LightningModule.
        key: the entry with the weights, in a file of `torch.save` that contains more.
        known_issues: as in `Pipeline.apply`.

    Raises:
        CheckpointError: the file is damaged, or does not fit; one problem for each tensor.
        RefusedError, ConfigError: as `Pipeline.apply`.
    """
    check_known_issues(known_issues)
    if isinstance(path, nn.Module):
        raise ConfigError("path", "this is the model", "the path comes first: load(path, model)")
    state, metadata = read_weights(Path(path), key=key, strip=strip)
    given = {} if device is None else {"device": {"device": device}}
    if pipeline is None:
        steps = recipe.loads(metadata["recipe"]) if "recipe" in metadata else {}
        pipeline = Pipeline.from_recipe(steps, given)
    elif given:
        pipeline = Pipeline.from_config({**pipeline.to_config(), **given})
    built = model if isinstance(model, nn.Module) else build_empty(model)
    if not isinstance(built, nn.Module):
        wrong = f"gave an object of type {type(built).__name__}, which is not a torch.nn.Module"
        raise RefusedError("model", wrong, "give a model, or a function that builds one")
    with held_interrupts(), as_before_on_failure(built):
        names = fill(built, state, Path(path), pipeline, strict=strict)
        pipeline.apply(built, known_issues=known_issues)
    return Loaded(cast("_Model", built), pipeline, *names)


@contextmanager
def as_before_on_failure(model: nn.Module) -> Iterator[None]:
    """Restore the modules and the values of a model if the block raises."""
    before = Snapshot(model)
    held = [t for t in (*model.parameters(), *model.buffers()) if not (t.is_meta or is_lazy(t))]
    values = [(each, each.clone()) for each in map(_each_place_once, held)]
    try:
        yield
    except BaseException:
        before.restore()
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        raise


def _each_place_once(tensor: Tensor) -> Tensor:
    """Return a view in which no two elements share a place in memory, as those of an expanded tensor do."""
    if not is_plain(tensor):
        return tensor.detach()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.detach().as_strided([n if s else min(n, 1) for n, s in pairs], tensor.stride())


def fill(
    model: nn.Module,
    state: Mapping[str, Tensor],
    path: Path,
    pipeline: Pipeline,
    *,
    strict: bool = True,
) -> _Names:
    """Give the model the values in `state`; return the missing and the unexpected names.

    What is on the meta device gets its values in the device, dtype and layout that `pipeline` requests.

    Raises:
        CheckpointError: the tensors do not fit; `path` is the file of the message.
        RefusedError: the model cannot be filled, or a dtype cannot hold the values.
    """
    remedy = "load first, then script or trace it"
    obstacles = (p for step in pipeline.steps.values() for p in step.obstacles(model))
    own = (*fsdp_problems(model), *scripted_problems(model, remedy))
    raise_problems(RefusedError, [*own, *obstacles])
    before = Snapshot(model)
    missing, unexpected = _filled(model, state, path, pipeline)
    structure = [step for step in pipeline.steps.values() if isinstance(step, ModuleStep)]
    if structure and (missing or unexpected):
        # The file may hold a model whose norms were fused: its names fit after the structure steps.
        before.restore()
        if any(parameter.is_meta for parameter in model.parameters()):
            empty_buffers(model)  # a norm is fused only if all its tensors are on one device
        Pipeline(structure).apply(model, strict=False, known_issues="ignore")
        missing, unexpected = _filled(model, state, path, pipeline)
    if strict and (missing or unexpected):
        raise CheckpointError.of(_mismatches(path, missing, unexpected))
    wrong = "holds no values: it was made on the meta device, and the file does not hold it"
    hint = "give a function that builds the model, in place of a model on meta"
    empty = [Problem(_where(path, name), wrong, hint) for name in names_on_meta(model)]
    raise_problems(CheckpointError, empty)
    return missing, unexpected


def _filled(
    model: nn.Module, state: Mapping[str, Tensor], path: Path, pipeline: Pipeline
) -> _Names:
    """Let torch load the state, then bring what was on meta into its final form; tied tensors stay tied."""
    tensor_steps = [step for step in pipeline.steps.values() if isinstance(step, TensorStep)]
    table = make_table(model, tensor_steps)
    raise_problems(CheckpointError, _other_kinds(table.requests, state, path))
    given = dict(state)
    given |= {
        place.path: given[first]
        for request in table.requests
        if (first := next((p.path for p in request.places if p.path in given), None))
        for place in request.places
    }
    on_meta = any(request.tensor.is_meta for request in table.requests)
    try:
        found = model.load_state_dict(given, strict=False, assign=on_meta)
    except Exception as error:
        # torch names each tensor of another shape on a line of its own.
        first, *lines = str(error).split("\n\t")
        wrong = [" ".join(line.split()) for line in lines or [first]][:_MOST_PROBLEMS]
        raise CheckpointError.of([Problem(_where(path), each) for each in wrong]) from error
    if on_meta:
        _make_final(model, table.requests)
    for request in table.requests:
        if (value := state.get(request.path)) is not None and not request.tensor.is_meta:
            check_cast(request.path, value, request.tensor.detach(), clamp=request.clamp)
    return tuple(found.missing_keys), tuple(n for n in found.unexpected_keys if n in state)


def _make_final(model: nn.Module, requests: list[TensorRequest]) -> None:
    """Copy the mapped tensors that torch has assigned into their final form, one for all places."""
    pairs = [(request, _at(model, request.path)) for request in requests]
    # A tensor that has not been loaded is what it was.
    loaded = [(request, value) for request, value in pairs if value is not request.tensor]
    copies = Transfer([_move(request, value) for request, value in loaded]).copies()
    for (request, _), data in zip(loaded, copies, strict=True):
        new = like(request.tensor, data)
        for place in request.places:
            owner, _, last = place.path.rpartition(".")
            setattr(model.get_submodule(owner), last, new)


def _move(request: TensorRequest, value: Tensor) -> Move:
    """Return the copy of the values into the form that the pipeline, or else the model, wants."""
    move, tensor = request.move(), request.tensor
    device, dtype = (move.device, move.dtype) if move else (tensor.device, tensor.dtype)
    stride = (move and move.stride) or preserved_stride(tensor)
    stride = value.contiguous().stride() if is_expanded(tensor) else stride
    device = torch.device("cpu") if device.type == "meta" else device
    return Move(request.path, [value], device, dtype, stride, request.clamp)


def _other_kinds(
    requests: list[TensorRequest], state: Mapping[str, Tensor], path: Path
) -> Iterator[Problem]:
    """Yield a problem for each tensor of integers whose values are floats in the file, or the reverse."""
    for request in requests:
        name, wanted = request.path, request.tensor
        value = state.get(name, wanted)
        if value.is_floating_point() != wanted.is_floating_point():
            kinds = (str(each.dtype).removeprefix("torch.") for each in (value, wanted))
            wrong = "has the dtype {} in the file, and {} in the model".format(*kinds)
            yield Problem(_where(path, name), wrong, "give another file")


def _mismatches(path: Path, missing: tuple[str, ...], unexpected: tuple[str, ...]) -> list[Problem]:
    if missing and (found := _prefixes([*missing], [*unexpected])):
        wrong = f"its names hold {found[0]!r}, which those of the model lack"
        return [Problem(_where(path), wrong, f"add strip={found[0]!r}")]
    remedy = "give another file, or strip=PREFIX; in Python strict=False leaves them"
    told = {"is not in the file": missing, "has no place in the model": unexpected}
    pairs = [(name, wrong) for wrong, names in told.items() for name in names]
    return [Problem(_where(path, name), wrong, remedy) for name, wrong in pairs[:_MOST_PROBLEMS]]


def _where(path: Path, name: str = "") -> str:
    """Return a file, and the tensor in it, for a message."""
    return ", ".join(files.printable_path(each) for each in (path, name[:200]) if each)


def _at(model: nn.Module, name: str) -> Any:
    owner, _, last = name.rpartition(".")
    return getattr(model.get_submodule(owner), last)


def save(model: nn.Module, path: str | Path, *, pipeline: Pipeline | None = None) -> None:
    """Write the weights of `model` as a .safetensors file that any program reads, and `load` prepares.

    Every tensor is written contiguous, whatever its layout; tied tensors are written once. The metadata
    has the names of the tied ones, and the recipe of `pipeline`. The file replaces an older one at once;
    after a failure the older one is unchanged.

    Raises:
        CheckpointError: the format has no place for something in the model.
        ConfigError: the suffix is another than .safetensors.
        FileError: the file cannot be written.
    """
    if isinstance(path, nn.Module):
        raise ConfigError("path", "this is the model", "the model comes first: save(model, path)")
    path = Path(path)
    try:
        check_suffix(path)
    except ValueError as error:
        raise ConfigError("path", *error.args) from None
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[Hashable, str] = {}
    problems = []
    for name, value in model.state_dict().items():
        dense = isinstance(value, Tensor) and is_plain(value) and not value.is_quantized
        if not dense or value.is_meta:
            wrong = f"is no dense tensor with values, but {type(value).__name__}"
            problems.append(Problem(_where(path, name), wrong, "save it with torch.save"))
        elif (known := first.setdefault(identity(value), name)) == name:
            tensors[name] = _contiguous(value)
        else:
            tied[name] = known
    raise_problems(CheckpointError, problems)
    metadata = {"format": "pt"} | ({"tied": json.dumps(tied)} if tied else {})
    if pipeline is not None:
        pipeline.warn_of_left_out()
        metadata["recipe"] = recipe.dumps(pipeline.to_recipe())
    try:
        with files.new_file(path) as file:
            safetensors.torch.save_file(tensors, file.name, metadata)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        wrong = f"cannot be written: {' '.join(str(error).split())[:160]}"
        remedy = "make room, or write elsewhere; torch.save holds what safetensors has no place for"
        raise CheckpointError(_where(path), wrong, remedy) from error


def _contiguous(tensor: Tensor) -> Tensor:
    values = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    # To torch a 1x1 weight in channels-last is contiguous already, so contiguous() keeps its strides.
    return values.as_strided(values.shape, canonical_stride(values.shape, "contiguous"))


def read_weights(
    path: Path, *, key: str | None = None, strip: str | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file by name, mapped and not read, and the metadata of safetensors.

    `key` is the entry with the weights, in a file of torch that holds more. `strip` is a prefix that is
    taken off the names. No code in a file is run.

    Raises:
        CheckpointError: the file is damaged, or has another content.
        ConfigError: no name begins with `strip`.
    """
    try:
        state, metadata = _read(path, key)
        tied = json.loads(metadata.get("tied", "{}"))
        state |= {name: state[first] for name, first in tied.items()}
    except errors.PrepareError as error:
        raise CheckpointError.of(error.problems) from error
    except Exception as error:  # a damaged file raises many kinds
        wrong = f"cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
        remedy = instead(path) or "it is cut short or damaged, or holds something else than weights"
        if "weights_only" in str(error):
            wrong, remedy = "holds more than tensors, which torch reads by running code", _TRUSTED
        raise CheckpointError(_where(path), wrong, remedy) from error
    return (_strip(path, state, strip) if strip else state), metadata


def _stripped(name: str, prefix: str) -> str:
    """Return a name without a prefix; without `_orig_mod.`, of torch.compile, wherever it stands."""
    return name.replace(prefix, "") if prefix == _COMPILED else name.removeprefix(prefix)


def _prefixes(missing: list[str], unexpected: list[str]) -> list[str]:
    """Return what stands in a file before the name of every missing tensor; the shortest first."""
    ends = [n.removesuffix(f".{missing[0]}") for n in unexpected if n.endswith(f".{missing[0]}")]
    known = [_COMPILED, *sorted((f"{end}." for end in ends), key=len)]
    return [p for p in known if {*missing} <= {_stripped(name, p) for name in unexpected}]


def _strip(path: Path, state: Mapping[str, Tensor], strip: str) -> dict[str, Tensor]:
    prefix = f"{strip.removesuffix('.')}."
    renamed = {_stripped(name, prefix): tensor for name, tensor in state.items()}
    collide = len(renamed) < len(state)
    if collide or (state and list(renamed) == list(state)):
        what = "two names are one without" if collide else "no name begins with"
        remedy = f"the first name in {_where(path)} is {next(iter(state))!r}"
        raise ConfigError("strip", f"{what} {prefix!r}", remedy)
    return renamed


def _read(path: Path, key: str | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    if path.name.endswith(INDEX):
        return _read_shards(path), {}
    with path.open("rb") as file:
        begin = file.read(2)
    if begin in (b"PK", b"\x80\x02"):  # a zip archive; before torch 1.6 a pickle
        return _read_torch(path, key, zipped=begin == b"PK"), {}
    if key is not None:
        wrong = f"has no entries, so none called {key!r}"
        raise CheckpointError(_where(path), wrong, "drop key=: it is for torch's files")
    with safetensors.safe_open(path, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return tensors, opened.metadata() or {}


def _read_shards(path: Path) -> dict[str, Tensor]:
    """Return the tensors of all files that an index names; these lie in its folder."""
    shards = json.loads(files.read_text(path, limit=json_records.LIMIT))["weight_map"]
    read: dict[str, dict[str, Tensor]] = {}
    for shard in dict.fromkeys(shards.values()):
        if Path(shard).name != shard or shard.endswith(INDEX):
            wrong = f"names the file {shard[:80]!r}, which is not in its folder"
            raise CheckpointError(_where(path), wrong, "put all shards beside it")
        read[shard] = read_weights(path.with_name(shard))[0]
    for name, shard in shards.items():
        if name not in read[shard]:
            wrong = f"is not there, and {path.name} says it is"
            raise CheckpointError(_where(path.with_name(shard), name), wrong)
    return {name: read[shard][name] for name, shard in shards.items()}


def _read_torch(path: Path, key: str | None, *, zipped: bool) -> dict[str, Tensor]:
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    holders = content if isinstance(content, Mapping) else {}
    inner = [name for name, value in holders.items() if _is_state(value)]
    if key is not None and key not in inner:
        wrong = f"has no entry {key!r} with weights"
        raise CheckpointError(_where(path), wrong, choose(key, map(str, inner)))
    if key is None and not _is_state(content):
        if len(inner) != 1:
            which = f"give one with key=: {', '.join(map(str, inner))}" if inner else _AGAIN
            wrong = "does not hold a mapping of names to tensors"
            raise CheckpointError(_where(path), wrong, which)
        key = inner[0]
    return dict(content if key is None else content[key])


def _is_state(value: Any) -> bool:
    tensors = value.values() if isinstance(value, Mapping) else []
    return bool(tensors) and all(isinstance(each, Tensor) for each in tensors)


_T = TypeVar("_T", bound=Tensor)


def build_empty(build: Callable[[], nn.Module]) -> nn.Module:
    """Call `build`, and return its model with parameters on meta; buffers and attributes have values.

    If the model's code needs the values of parameters, or keeps a tensor computed from them that a file
    does not contain, return a model whose parameters have values.
    """
    try:
        with empty_parameters():
            model = build()
    except Exception:  # an error of the model's own code is raised again here
        return build()
    if isinstance(model, nn.Module):
        saved = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        if {*names_on_meta(model)} - saved:
            return build()
    return model


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Within the block, move each parameter that this thread registers in a module to the meta device.

    Unlike under `torch.device("meta")`, tensors have values until they become parameters: buffers keep
    theirs, and so do the tensors that a model computes while it is built. The memory of a parameter
    is only used once it is written, which happens later.
    """
    thread = threading.get_ident()
    # A parameter of two modules becomes one; the weak references let the original be freed.
    made: dict[int, tuple[weakref.ref, nn.Parameter]] = {}

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != thread or parameter.is_meta or is_wrapper(parameter):
            return None
        original, empty = made.get(id(parameter), (None, None))
        if empty is None or original is None or original() is not parameter:
            empty = on_meta(parameter)
            made[id(parameter)] = weakref.ref(parameter), empty
        return empty

    hook = register_module_parameter_registration_hook(
        to_meta  # type: ignore[arg-type]  # what the hook returns takes the place of the parameter
    )
    try:
        yield
    finally:
        hook.remove()


def empty_buffers(model: nn.Module) -> None:
    """Move the buffers that a file of weights contains to meta as well, in place."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = moved.setdefault(id(buffer), on_meta(buffer))


def on_meta(tensor: _T) -> _T:
    """Return the same parameter or buffer without values: its class, attributes and strides.

    One that is sparse, nested, quantized or of mkldnn stays as it is.
    """
    if not is_strided(tensor) or tensor.is_quantized:
        return tensor
    # Not empty_like: for a tensor on meta it is implemented in Python, and imports sympy first.
    stride = preserved_stride(tensor.detach())
    return like(
        tensor, torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="meta")
    )


def like(tensor: _T, data: Tensor) -> _T:
    """Return `data` as a parameter of the class of `tensor`, with its attributes; a buffer is plain."""
    if not isinstance(tensor, nn.Parameter):
        return cast("_T", data)
    new = torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
    vars(new).update(vars(tensor))
    return new


def names_on_meta(model: nn.Module) -> list[str]:
    """Return the tensors without values: parameters, buffers and plain attributes."""
    places = [p for p in named_tensors(model) if p.tensor.is_meta]
    held = {id(place.tensor) for place in places}
    others = [name for name, t in unregistered_tensors(model) if t.is_meta and id(t) not in held]
    return [*(place.path for place in places), *others]
