"""Record the properties of a prepared model, and check them in continuous integration.

Examples:
    >>> import torch
    >>> from torch import nn
    >>> model, batch = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.randn(2, 3, 8, 8)
    >>> contract = record(model, batch, {"conv2d_memory_format": {}})
    >>> contract.layouts
    {'0': 'channels_last'}
    >>> check(model, batch, contract).status
    'kept'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from prepare.contract.records import Contract, ContractChange, ContractCheck

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

    from prepare.core.forward.autocast import Amp
    from prepare.pipeline import Pipeline

__all__ = ["Contract", "ContractChange", "ContractCheck", "check", "record"]


def record(
    model: nn.Module,
    batch: Any,
    recipe: Mapping[str, Any] | str | Path | None = None,
    *,
    mode: Literal["eval", "train"] = "eval",
    amp: Amp = "none",
    optimizer: Optimizer | None = None,
    threads: int | None = None,
    time: bool = False,
) -> Contract:
    """Return the contract of a model: its structure, strides, breaks, casts and the error of its results.

    Args:
        model: not changed. With a recipe, copies of it are prepared and verified against it; without one
            the model itself is looked at, as it was prepared before, and nothing is verified.
        batch: a tensor, a tuple of positional or a mapping of named arguments, or an Example.
        recipe: the steps, `{name: options}`, or the path of a recipe.
        mode: the mode in which the model runs; `train` also follows the gradients.
        amp: run the forward under `torch.autocast` to this dtype.
        optimizer: of the model, without a recipe: the layouts of its state are recorded too.
        threads: the number of threads of torch, on which the layouts of some kernels depend.
        time: also measure the time relative to the unprepared model, with its interval; needs a recipe.

    Raises:
        ConfigError: the recipe is wrong, or `time` or `optimizer` does not go with it.
        ModelError: the forward or backward raised.
    """
    from prepare.contract.recording import record_contract

    return record_contract(
        model, batch, recipe, mode=mode, amp=amp, optimizer=optimizer, threads=threads, time=time
    )


def check(
    model: nn.Module,
    batch: Any,
    contract: Contract,
    recipe: Pipeline | Mapping[str, Any] | str | Path | None = None,
    *,
    optimizer: Optimizer | None = None,
) -> ContractCheck:
    """Compare a model of today with a contract, in the contract's mode and number of threads.

    `recipe` is that of the contract by default, which may set only what is harmless (see
    `Pipeline.from_recipe`); one that differs from it breaks the contract. The time is
    measured again if the contract has one. A change of a library's version alone breaks nothing.

    Raises:
        ConfigError: the recipe is wrong, or has no effect on this model.
        ModelError: the forward or backward raised.
    """
    from prepare.contract.compare import compare
    from prepare.contract.recording import record_contract
    from prepare.pipeline import Pipeline

    if recipe is None and contract.steps is not None:
        recipe = Pipeline.from_recipe(contract.steps)
    today = record_contract(
        model,
        batch,
        recipe,
        mode=contract.mode,
        amp=contract.amp,  # type: ignore[arg-type]
        optimizer=optimizer,
        threads=contract.threads,
        time=contract.time is not None,
    )
    return compare(contract, today)
