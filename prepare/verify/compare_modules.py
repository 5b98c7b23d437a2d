"""Compare every module of the prepared model alone, on the inputs and gradients that it had in one run.

A whole model amplifies rounding: a ReLU whose input changes its sign changes single gradients of all layers
before it. Alone, a module and its reference in float64 get exactly the same numbers, so both take the same
side of each kink, and an error in one module stands out at any depth. Only one module runs in float64 at a
time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from prepare.core.forward.float32_calls import same_casts
from prepare.core.forward.stand_ins import copy_of, standing_in
from prepare.core.forward.torch_state import isolated
from prepare.core.model.quantized import quantized_weight, quantizes_inputs
from prepare.core.utils.process_state import PROCESS_STATE, ignored_warnings
from prepare.core.utils.signals import held_interrupts, interruptible
from prepare.core.utils.text import first_line
from prepare.verify.execution import single_run
from prepare.verify.execution.determinism import make_deterministic
from prepare.verify.execution.module_calls import (
    CallInterceptor,
    CallRecorder,
    LoneRun,
    RecordedCall,
)
from prepare.verify.execution.runner import CannotTellError, raise_if_out_of_memory
from prepare.verify.gradient_sums import GradientSums
from prepare.verify.inputs import jittered_tensor, nudged_tensor
from prepare.verify.tolerance import NEGLIGIBLE, TOO_NOISY, Deviation, compare, first_non_finite

if TYPE_CHECKING:
    from prepare.core.forward.call import Call
    from prepare.verify.execution.model_pair import ModelPair
    from prepare.verify.execution.runner import Runner
    from prepare.verify.execution.single_run import RunResult

# The kinds of tensors that are compared, and the fields of RunResult that hold each.
MODULE_FIELDS = {
    "module outputs": ("outputs",),
    "module gradients": ("inputs", "parameters"),
}
# The floor of a module's tolerance allows for so many layers. A kernel in float32 may add up many numbers
# in another order, and the floor of 100 layers, 0.008 %, is far below the errors that are searched for.
_DEPTH = {torch.float16: 1, torch.bfloat16: 1}
_DEPTH_DEFAULT = 100
# The multiple of the reference's own noise that is allowed. A gradient that cancels, as that of a 1x1
# convolution before a norm, is noise of another size in each kernel.
_FACTOR = {torch.float16: 10.0, torch.bfloat16: 10.0}
_FACTOR_DEFAULT = 30.0
# A call that exceeds its tolerance is compared again, so often, on inputs changed by this fraction.
_RETRIES, _JITTER = 2, 0.02


@dataclass
class ModuleDifferences:
    """The comparison of all module calls of one run.

    `deviations` holds those of each kind, with the module as name; `sensitivities` the smallest systematic
    error of a kind that exceeds the tolerance, in the least sensitive module, and that module. `left_out`
    says why modules could not be run alone, `shapes` holds the shape of each module's first input. `is_sum`
    is True if the gradients of the model are those of its modules alone, None if that cannot be told, see
    `prepare.verify.gradient_sums`.
    """

    deviations: dict[str, list[Deviation]] = field(default_factory=dict)
    sensitivities: dict[str, tuple[float, str]] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    is_sum: bool | None = None

    def add(self, module: str, found: Mapping[str, list[Deviation]]) -> None:
        """Add the deviations of one call of a module."""
        self.compared.add(module)
        for kind, deviations in found.items():
            named = [replace(item, name=module) for item in deviations]
            self.deviations.setdefault(kind, []).extend(named)
            tolerances = [
                item.allowed
                for item in deviations
                if item.share >= NEGLIGIBLE and item.noise < TOO_NOISY and not item.note
            ]
            if tolerances:
                least = self.sensitivities.get(kind, (0.0, ""))
                self.sensitivities[kind] = max(least, (min(tolerances), module))


def compare_modules(runner: Runner, call: Call, *, backward: bool) -> ModuleDifferences:
    """Run the prepared model once, then each of its modules alone, and compare these with the reference's.

    If the memory is too small for a recorded backward, the gradients that modules get are random.

    Raises:
        CannotTellError: the run does not fit into the budget.
        PreparedModelError: the prepared model raised.
    """
    models, found = runner.models, ModuleDifferences()
    refuses = partial(runner.budget.refuses_modules, runner.cost, models.dtype)
    forward_only = not backward or bool(refuses(backward=True))
    if forward_only and (reason := refuses(backward=False)):
        raise CannotTellError(reason)
    # The second is one of a checkpoint in the model.
    expected = "the tensors in a .* stay as they are|None of the inputs have requires_grad"
    quiet = ignored_warnings(expected)
    with held_interrupts(), PROCESS_STATE, CallInterceptor() as interceptor, quiet:
        recorder = CallRecorder(models.prepared, interceptor, forward_only=forward_only)
        whole = runner.run_prepared(call, context=recorder, backward=not forward_only)
        comparer = _Comparer(models, interceptor, backward=backward)
        interruptible(_compare_all, runner, recorder.calls, comparer, found)
    if not forward_only and not found.left_out:
        found.is_sum = comparer.sums.agree_with(whole)
    return found


def _compare_all(
    runner: Runner, calls: list[RecordedCall], comparer: _Comparer, found: ModuleDifferences
) -> None:
    models = runner.models
    weights = {n: quantized_weight(m) for n, m in models.prepared.named_modules()}
    rounding = {name for name, w in weights.items() if w is not None and quantizes_inputs(w)}
    with _deterministic(models, runner.flags):
        for recorded in _consumed(calls):
            name = recorded.module
            for tensor in recorded.arguments.tensors():
                found.shapes.setdefault(name, tensor.shape)
            try:
                if _time_is_over(runner):
                    raise TimeoutError("no time was left; raise verify.seconds")
                if name in models.rewritten:
                    continue
                if name in rounding:
                    raise ValueError("it rounds its inputs to int8")
                found.add(name, comparer.compare(recorded))
            except Exception as error:  # the module's code may depend on the code around it
                raise_if_out_of_memory(error)
                found.left_out.setdefault(name, first_line(error))


def _time_is_over(runner: Runner) -> bool:
    return runner.budget.spent() > runner.budget.seconds


@dataclass
class _Comparer:
    """Runs single calls in the prepared model, in float64 and in the baseline."""

    models: ModelPair
    interceptor: CallInterceptor
    backward: bool
    sums: GradientSums = field(init=False)
    _names: dict[int, str] = field(init=False)
    _modules: dict[nn.Module, dict[str, nn.Module]] = field(init=False)

    def __post_init__(self) -> None:
        self.sums = GradientSums(self.models.prepared, self.models.dtype)
        both = (self.models.reference, self.models.prepared)
        self._modules = {model: dict(model.named_modules()) for model in both}
        self._names = {id(m): name for of in self._modules.values() for name, m in of.items()}

    def compare(self, call: RecordedCall) -> dict[str, list[Deviation]]:
        """Compare one call; repeat it on slightly different inputs while a tensor exceeds its tolerance."""
        found = self._compare_once(call, keep=True)
        for seed in range(1, _RETRIES + 1):
            if not any(item.exceeds for items in found.values() for item in items):
                break
            changed = call.changed(partial(jittered_tensor, fraction=_JITTER, seed=seed))
            again = self._compare_once(changed, nudge=True)
            found = {kind: _milder(items, again[kind]) for kind, items in found.items()}
        return found

    def _compare_once(
        self, call: RecordedCall, *, keep: bool = False, nudge: bool = False
    ) -> dict[str, list[Deviation]]:
        run = self._lone(self.models.prepared, call, single_run.same_stand_in, copy_of)
        run.amp = self.models.amp
        prepared = run.run(call, backward=self.backward)
        if keep:
            call.input_gradients = run.argument_gradients(call)
            self.sums.add(call, run, prepared)
        exact, scales = self._run_exact(call)
        baselines = self._run_baseline(call)
        if nudge:
            baselines += self._run_baseline(call.changed(nudged_tensor))
        kinds = [kind for kind in MODULE_FIELDS if self.backward or kind == "module outputs"]
        return {kind: self._deviations(kind, exact, baselines, prepared, scales) for kind in kinds}

    def _deviations(
        self,
        kind: str,
        exact: RunResult,
        baselines: list[RunResult],
        prepared: RunResult,
        scales: Mapping[str, float],
    ) -> list[Deviation]:
        deviations: list[Deviation] = []
        for part in MODULE_FIELDS[kind]:
            expected, actual = getattr(exact, part), getattr(prepared, part)
            if first_non_finite(expected):
                continue
            if expected.keys() != actual.keys():
                raise ValueError("its reference has other inputs, outputs or parameters")
            deviations += compare(
                expected,
                [getattr(baseline, part) for baseline in baselines],
                actual,
                dtype=self.models.dtype,
                depth=_DEPTH.get(self.models.dtype, _DEPTH_DEFAULT),
                gradients=part != "outputs",
                by_module=part == "parameters",
                factor=_FACTOR.get(self.models.dtype, _FACTOR_DEFAULT),
                scales={} if part == "outputs" else scales,
                garbage=math.inf,  # a true gradient of zero has only noise
            )
        return deviations

    def _run_exact(self, call: RecordedCall) -> tuple[RunResult, dict[str, float]]:
        """Run the reference's module in float64, with weights in the prepared model's precision.

        Also return the scales of its gradients.
        """

        def stand_in(tensor: Tensor) -> Tensor:
            rounded = self.models.alone_stand_in(tensor)
            return single_run.cast(rounded, torch.float64, rounded.device)

        def convert(tensor: Tensor) -> Tensor:
            return single_run.cast(tensor.detach(), torch.float64, tensor.device)

        run = self._lone(self.models.reference, call, stand_in, convert)
        run.dtype = torch.float64
        result = run.run(call, backward=self.backward)
        return result, run.scales(result)

    def _run_baseline(self, call: RecordedCall) -> list[RunResult]:
        """Run the reference's module in the prepared model's dtypes, contiguous; empty if that raises."""

        def convert(tensor: Tensor) -> Tensor:
            return tensor.detach().clone(memory_format=torch.contiguous_format)

        run = self._lone(self.models.reference, call, self.models.alone_stand_in, convert)
        run.repair, run.amp = self.models.dtype == torch.bfloat16, self.models.amp
        modules = (
            self._modules[m][call.module] for m in (self.models.reference, self.models.prepared)
        )
        try:
            with same_casts(*modules):
                return [run.run(call, backward=self.backward)]
        except Exception as error:
            raise_if_out_of_memory(error)
            return []

    def _lone(
        self,
        model: nn.Module,
        call: RecordedCall,
        stand_in: Callable[[Tensor], Tensor],
        convert: Callable[[Tensor], Tensor],
    ) -> LoneRun:
        module = self._modules[model][call.module]
        return LoneRun(module, self._names, self.interceptor, stand_in, convert)


def _consumed(calls: list[RecordedCall]) -> Iterator[RecordedCall]:
    """Yield the calls in order; free the tensors of a call's children after it."""
    calls.reverse()
    while calls:
        call = calls.pop()
        yield call
        call.children.clear()


@contextmanager
def _deterministic(models: ModelPair, flags: Mapping[str, bool]) -> Iterator[None]:
    """Set the modes of both models and disable dropout; restore them afterwards."""
    with isolated(), ExitStack() as stack:
        for model in (models.reference, models.prepared):
            stack.enter_context(standing_in(model, lambda tensor: tensor))
            make_deterministic(model, flags)
        yield


def _milder(before: list[Deviation], again: list[Deviation]) -> list[Deviation]:
    return [min(pair, key=lambda item: item.excess) for pair in zip(before, again, strict=True)]
