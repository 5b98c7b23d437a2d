"""Refuse to load float values into a quantized weight, in one clear line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prepare.core.model.quantized import is_quantized, quantized_weight
from prepare.errors import RefusedError

if TYPE_CHECKING:
    from torch import nn


def refuse_floats(module: nn.Module) -> None:
    """Let `module.load_state_dict` refuse a float weight: torch's own message names no cause."""
    module.register_load_state_dict_pre_hook(_check)


def release(module: nn.Module) -> None:
    """Remove the hook."""
    hooks = module._load_state_dict_pre_hooks
    for key, hook in list(hooks.items()):
        if getattr(hook, "hook", hook) is _check:
            del hooks[key]


def _check(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    value = state.get(f"{prefix}weight")
    # With assign=True the file's tensor replaces the weight, whatever it is.
    if value is None or metadata.get("assign_to_params_buffers") or is_quantized(value):
        return
    if quantized_weight(module) is not None:
        wrong = "is in 8 bits, and the file holds float values"
        remedy = "load first, then quantize; or prepare.steps.quantize.undo(model, weights) first"
        raise RefusedError(f"{prefix}weight", wrong, remedy)
