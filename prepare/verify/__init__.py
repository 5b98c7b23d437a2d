"""Check that a prepared model still computes the outputs and gradients of the unprepared one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from prepare.verify.records import Check, Lost, Verification

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from prepare.core.forward.autocast import Amp
    from prepare.pipeline import Pipeline

__all__ = ["Check", "Lost", "Verification", "verify"]

Level = Literal["short", "full"]
Mode = Literal["eval", "train"]


def verify(
    reference: nn.Module | Callable[[], nn.Module],
    prepared: nn.Module,
    batch: Any,
    *,
    level: Level = "short",
    pipeline: Pipeline | None = None,
    mode: Mode = "eval",
    gradients: bool = True,
    seconds: float | None = None,
    memory: int | None = None,
    amp: Amp = "none",
    metric: Callable[[nn.Module, Any], float] | None = None,
    max_drop: float | None = None,
) -> Verification:
    """Check whether `prepared` computes the outputs and gradients of `reference`, within its dtype's error.

    Args:
        reference: the unprepared model with the same weights, e.g. `copy.deepcopy(model)` before `apply`;
            or a function that builds it, for a model that cannot be copied.
        prepared: the model that `apply` returned. Both models are restored: gradients, buffers, hooks, modes.
        batch: the input of the unprepared model: a tensor, a tuple of positional or a mapping of named
            arguments, or an Example.
        level: `short` compares one mode on this batch. `full` compares eval and train mode, one and two
            samples, and inputs as they are and with a mean of 100 standard deviations.
        pipeline: the pipeline that prepared the model. It formats the batch, unless the model formats its
            inputs itself, and checks that every tensor still has the wanted device, dtype and layout.
            Without a pipeline, the batch is moved to the prepared model's device and dtype.
        mode: the mode in which the model will be used. In `train`, wrong gradients and buffers fail the
            verification; in `eval` they are reported, and only wrong outputs, and buffers that a forward in
            eval mode changes, fail it.
        gradients: compare gradients in mode `eval` too, where they are only reported.
        seconds: the time limit in seconds; by default 30, up to 300 for a large model, and 600 for `full`.
        memory: the memory limit in bytes; by default half of the free memory. Both are estimated
            before each run; a run that does not fit is reported as `cannot tell`, with the reason.
        amp: run the forward of the prepared model under `torch.autocast` to this dtype, with scaled gradients
            for float16. The tolerance is then that of the dtype; the exact run has no autocast.
        metric: a function of (model, batch) that returns a number, more is better; it may load its own data.
            It is evaluated on both models in eval mode, without gradients. The inputs of the prepared model
            are formatted.
        max_drop: by how much the prepared model's metric may be lower, or the verification fails.

    The reference runs in float64 if that fits into the limits, else in float32, and this run is taken as
    exact. Where float64 does not fit, or where kinks would hide errors of the gradients in mode `train`, each
    module is compared alone with float64, see `prepare.verify.compare_modules`. The tolerance follows from
    the error of the reference itself in the prepared model's dtypes, see `prepare.verify.tolerance`. Dropout
    is off, and both models draw the same random numbers, see `prepare.verify.execution.determinism`; the
    gradient of each output is random. If something is wrong, the first module that is wrong is searched for,
    in the order of execution. A compiled model is compared twice: its modules without the compiler, and as
    it will be used, on the unchanged batch and, in mode eval, forward only. The estimates do not include the
    compilation time.

    Raises:
        RefusedError: both models are the same object, `level`, `mode` or `amp` is unknown, mode `train` is
            requested without gradients, one of `metric` and `max_drop` is missing, or a lazy module has no
            parameters yet.
    """
    from torch import nn

    from prepare.verify.check_model import check_model
    from prepare.verify.metric import limit_of

    return check_model(
        reference if isinstance(reference, nn.Module) else reference(),
        prepared,
        batch,
        level=level,
        pipeline=pipeline,
        mode=mode,
        gradients=gradients,
        seconds=seconds,
        memory=memory,
        amp=amp,
        limit=limit_of(metric, max_drop),
    )
