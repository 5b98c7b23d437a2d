"""Builds the model that a configuration names, and checks that it is one that was asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from prepare.core.model.tensors import named_tensors
from prepare.core.utils.text import first_line
from prepare.errors import ConfigError, ModelError
from prepare.job.model_target import check_targets
from prepare.job.outcome import is_out_of_memory

if TYPE_CHECKING:
    from prepare.job.settings import Settings

_LOW = ("float16", "bfloat16")


def import_plugins(names: Iterable[str]) -> None:
    """Imports the modules that may register steps.

    Raises:
        ConfigError: there is no such module.
    """
    for index, name in enumerate(names):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            wrong = f"there is no module {error.name!r}"
            remedy = "install it, or start in the folder that holds it"
            raise ConfigError(f"plugins[{index}]", wrong, remedy) from error


def build_model(settings: Settings, build: Callable[[Mapping[str, Any]], Any]) -> nn.Module:
    """The model, built by `build` from its configuration, in the mode asked for.

    Raises:
        ConfigError: the target, a keyword or the precision is wrong, or what it gives is no model.
        ModelError: the model's own code raised.
    """
    check_targets(settings.model)
    target = settings.model["_target_"]
    torch.manual_seed(settings.seed)
    try:
        model = build(settings.model)
    except Exception as error:
        cause = error.__cause__ or error
        if is_out_of_memory(cause):
            raise cause from None
        said = first_line(cause)
        key, _, wrong = said.partition(": ")
        if _is_ours(target) and isinstance(cause, ValueError) and key in settings.model:
            raise ConfigError(f"model.{key}", wrong) from error
        wrong = f"building {target} raised {type(cause).__name__}: {said}"
        raise ModelError("model", wrong) from error
    if not isinstance(model, nn.Module):
        wrong = (
            f"{target} gave an object of type {type(model).__name__}, which is no torch.nn.Module"
        )
        raise ConfigError("model._target_", wrong, "name a class or function that gives a model")
    if settings.choices.get("precision") == "float32" and settings.steps.get("half") is None:
        _require_float32(model)
    return model.train(settings.mode == "train")


def _is_ours(target: str) -> bool:
    """Whether it is a built-in network, which checks its keywords, and names the one that is wrong."""
    return target.startswith("prepare.models.")


def _require_float32(model: nn.Module) -> None:
    """precision=float32 adds no step, so a model that is something else would stay so unnoticed."""
    low = {
        id(place.tensor): f"{place.path} ({str(place.tensor.dtype).removeprefix('torch.')})"
        for place in named_tensors(model)
        if str(place.tensor.dtype).removeprefix("torch.") in _LOW
    }
    if low:
        first = ", ".join(list(low.values())[:3])
        wrong = (
            f"float32 adds no step, and the model holds {len(low)} tensors that are not: {first}"
        )
        wrong += ", ..." if len(low) > 3 else ""
        remedy = (
            "build it in float32, or choose precision=bfloat16 or half; ~precision drops this check"
        )
        raise ConfigError("precision", wrong, remedy)
