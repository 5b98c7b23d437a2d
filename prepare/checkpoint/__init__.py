"""Checkpoints: save the weights of a prepared model, and load weights straight into a prepared model."""

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
    """A prepared model with the weights of a file.

    Attributes:
        model: the model.
        pipeline: the pipeline that prepared it: that of the call, or that of the recipe beside the
            file; its `format` prepares batches.
        missing: names of the model that are not in the file; empty unless `strict=False`.
        unexpected: names of the file that are not in the model; empty unless `strict=False`.
    """

    model: _Model
    pipeline: Pipeline
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


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
    """Load weights straight into a prepared model: each tensor is made once, in its final form.

    No code in a file is ever run. If anything fails, a `model` that was passed is unchanged.

    Create the optimizer after this call, then call `pipeline.apply(model, optimizer=optimizer)`, and
    only then load the optimizer's state: this keeps the state in the layout of the parameters.

    Args:
        path: a .safetensors file, a file of `torch.save`, or the .index.json of several files.
        model: best a function that builds the model; it is called so that parameters take no memory.
            A model on the meta device, or one that holds values, is filled in place.
        pipeline: prepares the model. The default is the recipe beside the file, or else no step.
        device: replaces the device that the pipeline names.
        strict: raise if a tensor is missing or unexpected; else return the names.
        rename: maps a name in the file to the name in the model, or to None to leave it out.
        key: the entry with the weights, in a file of `torch.save` that contains more.
        check: compare the sha256 of every tensor if PATH.json exists ("auto"), require PATH.json
            ("always"), or compare nothing ("never").
        known_issues: as in `Pipeline.apply`.

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
    """Undo a preparation in place, so that the model can be used without `prepare`; return the model.

    Weights become contiguous, repaired modules get torch's own classes, and the input formatting and
    compiled calls are removed; your Parameters and hooks stay. Dtypes and devices stay as well: a cast
    cannot be undone. A file written by `torch.save(export(model))` loads without `prepare`.

    Raises:
        RefusedError: as `Pipeline.apply`; the model is unchanged.
    """
    from prepare.checkpoint.export_model import export_model

    return export_model(model)
