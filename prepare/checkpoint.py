"""Weights in files: saves a prepared model for everybody, and reads a file straight into a prepared one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from prepare import files
from prepare.checkpointing import saving
from prepare.checkpointing.empty import build_empty, empty_buffers
from prepare.checkpointing.filling import fill
from prepare.checkpointing.manifest import Manifest
from prepare.checkpointing.matching import Matched, match
from prepare.checkpointing.opening import Opened, Rename, open_weights
from prepare.checkpointing.paths import beside, check_suffix
from prepare.checkpointing.stored import problem, several
from prepare.consult import KnownIssues, check_choice
from prepare.errors import ConfigError, RefusedError, choose
from prepare.inputs import FormatHook
from prepare.layout import canonical_stride
from prepare.pipeline import Pipeline
from prepare.step import ModuleStep, TensorStep, Want
from prepare.steps import compile, repair_layout  # noqa: A004
from prepare.tensors import NamedTensor, is_plain
from prepare.tree import Snapshot

_CHECKS = ("auto", "always", "never")
_Model = TypeVar("_Model", bound=nn.Module)


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
    path = Path(path)
    try:
        kind = check_suffix(path)
    except ValueError as error:
        raise ConfigError("path", *error.args) from None
    weights = saving.weights_of(path, model)
    with files.both(path, beside(path)) as (file, manifest):
        if kind == "safetensors":
            held = saving.write_safetensors(file, path, weights)
        else:
            held = saving.write_torch(file, weights)
        steps = pipeline.to_config() if pipeline else None
        manifest.write(Manifest(held, weights.tied, weights.versions, steps).text())


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
    check_choice(known_issues)
    if check not in _CHECKS:
        raise ConfigError("check", f"{check!r} is not allowed", choose(str(check), _CHECKS))
    opened = open_weights(Path(path), key=key, rename=rename, check=check)
    pipeline = _pipeline(opened, pipeline, device)
    built = model if isinstance(model, nn.Module) else build_empty(model)
    if not isinstance(built, nn.Module):
        wrong = f"gave an object of type {type(built).__name__}, which is no torch.nn.Module"
        raise RefusedError("model", wrong, "give a model, or a function that builds one")
    missing, unexpected, undo = fill_model(built, opened, pipeline, strict=strict)
    try:
        pipeline.apply(built, known_issues=known_issues)
    except BaseException:
        undo()
        raise
    return Loaded(built, pipeline, missing, unexpected)


def fill_model(
    model: nn.Module, opened: Opened, pipeline: Pipeline, *, strict: bool = True
) -> tuple[tuple[str, ...], tuple[str, ...], Callable[[], None]]:
    """The first half of `load`: values as `pipeline` wants them, and all that it does besides left to it.

    Gives the names that are missing and unexpected, and the way back.
    """
    before = Snapshot(model)
    try:
        matched = _matched(model, opened, pipeline)
        if strict:
            _refuse_others(opened, matched)
        steps = [step for step in pipeline.steps.values() if isinstance(step, TensorStep)]
        if problems := [p for step in steps for p in step.obstacles(model)]:
            raise RefusedError.of(problems)
        undo = fill(model, opened, matched, steps)
    except BaseException:
        before.restore()
        raise

    def back() -> None:
        undo()
        before.restore()

    try:
        _tell(model, matched)
    except BaseException:
        back()
        raise
    return matched.missing, matched.unexpected, back


def export(model: _Model) -> _Model:
    """Undoes in place what can be undone, for people without `prepare`; gives the same model back.

    Weights are contiguous again, repaired modules of torch's own classes, the formatting of inputs
    and a compiled call are taken off; Parameters and hooks of yours stay. Types and devices stay as
    well: what a cast has rounded off is gone. `torch.save(export(model))` needs no `prepare` to load.

    Raises:
        RefusedError: as `Pipeline.apply`; the model is as it was.
    """
    compiled = {m: m._compiled_call_impl for m in model.modules() if m._compiled_call_impl}
    try:
        for module in compiled:
            compile.undo(module)
        Pipeline([_Contiguous()]).apply(model, strict=False, known_issues="ignore")
    except BaseException:
        for module, call in compiled.items():
            module._compiled_call_impl = call
        raise
    repair_layout.undo(model)
    FormatHook.remove(model)
    return model


class _Contiguous(TensorStep):
    """Takes channels-last tensors back; what lies otherwise is as its author made it."""

    name = "export"

    def want(self, tensor: NamedTensor) -> Want | None:
        held = tensor.tensor
        formats = {4: "channels_last", 5: "channels_last_3d"}
        if not is_plain(held) or held.dim() not in formats:
            return None
        channels_last = canonical_stride(held.shape, formats[held.dim()])
        return Want(memory_format="contiguous") if held.stride() == channels_last else None


def _matched(model: nn.Module, opened: Opened, pipeline: Pipeline) -> Matched:
    """What goes where; in a model with other names once it is rewritten (fused norms), in that one."""
    matched = match(model, opened)
    structure = [step for step in pipeline.steps.values() if isinstance(step, ModuleStep)]
    if not structure or not (matched.missing or matched.unexpected):
        return matched
    before = Snapshot(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        empty_buffers(model)  # norms are fused only where all of them is on one device
    Pipeline(structure).apply(model, strict=False, known_issues="ignore")
    rewritten = match(model, opened)
    if rewritten.missing or rewritten.unexpected:
        before.restore()
        return matched
    return rewritten


def _tell(model: nn.Module, matched: Matched) -> None:
    """Runs the hooks that modules have for after a load, which `match` has kept from its copy."""
    keys = _IncompatibleKeys(list(matched.missing), list(matched.unexpected))
    for module in model.modules():
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, keys)


def _refuse_others(opened: Opened, matched: Matched) -> None:
    problems = [
        *(problem(opened.path, name, "is not in the file") for name in matched.missing),
        *(problem(opened.path, name, "has no place in the model") for name in matched.unexpected),
    ]
    if problems:
        raise several(problems, "give another file or rename=, or take strict=False")


def _pipeline(opened: Opened, pipeline: Pipeline | None, device: str | None) -> Pipeline:
    """The pipeline that was given, or else the recipe beside the file; on `device` where one is given."""
    if pipeline is not None and device is None:
        return pipeline
    recipe = opened.manifest.steps if opened.manifest else None
    steps = pipeline.to_config() if pipeline else dict(recipe or {})
    if device is not None:
        steps["device"] = {**(steps.get("device") or {}), "device": device}
    return Pipeline.from_config(steps)
