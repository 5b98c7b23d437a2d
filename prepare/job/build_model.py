"""Import plugins, and build and check the model that a configuration names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from prepare.core.model.tensors import named_tensors
from prepare.core.utils.packages import install_remedy, missing_module
from prepare.core.utils.text import first_line
from prepare.core.utils.user_code import described, is_out_of_memory
from prepare.errors import ConfigError, ModelError
from prepare.job.model_target import absent, check_targets

if TYPE_CHECKING:
    from prepare.job.settings import Settings

_LOW = ("float16", "bfloat16")


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


def build_model(settings: Settings, build: Callable[[Mapping[str, Any]], Any]) -> nn.Module:
    """Build the model from its configuration with `build`, and set its mode.

    Raises:
        ConfigError: the target, a keyword or the precision is wrong, or the result is not a Module.
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
        key, _, wrong = first_line(cause).partition(": ")
        if _is_built_in(target) and isinstance(cause, ValueError) and key in settings.model:
            raise ConfigError(f"model.{key}", wrong) from error
        missing = missing_module(str(cause))
        remedy = install_remedy(missing, imported=True) if missing else ""
        raise ModelError("model", f"building {target}: {described(cause)}", remedy) from error
    if not isinstance(model, nn.Module):
        wrong = f"{target} returned an object of type {type(model).__name__}, not a torch.nn.Module"
        raise ConfigError("model._target_", wrong, "name a class or function that returns a model")
    if settings.choices.get("precision") == "float32" and settings.steps.get("half") is None:
        _require_float32(model)
    return model.train(settings.mode == "train")


def _is_built_in(target: str) -> bool:
    """Return whether this is a built-in network, whose ValueErrors name the wrong keyword."""
    return target.startswith("prepare.models.")


def _require_float32(model: nn.Module) -> None:
    """Raise ConfigError for 16-bit tensors: precision=float32 adds no step that would cast them."""
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
