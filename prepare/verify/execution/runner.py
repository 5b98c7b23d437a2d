"""Runs the exact, the plain and the prepared model on one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from prepare.core.forward.explain_error import explained
from prepare.verify.execution import single_run as runs
from prepare.verify.execution.perturbation import Noise, Rounded
from prepare.verify.inputs import as_used, formatted, nudged

if TYPE_CHECKING:
    from prepare.core.forward.call import Call
    from prepare.verify.cases import Case
    from prepare.verify.execution.budget import Budget, Cost
    from prepare.verify.execution.model_pair import Models
    from prepare.verify.execution.single_run import Run


class UnknownError(Exception):
    """Why it cannot be told."""


class RaisedError(Exception):
    """What the prepared model raised, in words."""


@dataclass
class Three:
    """What the three models gave for one call.

    `plain` are runs of the unprepared model in the prepared one's dtypes, or rounded to these where it
    raises in them.
    `noisy` are further ones with a forward that is a little off.
    """

    exact: Run
    plain: list[Run]
    ours: Run
    noisy: list[Run] = field(default_factory=list)


@dataclass
class Runner:
    """Runs the models, each module in the mode that `flags` says; asks the budget before each run.

    `exact_dtype` is what the exact run was in, the last time. With `compiled` the prepared model runs
    with its compiler; unless `backward` all run forward alone, and with `careful` the prepared one, where
    its backward may go beyond its memory. `kept` holds such exact runs of the call of `case`, which say the
    same for whatever was prepared; with gradients they would be large.
    """

    models: Models
    flags: Mapping[str, bool]
    budget: Budget
    cost: Cost
    exact_dtype: torch.dtype = torch.float64
    compiled: bool = False
    backward: bool = True
    careful: bool = False
    case: Case | None = None
    kept: dict[Any, tuple[torch.dtype, Run]] = field(default_factory=dict)
    _raised_plain: bool = False

    def three(self, call: Call, watching: tuple[Any, Any, Any] = (None, None, None)) -> Three:
        """One run of each, each under its own context of `watching`.

        Raises:
            UnknownError: a run does not fit.
            RaisedError: the prepared model raised. What the reference raises comes as it is.
        """
        exact = self._exact(call, watching[0])
        plain = self.plain(call, watching=watching[1])
        return Three(exact, plain, self.ours(call, watching=watching[2]))

    def ours(self, call: Call, *, seed: int = 0, watching: Any = None) -> Run:
        """One run of the prepared model.

        Raises:
            RaisedError: it raised.
        """
        prepared = self.models.prepared
        given = as_used(call, prepared, self.models.pipeline)
        how = {"flags": self.flags, "seed": seed, "watching": watching, "careful": self.careful}
        stand_in = runs.its_own if self.compiled else runs.itself
        try:
            return runs.run(
                prepared, given, stand_in, backward=self.backward, compiled=self.compiled, **how
            )
        except Exception as error:
            pass_on(error)
            raise RaisedError(str(explained(prepared, error))) from error

    def plain(
        self, call: Call, *, seed: int = 0, backward: bool = True, watching: Any = None
    ) -> list[Run]:
        """One run of the unprepared model in the prepared one's dtypes.

        Where it raises there, as for a kernel that torch lacks in 16 bits, one in float32 with all that
        modules take and give rounded; none if it raises then, too.

        Raises:
            UnknownError: it does not fit.
        """
        how = {"seed": seed, "backward": backward and self.backward, "watching": watching}
        if not self._raised_plain:
            if found := self._plain(call, self.models.dtype, self.models.plain, **how):
                return found
            self._raised_plain = True
        if torch.finfo(self.models.dtype).bits >= torch.finfo(torch.float32).bits:
            return []
        with Rounded(self.models.reference, self.models.dtype):
            return self._plain(call, torch.float32, self.models.rounded, **how)

    def _plain(
        self, call: Call, dtype: torch.dtype, stand_in: Callable[[Tensor], Tensor], **how: Any
    ) -> list[Run]:
        if reason := self.budget.refuses(self.cost, dtype, backward=how["backward"]):
            raise UnknownError(reason)
        given = runs.contiguous(formatted(call, self.models.prepared, self.models.pipeline))
        if dtype != self.models.dtype:
            given = given.map(lambda tensor: runs.cast(tensor, dtype, tensor.device))
        elif dtype == self.exact_dtype:
            given = nudged(given)  # else it would be the exact run again, and say nothing of noise
        how |= {"flags": self.flags, "repaired": dtype == torch.bfloat16}
        try:
            with self.budget.timing(self.cost, dtype, backward=how["backward"]):
                return [runs.run(self.models.reference, given, stand_in, **how)]
        except Exception as error:
            pass_on(error)
            return []

    def noisy(self, call: Call, part: float, seed: int) -> list[Run]:
        """The same, with what each module gives off by this part of its deviation."""
        return self.plain(call, watching=Noise(self.models.reference, part, seed))

    def _exact(self, call: Call, watching: Any) -> Run:
        """In float64, or in float32 where that does not fit, or the model makes a float32 of its own."""
        case, flags = self.case, tuple(self.flags.items())
        key = case and (case.mode, case.inputs, case.call.batch, flags)
        is_kept = watching is None and not self.backward and case and call is case.call
        if is_kept and key in self.kept:
            self.exact_dtype, found = self.kept[key]
            return found
        found = self._exact_anew(call, watching)
        if is_kept:
            self.kept[key] = self.exact_dtype, found
        return found

    def _exact_anew(self, call: Call, watching: Any) -> Run:
        for dtype in (torch.float64, torch.float32):
            is_last = dtype == torch.float32
            if reason := self.budget.refuses(self.cost, dtype, backward=self.backward):
                if is_last:
                    raise UnknownError(reason)
                continue
            self.exact_dtype = dtype
            given = call.map(lambda t, dtype=dtype: runs.cast(t.detach(), dtype, t.device))
            how = {"flags": self.flags, "dtype": dtype, "watching": watching}
            how |= {"backward": self.backward}
            try:
                with self.budget.timing(self.cost, dtype, backward=self.backward):
                    return runs.run(self.models.reference, given, self.models.exact(dtype), **how)
            except Exception as error:
                pass_on(error)
                if is_last:
                    raise
        raise AssertionError  # the loop returns or raises


def pass_on(error: Exception) -> None:
    """Raises an error again that is no matter of the model's code."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        raise error
