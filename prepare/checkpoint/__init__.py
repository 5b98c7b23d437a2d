"""Weights in files: save a prepared model for others, and load a file into a prepared model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    from prepare.checkpoint.open_weights import Rename
    from prepare.pipeline import Pipeline
    from prepare.pipeline.known_issue_checks import KnownIssues

__all__ = ["Loaded", "export", "load", "save"]

_Model = TypeVar("_Model", bound="nn.Module")


@dataclass(frozen=True, slots=True)
class Loaded(Generic[_Model]):
    """A model with the weights of a file, prepared.

    `pipeline` is the one it was prepared with: that of the call, or that of the recipe beside the
    file; its `format` is for batches. `missing` are names in the model that the file did not hold,
    `unexpected` names in the file for which the model has no place; both only with `strict=False`.
    """

    model: _Model
    pipeline: Pipeline
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def save(model: nn.Module, path: str | Path, *, pipeline: Pipeline | None = None) -> None:
    """Writes the weights of `model` for everybody, and beside them, in PATH.json, what they are.

    The suffix says which format: .safetensors, or for torch's own .pt, .pth, .bin, .ckpt. Every
    tensor is written contiguous, whatever its layout; tied ones once. The file beside it holds the
    recipe of `pipeline`, and the sha256, shape and type of every tensor: `load` goes by it.
    Both files take the place of older ones together; on any failure these are as they were.

    Raises:
        CheckpointError: the model holds what such a file cannot.
        ConfigError: there is no such format.
        FileError: a file could not be written.
    """
    from prepare.checkpoint.save_checkpoint import save_checkpoint

    save_checkpoint(model, path, pipeline)


def load(
    path: str | Path,
    model: _Model | Callable[[], _Model],
    *,
    pipeline: Pipeline | None = None,
    device: str | None = None,
    strict: bool = True,
    rename: Rename | None = None,
    key: str | None = None,
    check: Literal["auto", "always", "never"] = "auto",
    known_issues: KnownIssues = "error",
) -> Loaded[_Model]:
    """Reads weights straight into a prepared model: each tensor is made once, as it is to be.

    `path` is a .safetensors file, one of torch's, or the .index.json of several. `model` is best a
    function that builds it: it is called so that its parameters take no memory. A model on the meta
    device, or one that holds values, is filled in place. `pipeline` prepares it; without one it is
    the recipe beside the file, if there is one, and else nothing. `device` takes the place of the
    device that the pipeline names. `rename` gives the name in the model for one in the file, or None
    to leave it out; `key` is the entry of a torch file that holds more than weights.

    With `strict`, a tensor that is missing or unexpected is an error; else they are told. `check`
    compares the sha256 of every tensor where PATH.json is there ("auto"), or must be ("always").
    `known_issues` is for `Pipeline.apply`. No code in a file is run. Whatever fails, a model that was
    given is as it was.

    Make the optimizer after this, then `pipeline.apply(model, optimizer=optimizer)`, and only then
    load the optimizer's state: that keeps it in line with the layout of the parameters.

    Raises:
        CheckpointError: the file is damaged, or does not fit; one problem for each tensor.
        RefusedError, ConfigError: as `Pipeline.apply`.
    """
    from prepare.checkpoint.load_checkpoint import load_checkpoint

    return load_checkpoint(
        path,
        model,
        pipeline=pipeline,
        device=device,
        strict=strict,
        rename=rename,
        key=key,
        check=check,
        known_issues=known_issues,
    )


def export(model: _Model) -> _Model:
    """Undoes in place what can be undone, for people without `prepare`; gives the same model back.

    Weights are contiguous again, repaired modules of torch's own classes, the formatting of inputs
    and a compiled call are taken off; Parameters and hooks of yours stay. Types and devices stay as
    well: what a cast has rounded off is gone. `torch.save(export(model))` needs no `prepare` to load.

    Raises:
        RefusedError: as `Pipeline.apply`; the model is as it was.
    """
    from prepare.checkpoint.export_model import export_model

    return export_model(model)
