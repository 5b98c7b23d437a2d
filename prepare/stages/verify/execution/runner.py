"""Run the exact, the baseline and the prepared model on one call."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.explain_error import explained
from prepare.core.forward.float32_calls import same_casts
from prepare.stages.verify.execution import single_run
from prepare.stages.verify.execution.hooks import ContiguousNorms, perturbed, rounded
from prepare.stages.verify.execution.single_run import RESULT_FIELDS, NamedTensors, RunResult, cast
from prepare.stages.verify.inputs import VerificationCase, format_call, nudged, user_call
from prepare.stages.verify.static_checks import tensor_pairs
from prepare.stages.verify.tolerance import Deviation, all_finite, compare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prepare.core.forward.call import Call
    from prepare.pipeline import Pipeline
    from prepare.stages.verify.execution.budget import Budget, Cost

# Exact runs by case and training flags, each with its dtype, and whether one in float64 raised.
ExactRuns = dict[Any, tuple[torch.dtype, bool, RunResult]]
_Context = AbstractContextManager | None
# The factor of gradients under autocast to float16: that of GradScaler, and smaller if they overflow.
_FIRST_SCALE, _BACKOFF = 2.0**16, 2.0**8


class CannotTellError(Exception):
    """The models cannot be compared; the message says why."""


class PreparedModelError(Exception):
    """The prepared model raised; the message explains the error."""


@dataclass
class ModelPair:
    """The reference and the prepared model, and the dtypes and devices of the prepared model's tensors.

    `rewritten` names the modules whose tensors a structure step replaced, `pairs` holds the tensors that both
    models have in common. `targets` holds the dtype and device of each prepared tensor, by the id of the
    reference's tensor. `dtype` is the coarsest dtype of the prepared model, or that of `amp`, the autocast in
    which it runs. `depth` is the number of its modules with parameters.
    """

    reference: nn.Module
    prepared: nn.Module
    pipeline: Pipeline | None = None
    rewritten: tuple[str, ...] = ()
    amp: str = "none"

    def __post_init__(self) -> None:
        tensors = (*self.prepared.parameters(), *self.prepared.buffers())
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        if self.amp != "none":
            dtypes.add(getattr(torch, self.amp))
        self.dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
        self.depth = sum(bool(module._parameters) for module in self.prepared.modules())
        self.pairs = tensor_pairs(self.reference, self.prepared)
        self.targets = {id(old): (new.dtype, new.device) for old, new in self.pairs.values()}

    def baseline_stand_in(self, tensor: Tensor) -> Tensor:
        """Cast one of the reference's tensors to the prepared model's dtype and device, contiguous."""
        return cast(tensor, *self.targets.get(id(tensor), (tensor.dtype, tensor.device)))

    def rounded_stand_in(self, tensor: Tensor) -> Tensor:
        """Return the same tensor in float32, with its values rounded to the prepared model's dtype."""
        return cast(self.baseline_stand_in(tensor), torch.float32)

    def compare(self, results: RunResults, kind: str) -> list[Deviation]:
        """Compare the prepared model's tensors of a kind with the exact ones; leave out rewritten ones."""

        def comparable(result: RunResult) -> NamedTensors:
            named: NamedTensors = getattr(result, RESULT_FIELDS[kind])
            rewritten = tuple(f"{name}." for name in self.rewritten)
            return {
                name: tensor for name, tensor in named.items() if not name.startswith(rewritten)
            }

        baseline = results.baseline + (results.perturbed if "gradients" in kind else [])
        return compare(
            comparable(results.exact),
            [comparable(result) for result in baseline],
            comparable(results.prepared),
            dtype=self.dtype,
            depth=self.depth,
            gradients="gradients" in kind,
            # Outputs and input gradients have their own scales; gradients of a module's parameters share one.
            by_module=kind in ("parameter gradients", "buffers"),
        )


@dataclass
class RunResults:
    """The results of the three models for one call.

    `baseline`: runs of the reference in the prepared model's dtypes; in float32 with rounded outputs if a
    kernel is missing. `perturbed`: further baseline runs with a slightly perturbed forward.
    """

    exact: RunResult
    baseline: list[RunResult]
    prepared: RunResult
    perturbed: list[RunResult] = field(default_factory=list)


@dataclass
class Runner:
    """Runs the models with the training flags `flags`, and checks the budget before each run.

    `exact_dtype` is the dtype of the last exact run. With `compiled` the prepared model runs with its
    compiler. Without `backward` all models run forward only. `exact_raised`: the reference cannot run in
    float64; `refused`: why float64 does not fit into the budget. `exact_runs` caches exact runs of the call
    of `case`, which are the same for every prepared model. Only runs without gradients are cached, to save
    memory.
    Under autocast to float16, gradients are scaled by a factor with which those of the baseline are finite.
    """

    models: ModelPair
    flags: Mapping[str, bool]
    budget: Budget
    cost: Cost
    exact_dtype: torch.dtype = torch.float64
    compiled: bool = False
    backward: bool = True
    case: VerificationCase | None = None
    exact_runs: ExactRuns = field(default_factory=dict)
    exact_raised: bool = False
    refused: str = ""
    _baseline_raised: bool = False
    _scale: float = 1.0

    def __post_init__(self) -> None:
        if self.models.amp == "float16" and self.backward:
            self._scale = _FIRST_SCALE

    def run_all(self, call: Call) -> RunResults:
        """Run the exact, the baseline and the prepared model.

        Raises:
            CannotTellError: a run does not fit into the budget.
            PreparedModelError: the prepared model raised. An error of the reference is not wrapped.
        """
        return RunResults(self._run_exact(call), self.run_baseline(call), self.run_prepared(call))

    def run_prepared(
        self,
        call: Call,
        *,
        seed: int = 0,
        backward: bool = True,
        context: _Context = None,
        frozen_inputs: bool = False,
    ) -> RunResult:
        """Run the prepared model once; without its backward if that might overwrite memory.

        Raises:
            PreparedModelError: it raised.
        """
        prepared = self.models.prepared
        call = user_call(call, prepared, self.models.pipeline)
        compiled = self.compiled
        try:
            return single_run.run_model(
                prepared,
                call,
                single_run.compiled_stand_in if compiled else single_run.same_stand_in,
                flags=self.flags,
                seed=seed,
                backward=backward and self.backward,
                compiled=compiled,
                frozen_inputs=frozen_inputs,
                context=context,
                amp=self.models.amp,
                scale=self._scale,
            )
        except Exception as error:
            raise_if_out_of_memory(error)
            raise PreparedModelError(str(explained(prepared, error))) from error

    def run_baseline(
        self,
        call: Call,
        *,
        seed: int = 0,
        backward: bool = True,
        context: _Context = None,
        frozen_inputs: bool = False,
    ) -> list[RunResult]:
        """Run the reference in the prepared model's dtypes.

        If it raises, for example because torch lacks a kernel in 16 bits, run it in float32 with the inputs
        and outputs of all modules rounded. Return an empty list if that raises too.

        Raises:
            CannotTellError: the run does not fit into the budget.
        """
        models = self.models
        run = partial(
            self._run_reference,
            call,
            seed=seed,
            backward=backward and self.backward,
            context=context,
            frozen_inputs=frozen_inputs,
        )
        if not self._baseline_raised:
            # Modules that the prepared model keeps in float32 take no 16-bit inputs.
            with same_casts(models.reference, models.prepared):
                results = run(models.dtype, models.baseline_stand_in)
            if results:
                return results
            self._baseline_raised = True
        if torch.finfo(models.dtype).bits >= torch.finfo(torch.float32).bits:
            return []
        with rounded(models.reference, models.dtype):
            return run(torch.float32, models.rounded_stand_in)

    def run_perturbed(self, call: Call, fraction: float, seed: int) -> list[RunResult]:
        """Run the baseline with each module's output perturbed by a fraction of its standard deviation."""
        return self.run_baseline(call, context=perturbed(self.models.reference, fraction, seed))

    def _run_reference(
        self,
        call: Call,
        dtype: torch.dtype,
        stand_in: Callable[[Tensor], Tensor],
        *,
        seed: int,
        backward: bool,
        context: _Context,
        frozen_inputs: bool,
    ) -> list[RunResult]:
        if reason := self.budget.refuses(self.cost, dtype, backward=backward):
            raise CannotTellError(reason)
        models = self.models
        call = format_call(call, models.prepared, models.pipeline).map(single_run.contiguous)
        if dtype != models.dtype:
            call = call.map(partial(cast, dtype=dtype))
        elif dtype == self.exact_dtype:
            call = call.map(nudged)  # otherwise it would repeat the exact run, without any noise
        try:
            while True:
                with self.budget.timing(self.cost, dtype, backward=backward):
                    result = single_run.run_model(
                        models.reference,
                        call,
                        stand_in,
                        flags=self.flags,
                        seed=seed,
                        backward=backward,
                        repair=dtype == torch.bfloat16,
                        frozen_inputs=frozen_inputs,
                        context=_both(ContiguousNorms(), context),
                        amp=models.amp if dtype == models.dtype else "none",
                        scale=self._scale,
                    )
                _raise_if_unsafe(result, backward=backward)
                if self._scale == 1.0 or all_finite(result.parameters | result.inputs):
                    return [result]
                self._scale /= _BACKOFF  # a GradScaler skips such a step, too
        except CannotTellError:
            raise
        except Exception as error:
            raise_if_out_of_memory(error)
            return []

    def _run_exact(self, call: Call) -> RunResult:
        """Return the exact run of the reference; without gradients, that of the case's call is cached."""
        case = self.case
        if case is None or self.backward or call is not case.call:
            return self.run_exact(call)
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in call.tensors())
        key = (case.mode, case.inputs, shapes, case.outputs_only, *self.flags.items())
        if key not in self.exact_runs:
            result = self.run_exact(call)
            self.exact_runs[key] = self.exact_dtype, self.exact_raised, result
        self.exact_dtype, self.exact_raised, result = self.exact_runs[key]
        return result

    def run_exact(self, call: Call) -> RunResult:
        """Run in float64, or in float32 if that does not fit or the model casts to float32 itself."""
        outputs_only = self.case is not None and self.case.outputs_only
        self.refused = "" if outputs_only else self._refusal(torch.float64)
        if not outputs_only and not self.refused:
            try:
                return self._run_in(torch.float64, call)
            except CannotTellError:
                raise
            except Exception as error:
                raise_if_out_of_memory(error)
                self.exact_raised = True
        if reason := self._refusal(torch.float32):
            raise CannotTellError(reason)
        return self._run_in(torch.float32, call)

    def _refusal(self, dtype: torch.dtype) -> str:
        return self.budget.refuses(self.cost, dtype, backward=self.backward)

    def _run_in(self, dtype: torch.dtype, call: Call) -> RunResult:
        self.exact_dtype = dtype
        call = call.map(lambda tensor: cast(tensor.detach(), dtype))
        with self.budget.timing(self.cost, dtype, backward=self.backward):
            result = single_run.run_model(
                self.models.reference,
                call,
                partial(cast, dtype=dtype),
                flags=self.flags,
                dtype=dtype,
                backward=self.backward,
                context=ContiguousNorms(),
            )
        _raise_if_unsafe(result, backward=self.backward)
        return result


@contextmanager
def _both(one: AbstractContextManager, other: _Context) -> Iterator[None]:
    with one, other or nullcontext():
        yield


def unsafe_text(result: RunResult) -> str:
    """Return the reason why a backward was not run, as the end of a sentence."""
    place = result.unsafe_module or "the model"
    return f"torch may end the process in the backward of {place} [{result.unsafe_issue}]"


def _raise_if_unsafe(result: RunResult, *, backward: bool) -> None:
    if backward and result.unsafe_module is not None:
        raise CannotTellError(f"{unsafe_text(result)} of the unprepared model, so it was not run")


def raise_if_out_of_memory(error: Exception) -> None:
    """Raise the error again if it is not caused by the model's code."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        raise error
