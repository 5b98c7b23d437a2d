"""Prepare a copy of a model by the recipe of a contract, and observe it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare.contract.observe import observe_contract
from prepare.core.model.deep_copy import CopyError, copy_or_build
from prepare.core.utils.suggest import choose
from prepare.errors import ConfigError, RefusedError
from prepare.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torch.optim import Optimizer

    from prepare.contract.records import Contract
    from prepare.core.forward.autocast import Amp

_MODES = ("eval", "train")


def record_contract(
    model: nn.Module,
    batch: Any,
    recipe: Pipeline | Mapping[str, Any] | str | Path | None,
    *,
    mode: str,
    amp: Amp,
    optimizer: Optimizer | None,
    threads: int | None,
    time: bool,
) -> Contract:
    """Return the contract of `model`; see `prepare.contract.record`."""
    _check_arguments(recipe, mode, optimizer, time=time)
    if recipe is None:
        flags = {module: module.training for module in model.modules()}
        model.train(mode == "train")
        try:
            return observe_contract(
                model, batch, mode=mode, amp=amp, optimizer=optimizer, threads=threads
            )
        finally:
            for module, flag in flags.items():
                module.training = flag
    if isinstance(recipe, str | Path):
        recipe = Pipeline.load(recipe)
    pipeline = recipe if isinstance(recipe, Pipeline) else Pipeline.from_config(recipe)
    pipeline.warn_of_left_out()
    reference, prepared = _copy(model), _copy(model)
    for each in (reference, prepared):
        each.train(mode == "train")
    # The contract holds the numbers; a known issue shows in its verification.
    pipeline.apply(prepared, known_issues="ignore")
    return observe_contract(
        prepared,
        batch,
        mode=mode,
        amp=amp,
        pipeline=pipeline,
        reference=reference,
        threads=threads,
        time=time,
    )


def _check_arguments(recipe: Any, mode: str, optimizer: Optimizer | None, *, time: bool) -> None:
    if mode not in _MODES:
        raise ConfigError("mode", f"{mode!r} is not a mode", choose(mode, _MODES))
    if time and recipe is None:
        wrong = "needs a recipe: the time is relative to the unprepared model"
        raise ConfigError("time", wrong, "give recipe, or leave time out")
    if optimizer is not None and recipe is not None:
        wrong = "belongs to the model, and a recipe is applied to a copy of it"
        raise ConfigError(
            "optimizer", wrong, "apply the recipe to the model, and give no recipe here"
        )


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy_or_build(model)
    except CopyError as error:
        remedy = "prepare it, and record it without a recipe"
        raise RefusedError("model", f"cannot be copied: {error}", remedy) from error
