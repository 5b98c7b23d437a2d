"""Tune a model, on one rank for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prepare.core.forward.torch_state import Amp, read_amp
from prepare.core.utils.suggest import choose
from prepare.errors import RefusedError
from prepare.pipeline.distributed import on_rank_zero
from prepare.stages.tune.session import TuningSession
from prepare.stages.tune.stage import TuneStage

if TYPE_CHECKING:
    from torch import nn

    from prepare.core.utils.text import Progress
    from prepare.stages.bench.variant import Clock
    from prepare.stages.tune.records import Tuning


def tune(
    model: nn.Module,
    batch: Any,
    *,
    allow: Iterable[str] = (),
    mode: Literal["eval", "train"] = "eval",
    amp: Amp = "none",
    budget: float = 60.0,
    declared: Mapping[str, Any] | None = None,
    cache: bool | str | Path = True,
    calls: int | None = None,
    seed: int = 0,
    progress: Progress = lambda _: nullcontext(),
    build: Callable[[], nn.Module] | None = None,
    _clock: Clock = time.perf_counter,
) -> Tuning:
    """Time recipes against each other on copies of `model`, and return the best; `model` is not changed.

    All candidates run in every round, in random order, and are compared by the ratios of their times
    within rounds (see `prepare.stages.bench`). A recipe that is probably slower than the best one is
    eliminated; the unprepared model only if a recipe is significantly faster. The race ends when the
    ratios of the remaining candidates are precise, or when the budget is spent.

    A recipe can only win if its results are correct. It is verified against the unprepared model (see
    `prepare.verify`) before it eliminates that model, and before it wins; if it fails, it is dropped, and
    the recipes that it had eliminated are timed again. Of the recipes within 2 % of the
    fastest the simplest wins (see `prepare.stages.tune.candidates`). The winner may be the unprepared model.

    Args:
        model: on the device where it will run, not compiled and not wrapped (DDP).
        batch: a tensor, a tuple of positional arguments, a mapping of named arguments, or an Example.
        allow: what may be tried besides float32 without a compiler: `bfloat16`, `half`, `compile`
            (inductor; in `eval` also with freezing).
        mode: `eval` times the forward and verifies outputs; `train` times forward and backward, and
            verifies gradients as well.
        amp: run the forward of every candidate under `torch.autocast` to this dtype.
        budget: seconds. A compilation or verification that has begun is finished, and
            the winner is always verified.
        declared: a pipeline of your own, as one more candidate; all candidates run on its `device`.
        cache: whether the result is cached, or the folder for it. A cached winner is verified again.
        calls: how often the model will be called in one process. Each call then takes its share of the first
            one, which compiles; without it only calls after the first count.
        seed: seed of the order and of the inputs.
        progress: called with a description of each stage; the context manager that it returns is
            entered for the duration of the stage.
        build: a function that builds an equal model, for a model that cannot be copied.

    If torch.distributed is initialised, rank 0 tunes, and every rank returns its result.

    Raises:
        ConfigError: an argument is invalid; one problem for each.
        RefusedError: `mode` or `amp` is unknown, or the model cannot be copied or prepared in its present
            state.
        ModelError: the unprepared model itself does not run.
        KeyboardInterrupt: the tuning was stopped; after the first round `error.tuning` is what was measured.

    Examples:
        >>> from torch import nn, randn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        >>> tuning = tune(model, randn(1, 3, 32, 32), budget=2.0, cache=False)
        >>> tuning.winner in {row.name for row in tuning.rows}
        True
        >>> prepared = tuning.pipeline.apply(model)
    """
    amp = read_amp(amp)
    options = {
        "allow": allow if isinstance(allow, str) else list(allow),
        "budget": budget,
        "cache": cache if isinstance(cache, bool) else str(cache),
        "calls": calls,
    }
    session = TuningSession(
        model=model,
        batch=batch,
        options=_options(mode, options),
        mode=mode,
        amp=amp,
        declared=dict(declared or {}),
        seed=seed,
        progress=progress,
        build=build,
        clock=_clock,
    )
    return on_rank_zero(session.run)


def _options(mode: str, options: Mapping[str, Any]) -> TuneStage:
    """Check the mode and the options. Raises RefusedError, ConfigError."""
    if mode not in ("eval", "train"):
        raise RefusedError("mode", f"{mode!r} is not a mode", choose(mode, ("eval", "train")))
    return TuneStage.from_options(options, {"mode": mode})
