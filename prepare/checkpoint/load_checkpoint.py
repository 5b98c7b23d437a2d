"""Load weights from a file straight into a prepared model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from prepare.checkpoint import Loaded
from prepare.checkpoint.fill_tensors import fill
from prepare.checkpoint.init_empty import build_empty, empty_buffers
from prepare.checkpoint.match_names import Matched, match
from prepare.checkpoint.open_weights import Opened, Rename, open_weights
from prepare.checkpoint.stored_tensor import problem, several
from prepare.core.model.module_tree import Snapshot
from prepare.core.utils.suggest import choose
from prepare.errors import ConfigError, RefusedError
from prepare.pipeline import Pipeline
from prepare.pipeline.known_issue_checks import KnownIssues, check_known_issues
from prepare.step import ModuleStep, TensorStep

_CHECKS = ("auto", "always", "never")
_Model = TypeVar("_Model", bound=nn.Module)


def load_checkpoint(
    path: str | Path,
    model: _Model | Callable[[], _Model],
    *,
    pipeline: Pipeline | None,
    device: str | None,
    strict: bool,
    rename: Rename | None,
    key: str | None,
    check: Literal["auto", "always", "never"],
    known_issues: KnownIssues,
) -> Loaded[_Model]:
    """See `prepare.checkpoint.load`."""
    check_known_issues(known_issues)
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
