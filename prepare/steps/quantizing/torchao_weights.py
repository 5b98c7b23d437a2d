"""Quantize weights with torchao, and nothing else of a model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from prepare.core.utils.process_state import ignored_warnings
from prepare.core.utils.text import first_line
from prepare.core.utils.wording import option
from prepare.errors import RefusedError
from prepare.steps.quantizing.choose import Grid


def quantized(weight: Tensor, grid: Grid, path: str) -> nn.Parameter:
    """Return a new weight of a Linear, in 8 bits; `weight` itself is not changed. `path` is its name.

    torchao quantizes it in a Linear of its own: in the model it would also replace `extra_repr` of the
    module by a function that cannot be pickled.

    Raises:
        RefusedError: a value is not finite, which would make NaN of its row; torchao cannot be imported.
    """
    with _quiet():
        try:
            from torchao.quantization import quantize_
        except Exception as error:  # a torchao made for another torch
            wrong = (
                f"torchao cannot be imported with torch {torch.__version__}: {first_line(error)}"
            )
            raise RefusedError(
                "steps.quantize", wrong, "install a torchao for this torch"
            ) from error

        carrier = nn.Linear(1, 1, bias=False, device="meta")
        carrier.weight = cast("nn.Parameter", weight)
        with torch.no_grad():
            quantize_(carrier, _config(weight, grid))
    if not cast("Any", carrier.weight).scale.isfinite().all():
        wrong = "holds NaN or infinity, which would make NaN of all values with the same scale"
        raise RefusedError(path, wrong, option("quantize", "exclude", [path.rpartition(".")[0]]))
    return carrier.weight


def _config(weight: Tensor, grid: Grid) -> Any:
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        PerGroup,
        PerRow,
    )
    from torchao.utils import should_reduce_range

    # Without set_inductor_config: it changes inductor's settings for all models of the process.
    if grid.inputs:
        # Without VNNI the kernel of a CPU adds products up in 16 bits, which overflow for 8-bit factors.
        return Int8DynamicActivationInt8WeightConfig(
            granularity=PerRow(),
            set_inductor_config=False,
            reduce_range=should_reduce_range(weight.device),
        )
    scales = PerGroup(grid.group_size) if grid.group_size else PerRow()
    return Int8WeightOnlyConfig(granularity=scales, set_inductor_config=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what torchao logs at its import: kernels for other devices, and a deprecation in torch."""
    with ignored_warnings():
        disabled = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)
