"""Runs one candidate on a copy of the model: prepared, called, timed and verified."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from prepare.bench.variant import Variant
from prepare.core.utils.text import first_line
from prepare.errors import PrepareError, RefusedError
from prepare.pipeline import Pipeline
from prepare.tune.contestants import Checked, OutError
from prepare.verify.check_model import check_model
from prepare.verify.inputs import user_formatter

if TYPE_CHECKING:
    from prepare.bench.variant import Clock
    from prepare.tune.candidates import Candidate

# Seconds: shorter calls are timed several in a row, as in a bench.
_TURN, _MOST_CALLS = 0.005, 1000
# Longer calls are timed without another one before: what they find in the caches matters less.
_SETTLED = 0.05
# A verification that is part of a tuning may take as much memory as is there, but for the models, and as
# long as all of the tuning may: bytes and seconds that it may take in any case.
_LEAST_MEMORY, _LEAST_SECONDS, _PART = 4 * 2**30, 30.0, 0.5
_MEMORY = Path("/proc/meminfo")


class Manner(NamedTuple):
    """How a turn goes: so many calls in a row; short ones after one that is not timed.

    The same for all: the first call in a row finds colder caches than the next.
    """

    calls: int
    settled: bool


class Running:
    """A copy of `model`, prepared as a candidate says; `turn` times it on one of the inputs in `pool`."""

    def __init__(
        self,
        model: nn.Module,
        candidate: Candidate,
        pool: list[Any],
        *,
        mode: str,
        clock: Clock,
        manner: Manner | None = None,
    ) -> None:
        self._mode, self._pool, self._clock = mode, pool, clock
        with _explained(None), _quiet():
            self.pipeline = Pipeline.from_config(candidate.steps)
            self.model = copied(model, mode)
            known = "error" if mode == "train" else "ignore"
            self.pipeline.apply(self.model, known_issues=known)
        self._buffers = [(held, held.detach().clone()) for held in self.model.buffers()]
        train = mode == "train"
        self._variant = Variant(
            candidate.name, self.model, formatter=user_formatter(self.pipeline), train=train
        )
        with _explained(self._variant), _quiet():
            self._warm_up(manner)

    def turn(self, number: int) -> float:
        """Seconds of one call."""
        with _explained(self._variant):
            return self._timed(self._pool[number % len(self._pool)], self.manner)

    def check(
        self, reference: nn.Module, batch: Any, exact: dict[Any, Any], *, budget: float
    ) -> Checked:
        """Verifies it as it is, with its buffers as they were before it was timed.

        `exact` keeps what the reference gives, for the next candidate. `budget` is that of the tuning.
        """
        with torch.no_grad():
            for held, values in self._buffers:
                held.copy_(values)
        free = free_memory(torch.device("cpu")) or 0
        how = {"mode": self._mode, "memory": max(_LEAST_MEMORY, int(_PART * free))}
        how |= {"gradients": self._mode == "train", "exact_runs": exact}
        how |= {"seconds": max(_LEAST_SECONDS, budget)}
        try:
            with _quiet():
                found = check_model(reference, self.model, batch, pipeline=self.pipeline, **how)
        except Exception as error:  # memory ran out, or a candidate that nobody thought of
            return Checked("cannot tell", f"it raised {type(error).__name__}: {first_line(error)}")
        outputs = [check for check in found.checks if check.what == "outputs"]
        worst = max(outputs, key=lambda check: check.error or 0.0, default=None)
        return Checked(found.status, found.reason, worst and worst.error, worst and worst.allowed)

    def _warm_up(self, manner: Manner | None) -> None:
        once, first = Manner(1, settled=False), self._pool[0]
        self._device = self._variant.device(first)
        self._timed(first, once)  # compilers are done by then
        self.peak, _ = self._variant.peak(first, self._device)
        seconds = self._timed(first, once)
        calls = math.ceil(_TURN / max(seconds, _TURN / _MOST_CALLS))
        self.manner = manner or Manner(calls, settled=seconds < _SETTLED)
        self.seconds = seconds * sum(self.manner)

    def _timed(self, batch: Any, manner: Manner) -> float:
        calls, settle = manner
        return self._variant.timed(
            batch, calls=calls, warm=settle, device=self._device, clock=self._clock
        )


def copied(model: nn.Module, mode: str) -> nn.Module:
    """A copy without gradients, in that mode; one that is in training keeps the mode of each part.

    Raises:
        RefusedError: it cannot be copied.
    """
    try:
        made = copy.deepcopy(model)
    except Exception as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        remedy = "tune a model that copy.deepcopy can copy, before hooks and handles are added"
        raise RefusedError("the model", f"cannot be copied: {said}", remedy) from error
    for parameter in made.parameters():
        parameter.grad = None
    train = mode == "train"
    return made if train and made.training else made.train(train)


def capacity(model: nn.Module, device: torch.device) -> int:
    """How many copies may run at a time: as many as fit into half of the memory, each with gradients."""
    held = sum(t.nbytes for each in (model.parameters(), model.buffers()) for t in each)
    free = free_memory(device)
    return 1000 if free is None else int(_PART * free / max(1, 2 * held))


def free_memory(device: torch.device) -> int | None:
    """Bytes that may still be taken; None where that cannot be found out."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = _MEMORY.read_text().splitlines()
        return 1024 * int(
            next(line for line in lines if line.startswith("MemAvailable")).split()[1]
        )
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return None


@contextlib.contextmanager
def _explained(variant: Variant | None) -> Iterator[None]:
    """Whatever is raised is this candidate's own affair, said in a sentence."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PrepareError) or variant is None:
            said = first_line(error) or type(error).__name__
        else:
            said = variant.explain(error)
        raise OutError(said) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What compilers and known issues warn of is told again when the winner is applied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
