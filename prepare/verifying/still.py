"""Keeps a model from drawing random numbers where dropout would, and sets which modules train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_DROPOUTS = frozenset(
    {torch.dropout, torch.dropout_, torch.alpha_dropout, torch.feature_dropout}
    | {getattr(functional, name) for name in ("dropout", "alpha_dropout", "feature_alpha_dropout")}
    | {functional.dropout1d, functional.dropout2d, functional.dropout3d}
)


class Still(TorchFunctionMode):
    """Every call of a dropout gives what it was given, and attention drops nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        return func(*args, **kwargs)


def flags_for(model: nn.Module, mode: str) -> dict[str, bool]:
    """The training mode of every module, by name: as it is, where the model is in that mode already.

    So a norm that is frozen in a model in training stays frozen.
    """
    as_it_is = model.training == (mode == "train")
    return {name: m.training if as_it_is else mode == "train" for name, m in _named(model)}


def hold_still(model: nn.Module, flags: Mapping[str, bool]) -> None:
    """Sets the training mode of every module, and dropout off; only for a model that is set back."""
    for name, module in _named(model):
        drops = "drop" in type(module).__name__.lower()  # DropPath and StochasticDepth's like
        training = flags.get(name, model.training) and not drops
        if not isinstance(module, torch.jit.ScriptModule):
            module.training = training
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            module.dropout = 0.0


def _named(model: nn.Module) -> Any:
    return model.named_modules(remove_duplicate=False)
