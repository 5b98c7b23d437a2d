"""Reduce a failed verification, a crash or a slow kernel to a script of at most 25 lines with torch alone.

Examples:
    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> reduce(model, torch.randn(2, 3, 8, 8), isolated=False) is None
    True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prepare.reduce.records import ModuleCall, Reduction

if TYPE_CHECKING:
    from torch import nn

    from prepare.pipeline import Pipeline

__all__ = ["ModuleCall", "Reduction", "reduce"]


def reduce(
    model: nn.Module,
    batch: Any,
    *,
    pipeline: Pipeline | None = None,
    culprit: str = "",
    slow: bool = False,
    training: bool = True,
    seconds: float = 60.0,
    isolated: bool = True,
) -> Reduction | None:
    """Find the first module of torch that is wrong by itself on its input, and make the call small.

    One forward of the model gives the shape, memory format, dtype, mean and deviation of the input of each
    module of torch.nn. Each becomes a script that compares forward and backward with float64, or times them.
    The first that fails is shrunk (samples, pixels, channels, options, values, dtype) while it still fails.

    Args:
        model: the prepared model; it is not changed.
        batch: a tensor, a tuple of positional or a mapping of named arguments, or an Example.
        pipeline: the pipeline that prepared it; it formats the batch.
        culprit: the module to try first: `Verification.culprit`.
        slow: look for a memory format that is slow, instead of wrong results.
        training: run the modules in training mode.
        seconds: no script begins after this time.
        isolated: run each script in a process of its own: kernels may crash, hang or overwrite memory.

    Return None if no module fails by itself: then the fault needs the real values, or is in the code
    between the modules, or in a module that is not torch's.

    Raises:
        ModelError: the forward raised.
    """
    from prepare.reduce.run import reduce_model

    return reduce_model(
        model,
        batch,
        pipeline=pipeline,
        culprit=culprit,
        slow=slow,
        training=training,
        seconds=seconds,
        isolated=isolated,
    )
