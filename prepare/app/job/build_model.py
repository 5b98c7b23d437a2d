"""Build the model of a job, with its plugins and weights, if possible straight into the prepared layout."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from prepare.app.job.model_target import (
    absent,
    check_targets,
    locate_named,
    targets_in,
    without_method,
)
from prepare.checkpoint.weights import build_empty, fill, read_weights
from prepare.core.forward.call import class_calling
from prepare.core.utils.packages import described, is_out_of_memory, remedy_of_missing
from prepare.core.utils.text import first_line, size
from prepare.errors import ConfigError, ModelError
from prepare.pipeline import Pipeline
from prepare.stages.stage import Stage, tasks

if TYPE_CHECKING:
    from prepare.app.job.settings import Settings
    from prepare.pipeline.plan import Plan, State

# A larger model, in bytes, is not copied for a stage that does not insist.
LARGEST = 1 << 30


def import_plugins(names: Iterable[str]) -> None:
    """Import the modules that may register steps.

    Raises:
        ConfigError: a module does not exist.
    """
    for index, name in enumerate(names):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise absent(error.name or name, f"plugins[{index}]", error, named=name) from error


def build_model(settings: Settings) -> nn.Module:
    """Build the model from its configuration, and set its mode.

    Raises:
        ConfigError: the target, a keyword or the precision is wrong, or the result is not a Module.
        ModelError: the model's own code raised.
    """
    config, method = without_method(settings.model)
    check_targets(config)
    target = config["_target_"]
    torch.manual_seed(settings.seed)
    try:
        model = instantiated(config)
    except Exception as error:
        cause = error.__cause__ or error
        if is_out_of_memory(cause):
            raise cause from None
        key, _, wrong = first_line(cause).partition(": ")
        # Those of a built-in network name the wrong keyword.
        built_in = target.startswith("prepare.models.")
        if built_in and isinstance(cause, ValueError) and key in config:
            raise ConfigError(f"model.{key}", wrong) from error
        remedy = remedy_of_missing(str(cause))
        chosen = any("_convert_" in node for _, node in targets_in(config, "model"))
        if chosen and _reads_attributes(error):
            remedy = "give the node _convert_=none: it is read by attributes"
        raise ModelError("model", f"building {target}: {described(cause)}", remedy) from cause
    if not isinstance(model, nn.Module):
        wrong = f"{target} returned an object of type {type(model).__name__}, not a torch.nn.Module"
        raise ConfigError("model._target_", wrong, "name a class or function that returns a model")
    if method is not None:
        model.__class__ = class_calling(type(model), method)  # type: ignore[arg-type]  # is hashable
    return model.train(settings.mode == "train")


def instantiated(model: Mapping[str, Any]) -> Any:
    """Return the model of a configuration, as Hydra instantiates it, with plain data for its keywords.

    A node's `_convert_` is obeyed. Where it leaves the choice, a model that reads its configuration by
    attributes gets Hydra's own objects; by `object` Hydra makes those of dataclasses, which words are not.
    """
    import hydra.utils

    random = torch.get_rng_state()
    try:
        return hydra.utils.instantiate({"_convert_": "all", **model})
    except Exception as error:
        if model.get("_convert_", "object") != "object" or not _reads_attributes(error):
            raise
    torch.set_rng_state(random)  # the weights are those of a model that is built once
    return hydra.utils.instantiate({**model, "_convert_": "none"})


def _reads_attributes(error: Exception) -> bool:
    """Return whether a model asked plain data for an attribute, as `cfg.width` of a dict."""
    cause = error.__cause__
    return isinstance(cause, AttributeError) and type(cause.obj) in (dict, list)


def call_named(name: str, where: str, seed: int) -> Any:
    """Return what the function with this dotted name returns, which the key `where` gives.

    Raises:
        ConfigError: there is no such function.
        ModelError: it raised.
    """
    function = locate_named(name, where)
    torch.manual_seed(seed)
    try:
        return function()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(where, f"calling {name}: {described(error)}") from error


def with_precision(settings: Settings, model: nn.Module) -> Settings:
    """Return the settings with a cast, if precision=float32 is chosen and `model` comes in another one."""
    of_others = (torch.float16, torch.bfloat16, torch.float64)
    asks = settings.choices.get("precision") == "float32" and settings.steps.get("half") is None
    if asks and any(each.dtype in of_others for each in model.parameters()):
        return replace(settings, steps={**settings.steps, "half": {"dtype": "float32"}})
    return settings


def model_of(settings: Settings, stages: list[Stage]) -> nn.Module:
    """Build the model of a job and load the file that `weights` names.

    If nothing needs the unprepared values, the parameters stay on meta until `read_into`.
    """
    if settings.weights is None:
        return build_model(settings)
    model = build_empty(lambda: build_model(settings))
    if not _is_left_empty(settings, model, stages):
        _read(settings, model, Pipeline([]))
    return model


def read_into(
    settings: Settings, model: nn.Module, pipeline: Pipeline, stages: list[Stage]
) -> None:
    """Load the weights that `model_of` has not loaded, each tensor as `pipeline` wants it."""
    if settings.weights is not None and _is_left_empty(settings, model, stages):
        _read(settings, model, pipeline)


def plan_of(settings: Settings, model: nn.Module, pipeline: Pipeline, batch: int | None) -> Plan:
    """Plan for a model whose weights may not be loaded yet, as if they were on the CPU."""
    amp, known_issues = settings.amp, settings.known_issues
    plan = pipeline.plan(model, known_issues=known_issues, amp=amp, batch=batch)
    if settings.weights is None:
        return plan
    tensors = [t._replace(old=_on_cpu(t.old), new=_on_cpu(t.new)) for t in plan.tensors]
    return replace(plan, tensors=tensors)


def is_copied(model: nn.Module, stages: list[Stage]) -> bool:
    """Return whether the stages compare the prepared model with a copy of the unprepared one."""
    wanted = {stage.needs_reference() for stage in stages}
    return "always" in wanted or ("small" in wanted and not too_large(model))


def too_large(model: nn.Module) -> str:
    """Return the reason why a model is not copied by default: its size; nothing if it is small enough."""
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return f"the model holds {size(held)}, too much to copy it" if held > LARGEST else ""


def _is_left_empty(settings: Settings, model: nn.Module, stages: list[Stage]) -> bool:
    """Return whether nothing needs the unprepared values, and the target device is known."""
    chooses = any(type(stage).choose is not Stage.choose for stage in stages)
    named = settings.steps.get("device") is not None
    prepares = tasks()[settings.task].prepares
    return named and prepares and not chooses and not is_copied(model, stages)


def _read(settings: Settings, model: nn.Module, pipeline: Pipeline) -> None:
    path = Path(settings.weights or "")
    state, _ = read_weights(path, strip=settings.strip)
    fill(model, state, path, pipeline)


def _on_cpu(state: State) -> State:
    return state._replace(device="cpu") if state.device == "meta" else state
