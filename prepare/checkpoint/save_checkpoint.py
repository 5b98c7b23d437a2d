"""Leave `prepare`: write the weights of a model for any program, or undo its preparation in place."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from prepare.checkpoint.manifest import Manifest, SavedTensor
from prepare.checkpoint.paths import beside, check_suffix
from prepare.checkpoint.stored_tensor import digest, problem, raw, several
from prepare.core.model.memory_format import CHANNELS_LAST, canonical_stride
from prepare.core.model.tensors import (
    NamedTensor,
    identity,
    is_plain,
    layout_name,
    name_of,
    special_form,
)
from prepare.core.utils.files import NewFile, both
from prepare.core.utils.signals import held_interrupts
from prepare.errors import CheckpointError, ConfigError
from prepare.pipeline import Pipeline
from prepare.registry import STEPS
from prepare.step import TensorStep, Want
from prepare.steps import compile  # noqa: A004

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_Model = TypeVar("_Model", bound=nn.Module)


def save(model: nn.Module, path: str | Path, *, pipeline: Pipeline | None = None) -> None:
    """Write the weights of `model` in a standard format, and a manifest beside them, PATH.json.

    The suffix decides the format: .safetensors, or .pt, .pth, .bin and .ckpt for that of torch. Every
    tensor is written contiguous, whatever its layout; tied tensors are written once. The manifest has
    the recipe of `pipeline`, and the sha256, shape and dtype of every tensor; `load` uses it.
    Both files replace older ones together; after a failure the older ones are unchanged.

    Raises:
        CheckpointError: the format has no place for something in the model.
        ConfigError: the suffix is unknown.
        FileError: a file cannot be written.
    """
    if isinstance(path, nn.Module):
        raise ConfigError("path", "this is the model", "the model comes first: save(model, path)")
    path = Path(path)
    try:
        kind = check_suffix(path)
    except ValueError as error:
        raise ConfigError("path", *error.args) from None
    if pipeline is not None:
        pipeline.warn_of_left_out()
    weights = _weights_of(path, model)
    with both(path, beside(path)) as (file, manifest):
        saved = (
            _write_safetensors(file, path, weights)
            if kind == "safetensors"
            else _write_torch(file, weights)
        )
        steps = pipeline.to_recipe() if pipeline else None
        manifest.write(Manifest(saved, weights.tied, weights.versions, steps).text())


@dataclass(frozen=True, slots=True)
class Weights:
    """The content of a `state_dict`, each tensor once; `tied` maps a name to that of the same tensor.

    `versions` is the metadata of modules that is not `{"version": 1}`.
    """

    tensors: dict[str, Tensor]
    tied: dict[str, str]
    versions: dict[str, Any]


def _weights_of(path: Path, model: nn.Module) -> Weights:
    """Return the weights of `model`.

    Raises:
        CheckpointError: one problem for each entry that is not a tensor with values.
    """
    state = model.state_dict()
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[Hashable, str] = {}
    problems = []
    for name, value in state.items():
        if not isinstance(value, Tensor):
            kind = f"a {type(value).__name__} of its module"
            wrong = f"is {kind}, and a file of weights holds tensors"
            problems.append(problem(path, name, wrong, "save it with torch.save"))
        elif not is_plain(value) or value.is_meta or value.is_quantized:
            problems.append(problem(path, name, *_not_plain(value)))
        elif (first_name := first.setdefault(identity(value), name)) is name:
            tensors[name] = value
        else:
            tied[name] = first_name
    if problems:
        raise several(problems)
    metadata = state._metadata  # type: ignore[attr-defined]  # torch keeps it there
    versions = {name: dict(v) for name, v in metadata.items() if v != {"version": 1}}
    return Weights(tensors, tied, versions)


def _not_plain(value: Tensor) -> tuple[str, str]:
    """Return what is wrong with a tensor that is not stored, and what to do."""
    if value.is_meta:
        return "holds no values", "load it first"
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        form = special_form(value) or layout_name(value)
        return f"is {form}, and a file of weights holds dense tensors", "store it dense"
    return f"is a {type(value).__name__} of its own", "gather or dequantize it, or use torch.save"


def _write_safetensors(file: NewFile, path: Path, weights: Weights) -> tuple[SavedTensor, ...]:
    """Write one tensor after the other, so that at most one is in memory twice.

    The package `safetensors` takes the whole model, contiguous, at once.
    """
    file.write(_header(path, weights.tensors))
    saved = []
    for name, tensor in weights.tensors.items():
        values = _canonical(tensor)
        saved.append(_saved_tensor(name, values))
        file.write(raw(values))
    return tuple(saved)


def _header(path: Path, tensors: Mapping[str, Tensor]) -> bytes:
    """Return the length and the header of a file of these tensors: https://huggingface.co/docs/safetensors."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        dtype, wrong = name_of(tensor.dtype), ""
        if dtype not in _CODES:
            wrong = f"safetensors has no place for {dtype}"
        elif name == "__metadata__" or name.encode(errors="ignore").decode() != name:
            wrong = "safetensors has no place for that name"
        if wrong:
            raise CheckpointError.of([problem(path, name, wrong, "take a .pt file")])
        begin, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": _CODES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that values begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def _write_torch(file: NewFile, weights: Weights) -> tuple[SavedTensor, ...]:
    """Write all tensors at once by `torch.save`; tied ones share their values in the file."""
    values = {name: _alone(_canonical(tensor)) for name, tensor in weights.tensors.items()}
    state = OrderedDict(values | {name: values[first] for name, first in weights.tied.items()})
    state._metadata = OrderedDict(weights.versions)  # type: ignore[attr-defined]  # torch keeps it there
    try:
        torch.save(state, cast("IO[bytes]", file))
    except RuntimeError as error:
        # The archive is written in C++, which replaces the error of the operating system.
        if isinstance(error.__context__, OSError | KeyboardInterrupt):
            raise error.__context__ from None
        raise
    return tuple(_saved_tensor(name, tensor) for name, tensor in values.items())


def _alone(values: Tensor) -> Tensor:
    """Return a tensor with its own storage: torch.save writes the whole storage of a view."""
    whole = values.untyped_storage().nbytes() == values.nbytes
    return values if whole else values.clone()


def _canonical(tensor: Tensor) -> Tensor:
    values = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    # To torch a 1x1 weight in channels-last is contiguous already, so contiguous() keeps its strides.
    return values.as_strided(values.shape, canonical_stride(values.shape, "contiguous"))


def _saved_tensor(name: str, values: Tensor) -> SavedTensor:
    return SavedTensor(name, name_of(values.dtype), tuple(values.shape), digest(values))


def export(model: _Model) -> _Model:
    """Undo a preparation in place, so that the model can be used without `prepare`; return the model.

    Weights become contiguous, repaired modules get torch's own classes, and the input formatting and the
    calls that `prepare` compiled are removed; your Parameters, hooks and compiled calls stay. Dtypes and
    devices stay as well: a cast cannot be undone. A file written by `torch.save(export(model))` loads
    without `prepare`.

    Raises:
        RefusedError: as `Pipeline.apply`; the model is unchanged.
    """
    compiled = {m: m._compiled_call_impl for m in model.modules() if m._compiled_call_impl}
    with held_interrupts(may_hang=True):
        try:
            for module in compiled:
                compile.undo(module)
            Pipeline([_Contiguous()]).apply(model, strict=False, known_issues="ignore")
        except BaseException:
            for module, call in compiled.items():
                module._compiled_call_impl = call
            raise
        for name in STEPS:
            STEPS[name].undo(model)
        for module, call in compiled.items():
            if not hasattr(call, "prepared_as"):
                module._compiled_call_impl = call
    return model


class _Contiguous(TensorStep):
    """Makes channels-last tensors contiguous; other strides are those that the author chose."""

    name = "export"

    def want(self, tensor: NamedTensor) -> Want | None:
        values = tensor.tensor
        if not is_plain(values) or values.dim() not in CHANNELS_LAST:
            return None
        channels_last = canonical_stride(values.shape, CHANNELS_LAST[values.dim()])
        return Want(memory_format="contiguous") if values.stride() == channels_last else None
