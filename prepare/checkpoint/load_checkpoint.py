"""Load weights from a file straight into a prepared model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, cast

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from prepare.checkpoint.fill_tensors import check_hashes, fill
from prepare.checkpoint.init_empty import build_empty, empty_buffers, without_values
from prepare.checkpoint.match_names import Matched, loads_itself, match
from prepare.checkpoint.open_weights import OpenedWeights, Rename, open_weights, stripped
from prepare.checkpoint.stored_tensor import problem, several
from prepare.core.model.module_tree import Snapshot
from prepare.core.utils.files import printable_path
from prepare.core.utils.signals import held_interrupts
from prepare.core.utils.suggest import choose
from prepare.core.utils.wording import words
from prepare.errors import CheckpointError, ConfigError, Problem, RefusedError, raise_problems
from prepare.pipeline import Pipeline
from prepare.pipeline.known_issue_checks import KnownIssues, check_known_issues
from prepare.pipeline.preconditions import fsdp_problems
from prepare.step import ModuleStep, TensorStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_CHECKS = ("auto", "always", "never")
_Model = TypeVar("_Model", bound=nn.Module)


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


def load(
    path: str | Path,
    model: _Model | Callable[[], _Model],
    *,
    pipeline: Pipeline | None = None,
    device: str | None = None,
    strict: bool = True,
    strip: str | None = None,
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
        strip: a prefix of the names in the file that those of the model lack: `module.` of
            DistributedDataParallel, `_orig_mod.` of torch.compile, `model.` of a LightningModule.
        rename: maps a name in the file to the name in the model, or to None to leave it out.
        key: the entry with the weights, in a file of `torch.save` that contains more.
        check: compare the sha256 of every tensor if PATH.json exists ("auto"), require PATH.json
            ("always"), or compare nothing ("never").
        known_issues: as in `Pipeline.apply`.

    Raises:
        CheckpointError: the file is damaged, or does not fit; one problem for each tensor.
        RefusedError, ConfigError: as `Pipeline.apply`.
    """
    check_known_issues(known_issues)
    if isinstance(path, nn.Module):
        raise ConfigError("path", "this is the model", "the path comes first: load(path, model)")
    if check not in _CHECKS:
        raise ConfigError("check", f"{check!r} is not allowed", choose(str(check), _CHECKS))
    opened = open_weights(Path(path), key=key, strip=strip, rename=rename, check=check)
    pipeline = _pipeline(opened, pipeline, device)
    built = model if isinstance(model, nn.Module) else build_empty(model)
    if not isinstance(built, nn.Module):
        wrong = f"gave an object of type {type(built).__name__}, which is not a torch.nn.Module"
        raise RefusedError("model", wrong, "give a model, or a function that builds one")
    raise_problems(RefusedError, fsdp_problems(built))
    with held_interrupts(
        may_hang=True
    ):  # they act between the parts of a copy, where all can be undone
        missing, unexpected, undo = fill_model(built, opened, pipeline, strict=strict)
        try:
            pipeline.apply(built, known_issues=known_issues)
        except BaseException:
            undo()
            raise
    return Loaded(cast("_Model", built), pipeline, missing, unexpected)


def fill_model(
    model: nn.Module, opened: OpenedWeights, pipeline: Pipeline, *, strict: bool = True
) -> tuple[tuple[str, ...], tuple[str, ...], Callable[[], None]]:
    """Load values in the device, dtype and layout that `pipeline` requests.

    Return the missing names, the unexpected names and an undo callback.
    """
    changed = any(map(loads_itself, model.modules()))
    before = Snapshot(model)
    undo = [before.restore]
    with held_interrupts(may_hang=True):
        try:
            if changed:  # their code gets the mapped tensors, and may write into them
                check_hashes(opened)
            matched = _matched(model, opened, pipeline, before)
            hooked = any(module._load_state_dict_post_hooks for module in model.modules())
            if strict and not hooked:
                _refuse_mismatches(opened, matched.missing, matched.unexpected)
            steps = [step for step in pipeline.steps.values() if isinstance(step, TensorStep)]
            if problems := [p for step in steps for p in step.obstacles(model)]:
                raise RefusedError.of(problems)
            if not changed:
                check_hashes(opened, matched.unexpected)
            undo.insert(0, fill(model, opened, matched, steps, changed=changed))
            if empty := without_values(model):
                wrong = "holds no values: it was made on the meta device, and no file holds it"
                remedy = "give a function that builds the model, in place of a model on meta"
                raise several([Problem(name, wrong, remedy) for name in empty])
            missing, unexpected = _run_post_hooks(model, matched)
            if strict:
                _refuse_mismatches(opened, missing, unexpected)
        except BaseException:
            _run(undo)
            raise
    return missing, unexpected, partial(_run, undo)


def _run(undo: Iterable[Callable[[], None]]) -> None:
    for restore in undo:
        restore()


def _matched(
    model: nn.Module, opened: OpenedWeights, pipeline: Pipeline, before: Snapshot
) -> Matched:
    """Match the names; if they do not fit, match again after the steps that rewrite modules (fused norms)."""
    matched = match(model, opened)
    structure = [step for step in pipeline.steps.values() if isinstance(step, ModuleStep)]
    if not structure or not (matched.missing or matched.unexpected):
        return matched
    before.restore()
    if any(parameter.is_meta for parameter in model.parameters()):
        empty_buffers(model)  # a norm is fused only if all its tensors are on one device
    Pipeline(structure).apply(model, strict=False, known_issues="ignore")
    rewritten = match(model, opened)
    if rewritten.missing or rewritten.unexpected:
        before.restore()
        return match(model, opened)
    return rewritten


def _run_post_hooks(model: nn.Module, matched: Matched) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Run the post-load hooks of the modules; return the missing and unexpected names that they leave."""
    keys = _IncompatibleKeys(list(matched.missing), list(matched.unexpected))
    for module in model.modules():
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, keys)
    return tuple(keys.missing_keys), tuple(keys.unexpected_keys)


def _refuse_mismatches(
    opened: OpenedWeights, missing: Iterable[str], unexpected: Iterable[str]
) -> None:
    missing, unexpected = list(missing), list(unexpected)
    if prefixes := _prefixes(missing, unexpected, some_fit=len(unexpected) < len(opened.stored)):
        first = repr(prefixes[0])
        wrong = f"its names hold {' and '.join(map(repr, prefixes))}, which those of the model lack"
        remedy = words(cli=f"add strip={prefixes[0]}", python=f"load it with strip={first}")
        raise CheckpointError(printable_path(opened.path), wrong, remedy)
    problems = [
        *(problem(opened.path, name, "is not in the file") for name in missing),
        *(problem(opened.path, name, "has no place in the model") for name in unexpected),
    ]
    if problems:
        options = "give another file or rename=, or take strict=False"
        raise several(problems, words(cli="give another file", python=options))


def _prefixes(missing: list[str], unexpected: list[str], *, some_fit: bool) -> list[str]:
    """Return what stands in the file before the name of every missing tensor; two at most.

    If some names of the file fit as they are, only torch.compile has put something before others.
    """
    last = f".{missing[0]}" if missing and not some_fit else None
    known = [name[: 1 - len(last)] for name in unexpected if last and name.endswith(last)]
    found = [
        prefix
        for prefix in dict.fromkeys(["_orig_mod.", *sorted(known, key=len)])
        if missing and set(missing) <= {stripped(name, prefix) for name in unexpected}
    ]
    return found[:2]


def _pipeline(opened: OpenedWeights, pipeline: Pipeline | None, device: str | None) -> Pipeline:
    """Return the pipeline, or else that of the recipe beside the file; on `device`, if it is not None."""
    if pipeline is not None and device is None:
        return pipeline
    given = {} if device is None else {"device": {"device": device}}
    if pipeline is not None:
        return Pipeline.from_config({**pipeline.to_config(), **given})
    recipe = opened.manifest.steps if opened.manifest else None
    return Pipeline.from_recipe({} if recipe is None else recipe, given)
