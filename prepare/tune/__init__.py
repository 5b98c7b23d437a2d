"""Finds the fastest recipe for this model, input, device and torch whose outputs are still right.

Examples:
    >>> from torch import nn, randn
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    >>> found = tune(model, randn(1, 3, 32, 32), budget=2.0, cache=False)
    >>> found.winner in {row.name for row in found.rows}
    True
    >>> prepared = found.pipeline.apply(model)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prepare.core.utils.suggest import choose
from prepare.errors import RefusedError
from prepare.tune.records import Row, Tuning

if TYPE_CHECKING:
    from torch import nn

    from prepare.bench.variant import Clock
    from prepare.core.utils.progress import Stage

__all__ = ["Row", "Tuning", "tune"]


def tune(
    model: nn.Module,
    batch: Any,
    *,
    allow: Iterable[str] = (),
    mode: Literal["eval", "train"] = "eval",
    budget: float = 60.0,
    declared: Mapping[str, Any] | None = None,
    cache: bool | str | Path = True,
    seed: int = 0,
    progress: Stage = lambda _: nullcontext(),
    _clock: Clock = time.perf_counter,
) -> Tuning:
    """Tries recipes against each other on copies of the model, and gives the best; `model` stays as it is.

    All candidates run in turn, in every round in another order, and are compared by the ratios of
    their times within rounds (see `prepare.bench`). One that is probably slower than the best is out,
    the unprepared model only where one is faster beyond doubt, until it is clear who is left or the
    budget is spent. Before one takes out the unprepared model, and before it wins, it is verified (see
    `prepare.verify`) and has to pass; else those that it took out come back. Of those within 2 % of the
    fastest the simplest wins (see `prepare.tune.candidates`); that may be the unprepared model.

    Args:
        model: on the device where it is to run, before it is compiled or wrapped (DDP).
        batch: a tensor, a tuple of positional or a mapping of named arguments, or an Example.
        allow: what may be tried beyond float32 without a compiler: `bfloat16`, `half`, `compile`
            (inductor; in `eval` frozen as well), `openvino`.
        mode: `eval` times forward, and outputs count; `train` times forward and backward, and
            gradients count too.
        budget: seconds. A compilation or a verification that has begun is finished, and the winner
            is verified in any case.
        declared: a pipeline of your own, one more candidate; its `device` holds for all of them.
        cache: whether, or in which folder, the answer is kept. One that was kept is verified again.
        seed: of the order and of the inputs.
        progress: called with what is going on, in words; what it gives is entered meanwhile.

    With torch.distributed initialised, rank 0 decides, and every rank is given the same answer.

    Raises:
        ConfigError: an argument is wrong; one problem for each.
        RefusedError: the model cannot be copied or prepared as it is now.
        ModelError: the unprepared model itself does not run.
    """
    from prepare.tune.options import read_tune
    from prepare.tune.rank_zero import decided_by_rank_0
    from prepare.tune.session import Question

    if mode not in ("eval", "train"):
        raise RefusedError("mode", f"{mode!r} is none", choose(mode, ("eval", "train")))
    options = read_tune(
        {
            "allow": allow if isinstance(allow, str) else list(allow),
            "budget": budget,
            "cache": cache if isinstance(cache, bool) else str(cache),
        },
        mode=mode,
    )
    question = Question(
        model=model,
        batch=batch,
        options=options,
        mode=mode,
        declared=dict(declared or {}),
        seed=seed,
        progress=progress,
        clock=_clock,
    )
    return decided_by_rank_0(question.answer)
