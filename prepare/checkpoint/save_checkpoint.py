"""Writes the weights of a model: contiguous, tied ones once, and with the sha256 of each as it is written."""

import hashlib
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prepare.checkpoint.manifest import Held, Manifest
from prepare.checkpoint.paths import beside, check_suffix
from prepare.checkpoint.safetensors_format import Writer, header_of
from prepare.checkpoint.stored_tensor import problem, raw, several
from prepare.core.model.memory_format import canonical_stride
from prepare.core.model.tensors import identity, is_plain, name_of
from prepare.core.utils import files
from prepare.errors import CheckpointError, ConfigError
from prepare.pipeline import Pipeline


def save_checkpoint(model: nn.Module, path: str | Path, pipeline: Pipeline | None) -> None:
    """See `prepare.checkpoint.save`."""
    path = Path(path)
    try:
        kind = check_suffix(path)
    except ValueError as error:
        raise ConfigError("path", *error.args) from None
    weights = weights_of(path, model)
    with files.both(path, beside(path)) as (file, manifest):
        held = (
            write_safetensors(file, path, weights)
            if kind == "safetensors"
            else write_torch(file, weights)
        )
        steps = pipeline.to_config() if pipeline else None
        manifest.write(Manifest(held, weights.tied, weights.versions, steps).text())


@dataclass(frozen=True, slots=True)
class Weights:
    """What `state_dict` holds, each tensor once; `tied` maps a name to that of the same tensor.

    `versions` is what modules write beside their tensors, where that is not `{"version": 1}`.
    """

    tensors: dict[str, Tensor]
    tied: dict[str, str]
    versions: dict[str, Any]


def weights_of(path: Path, model: nn.Module) -> Weights:
    """The weights of `model`.

    Raises:
        CheckpointError: naming each entry that is no tensor with values.
    """
    state = model.state_dict()
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[Hashable, str] = {}
    problems = []
    for name, value in state.items():
        if not isinstance(value, Tensor):
            wrong = (
                f"is a {type(value).__name__} of its module, and a file of weights holds tensors"
            )
            problems.append(problem(path, name, wrong, "save it with torch.save"))
        elif not is_plain(value) or value.is_meta or value.is_quantized:
            wrong = (
                "holds no values" if value.is_meta else f"is a {type(value).__name__} of its own"
            )
            remedy = "load it first" if value.is_meta else "gather or dequantize it first"
            problems.append(problem(path, name, wrong, remedy))
        elif (one := first.setdefault(identity(value), name)) is name:
            tensors[name] = value
        else:
            tied[name] = one
    if problems:
        raise several(problems)
    versions = {n: dict(v) for n, v in state._metadata.items() if v != {"version": 1}}
    return Weights(tensors, tied, versions)


def write_safetensors(file: Writer, path: Path, weights: Weights) -> tuple[Held, ...]:
    """Writes them one after the other, so that no more than one is ever held twice."""
    try:
        file.write(header_of(weights.tensors))
    except ValueError as error:
        name, wrong = error.args
        raise CheckpointError.of([problem(path, name, wrong, "take a .pt file")]) from None
    held = []
    for name, tensor in weights.tensors.items():
        values = _canonical(tensor)
        held.append(_held(name, values))
        file.write(raw(values))
    return tuple(held)


def write_torch(file: Writer, weights: Weights) -> tuple[Held, ...]:
    """Writes them by `torch.save`, which wants all of them at once; tied ones share their values there."""
    values = {name: _alone(_canonical(tensor)) for name, tensor in weights.tensors.items()}
    state = OrderedDict(values | {name: values[one] for name, one in weights.tied.items()})
    state._metadata = OrderedDict(weights.versions)
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # Its archive is written in C++, which has its own words for what the disk has said.
        if isinstance(error.__context__, OSError | KeyboardInterrupt):
            raise error.__context__ from None
        raise
    return tuple(_held(name, each) for name, each in values.items())


def _alone(values: Tensor) -> Tensor:
    """torch.save writes the whole storage of a tensor that is a part of one."""
    whole = values.untyped_storage().nbytes() == values.nbytes
    return values if whole else values.clone()


def _canonical(tensor: Tensor) -> Tensor:
    values = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    # A 1x1 convolution's weight in channels-last is contiguous to torch, and keeps its strides.
    return values.as_strided(values.shape, canonical_stride(values.shape, "contiguous"))


def _held(name: str, values: Tensor) -> Held:
    digest = hashlib.sha256(raw(values)).hexdigest()
    return Held(name, name_of(values.dtype), tuple(values.shape), digest)
