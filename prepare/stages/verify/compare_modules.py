"""Compare every module of the prepared model alone, on the inputs and gradients that it had in one run.

A whole model amplifies rounding: a ReLU whose input changes its sign changes single gradients of all layers
before it. Alone, a module and its reference in float64 get exactly the same numbers, so both take the same
side of each kink, and an error in one module stands out at any depth. Only one module runs in float64 at a
time, and only those which are not as near to the reference in the prepared precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.float32_calls import same_casts
from prepare.core.forward.nested import tensors_in
from prepare.core.forward.stand_ins import copy_of
from prepare.core.forward.unchanged import unchanged
from prepare.core.utils import process_state
from prepare.core.utils.text import first_line
from prepare.stages.verify.execution import single_run
from prepare.stages.verify.execution.determinism import make_deterministic
from prepare.stages.verify.execution.module_calls import (
    CallInterceptor,
    CallRecorder,
    LoneRun,
    RecordedCall,
)
from prepare.stages.verify.execution.runner import (
    CannotTellError,
    ModelPair,
    Runner,
    raise_if_out_of_memory,
)
from prepare.stages.verify.inputs import RETRIES, jittered, nudged
from prepare.stages.verify.static_checks import cast_losses
from prepare.stages.verify.tolerance import (
    NEGLIGIBLE,
    TOO_NOISY,
    Deviation,
    compare,
    dense,
    first_non_finite,
    largest_error,
    rounding_floor,
)

if TYPE_CHECKING:
    from prepare.core.forward.call import Call
    from prepare.stages.verify.execution.single_run import RunResult

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


class OtherTensorsError(ValueError):
    """A module and its reference do not return tensors of the same names."""


@dataclass
class ModuleDifferences:
    """The comparison of all module calls of one run.

    `deviations` holds those of each kind, with the module as name; `sensitivities` the smallest systematic
    error of a kind that exceeds the tolerance, in the least sensitive module, and that module; `tolerances`
    the same as fractions of the scales, which may be larger than the tensors. `left_out` says why modules
    could not be run alone, `shapes` holds the shape of each module's first input. `is_sum` is True if the
    gradients of the model are those of its modules alone, None if that cannot be told, see
    `GradientSums`. `by_loss` holds how far the outputs of modules are off, as a fraction of their scale, in
    float64 with the numbers that the cast of their tensors left.
    """

    deviations: dict[str, list[Deviation]] = field(default_factory=dict)
    sensitivities: dict[str, tuple[float, str]] = field(default_factory=dict)
    tolerances: dict[str, float] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    is_sum: bool | None = None
    by_loss: dict[str, float] = field(default_factory=dict)

    def add(self, module: str, by_kind: Mapping[str, list[Deviation]]) -> None:
        """Add the deviations of one call of a module."""
        self.compared.add(module)
        for kind, deviations in by_kind.items():
            named = [replace(item, name=module) for item in deviations]
            self.deviations.setdefault(kind, []).extend(named)
            large = [item for item in deviations if item.share >= NEGLIGIBLE and not item.note]
            measured = [item.finds for item in large if item.noise < TOO_NOISY * item.size]
            if measured:
                least = self.sensitivities.get(kind, (0.0, ""))
                self.sensitivities[kind] = max(least, (min(measured), module))
            if allowed := [item.allowed for item in large if item.noise < TOO_NOISY]:
                self.tolerances[kind] = max(self.tolerances.get(kind, 0.0), min(allowed))


def compare_modules(runner: Runner, call: Call, *, backward: bool) -> ModuleDifferences:
    """Run the prepared model once, then each of its modules alone, and compare these with the reference's.

    If the memory is too small for a recorded backward, the gradients that modules get are random.

    Raises:
        CannotTellError: the run does not fit into the budget.
        PreparedModelError: the prepared model raised.
    """
    models, differences = runner.models, ModuleDifferences()
    refuses = partial(runner.budget.refuses_modules, runner.cost, models.dtype)
    forward_only = not backward or bool(refuses(backward=True))
    if forward_only and (reason := refuses(backward=False)):
        raise CannotTellError(reason)
    # The second call is that of a checkpoint in the model.
    expected = "the tensors in a .* stay as they are|None of the inputs have requires_grad"
    held, quiet = process_state.held_interrupts(), process_state.ignored_warnings(expected)
    with held, process_state.PROCESS_STATE, CallInterceptor() as interceptor, quiet:
        recorder = CallRecorder(models.prepared, interceptor, forward_only=forward_only)
        whole = runner.run_prepared(call, context=recorder, backward=not forward_only)
        backward = backward and whole.unsafe_module is None
        comparer = ModuleComparer(models, interceptor, backward=backward)
        process_state.interruptible(_compare_all, runner, recorder.calls, comparer, differences)
    if not forward_only and not differences.left_out:
        differences.is_sum = comparer.sums.agree_with(whole)
    return differences


def _compare_all(
    runner: Runner,
    calls: list[RecordedCall],
    comparer: ModuleComparer,
    differences: ModuleDifferences,
) -> None:
    models = runner.models
    losing = {loss.tensor.rpartition(".")[0] for loss in cast_losses(models.pairs)}
    with comparable(models, runner.flags):
        for recorded in _consumed(calls):
            name = recorded.module
            for tensor in recorded.arguments.tensors():
                differences.shapes.setdefault(name, tensor.shape)
            try:
                if _time_is_over(runner):
                    raise TimeoutError("no time was left; raise verify.seconds")
                if name in models.rewritten:
                    continue
                differences.add(name, comparer.compare(recorded))
                if name in losing and name not in differences.by_loss:
                    differences.by_loss[name] = comparer.error_by_loss(recorded)
            except Exception as error:  # the module's code may depend on the code around it
                raise_if_out_of_memory(error)
                differences.left_out.setdefault(name, first_line(error))


def _time_is_over(runner: Runner) -> bool:
    return runner.budget.left() < 0


@dataclass
class ModuleComparer:
    """Runs single calls in the prepared model, in float64 and in the baseline.

    With `whole` a module runs with all modules in it; else calls of its children return what was recorded.
    A module in float32 does not run in float64 if it is as near to the baseline as rounding may be to that;
    its noise is then that of the baseline on inputs that are off by one rounding. With `quick` that holds for
    every dtype, and the noise is not measured.
    """

    models: ModelPair
    interceptor: CallInterceptor
    backward: bool
    whole: bool = False
    quick: bool = False
    sums: GradientSums = field(init=False)
    names: dict[int, str] = field(init=False)
    _modules: dict[nn.Module, dict[str, nn.Module]] = field(init=False)

    def __post_init__(self) -> None:
        self.sums = GradientSums(self.models.prepared, self.models.dtype)
        both = (self.models.reference, self.models.prepared)
        self._modules = {model: dict(model.named_modules()) for model in both}
        modules = ((name, m) for of in self._modules.values() for name, m in of.items())
        self.names = {id(m): name for name, m in modules if not (self.whole and name)}

    def compare(self, call: RecordedCall) -> dict[str, list[Deviation]]:
        """Compare one call; repeat it on slightly different inputs while a tensor exceeds its tolerance."""
        deviations = self._compare_once(call, keep=True)
        for seed in range(1, RETRIES + 1):
            if not any(item.exceeds for items in deviations.values() for item in items):
                break
            changed = call.changed(partial(jittered, seed=seed))
            again = self._compare_once(changed, nudge=True)
            deviations = {
                kind: [
                    min(pair, key=lambda item: item.excess)
                    for pair in zip(items, again[kind], strict=True)
                ]
                for kind, items in deviations.items()
            }
        return deviations

    def _compare_once(
        self, call: RecordedCall, *, keep: bool = False, nudge: bool = False
    ) -> dict[str, list[Deviation]]:
        prepared = self.run_prepared(call, keep=keep)
        baselines = self._run_baseline(call)
        kinds = [kind for kind in MODULE_FIELDS if self.backward or kind == "module outputs"]
        may_be_near = (self.quick or self._is_float32) and not nudge
        if may_be_near and baselines and all(map(_is_finite, baselines)):
            noisy = [] if self.quick else self._run_baseline(call.changed(nudged))
            near = {k: self._deviations(k, baselines[0], noisy, prepared) for k in kinds}
            if not any(item.exceeds for items in near.values() for item in items):
                return {kind: [*map(self._with_noise, items)] for kind, items in near.items()}
        exact, scales = self._run_exact(call)
        if nudge:
            baselines += self._run_baseline(call.changed(nudged))
        return {kind: self._deviations(kind, exact, baselines, prepared, scales) for kind in kinds}

    def _with_noise(self, item: Deviation) -> Deviation:
        """Allow the noise, as the comparison with float64 would."""
        return replace(item, allowed=max(item.allowed, self._factor * item.noise))

    @property
    def _factor(self) -> float:
        return _FACTOR.get(self.models.dtype, _FACTOR_DEFAULT)

    @property
    def _is_float32(self) -> bool:
        return torch.finfo(self.models.dtype).bits >= torch.finfo(torch.float32).bits

    def run_prepared(self, call: RecordedCall, *, keep: bool) -> RunResult:
        """Run the prepared model's module; with `keep`, add its gradients to `sums`."""
        amp = self.models.amp
        run = self._lone(self.models.prepared, call, single_run.same_stand_in, copy_of, amp=amp)
        result = run.run(call, backward=self.backward)
        if keep:
            call.input_gradients = run.argument_gradients(call)
            self.sums.add(call, run, result)
        return result

    def _deviations(
        self,
        kind: str,
        exact: RunResult,
        baselines: list[RunResult],
        prepared: RunResult,
        scales: Mapping[str, float] | None = None,
    ) -> list[Deviation]:
        """Compare tensors of a kind; without the scales of gradients no noise is allowed."""
        deviations: list[Deviation] = []
        for part in MODULE_FIELDS[kind]:
            expected, actual = getattr(exact, part), getattr(prepared, part)
            if first_non_finite(expected):
                continue
            if expected.keys() != actual.keys():
                raise OtherTensorsError("its reference has other inputs, outputs or parameters")
            deviations += compare(
                expected,
                [getattr(baseline, part) for baseline in baselines],
                actual,
                dtype=self.models.dtype,
                depth=_DEPTH.get(self.models.dtype, _DEPTH_DEFAULT),
                gradients=part != "outputs",
                by_module=part == "parameters",
                factor=0.0 if scales is None else self._factor,
                scales={} if part == "outputs" else scales or {},
                garbage=math.inf,  # a true gradient of zero has only noise
            )
        return deviations

    def _run_exact(self, call: RecordedCall) -> tuple[RunResult, dict[str, float]]:
        """Run the reference's module in float64, with weights in the prepared model's precision.

        Also return the scales of its gradients.
        """
        run = self._in_float64(call, self.models.baseline_stand_in)
        result = run.run(call, backward=self.backward)
        return result, run.scales(result)

    def error_by_loss(self, call: RecordedCall) -> float:
        """Return how far its outputs are off by the precision of its weights alone."""
        kinds = (lambda tensor: tensor), self.models.baseline_stand_in
        right, rounded = (
            self._in_float64(call, kind).run(call, backward=False).outputs.values()
            for kind in kinds
        )
        return largest_error(zip(right, rounded, strict=True))

    def _in_float64(self, call: RecordedCall, weight: Callable[[Tensor], Tensor]) -> LoneRun:
        def stand_in(tensor: Tensor) -> Tensor:
            return single_run.cast(weight(tensor), torch.float64)

        def convert(tensor: Tensor) -> Tensor:
            return single_run.cast(tensor.detach(), torch.float64)

        return self._lone(self.models.reference, call, stand_in, convert, dtype=torch.float64)

    def _run_baseline(self, call: RecordedCall) -> list[RunResult]:
        """Run the reference's module in the prepared model's dtypes, contiguous; empty if that raises."""
        models = self.models
        run = self._lone(
            models.reference,
            call,
            models.baseline_stand_in,
            single_run.contiguous,
            repair=models.dtype == torch.bfloat16,
            amp=models.amp,
        )
        both = (self._modules[model][call.module] for model in (models.reference, models.prepared))
        try:
            with same_casts(*both):
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
        **options: Any,
    ) -> LoneRun:
        module = self._modules[model][call.module]
        return LoneRun(module, self.names, self.interceptor, stand_in, convert, **options)


def _is_finite(result: RunResult) -> bool:
    fields = (field for fields in MODULE_FIELDS.values() for field in fields)
    return not any(first_non_finite(getattr(result, field)) for field in fields)


class GradientSums:
    """The sums of the gradients that the modules of a model return alone.

    A model may amplify rounding without any limit: the true gradient of a norm's weight before another norm
    is zero, and what is left are the rounding errors of all that follows. If each module alone is right, and
    the gradients of the whole model are those that its modules alone return, this is the only cause left.
    Memory that two modules share would show here.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        every = model.named_parameters(remove_duplicate=False)
        self._names = {name: first[id(parameter)] for name, parameter in every}
        self._floor = rounding_floor(dtype, 1)
        self._parameters: dict[str, Tensor] = {}
        self._inputs: list[Tensor] = []
        self._differs = self._is_random = False

    def add(self, call: RecordedCall, run: LoneRun, result: RunResult) -> None:
        """Add one call of a module: `run` ran it alone, with this result."""
        self._is_random |= run.is_random
        for name, gradient in result.parameters.items():
            parameter = self._names.get(f"{call.module}.{name}".removeprefix("."))
            if parameter and gradient is not None:
                known = self._parameters.get(parameter)
                self._parameters[parameter] = gradient if known is None else known + gradient
        for child in call.children:
            for index, output in enumerate(tensors_in(child.outputs)):
                self._compare(child.output_gradients.get(index), run.gradient_of(output))
        if not call.module:
            gradients = run.argument_gradients(call)
            self._inputs = [gradient for gradient in gradients if gradient is not None]

    def agree_with(self, whole: RunResult) -> bool | None:
        """Return whether the gradients of the whole model are these sums; None if some were random."""
        if self._is_random:
            return None
        for name, gradient in whole.parameters.items():
            self._compare(gradient, self._parameters.get(name))
        inputs = [gradient for gradient in whole.inputs.values() if gradient is not None]
        if len(inputs) != len(self._inputs):
            return None
        for gradient, alone in zip(inputs, self._inputs, strict=True):
            self._compare(gradient, alone)
        return not self._differs

    def _compare(self, whole: Tensor | None, alone: Tensor | None) -> None:
        whole, alone = (None if each is None else dense(each) for each in (whole, alone))
        if whole is None or alone is None:
            present = alone if whole is None else whole
            self._differs |= present is not None and bool(present.any())
        elif whole.numel():
            difference, size = float((whole - alone).abs().max()), float(whole.abs().max())
            self._differs |= not difference <= self._floor * size


def _consumed(calls: list[RecordedCall]) -> Iterator[RecordedCall]:
    """Yield the calls in order; free the tensors of a call's children after it."""
    calls.reverse()
    while calls:
        call = calls.pop()
        yield call
        call.children.clear()


@contextmanager
def comparable(models: ModelPair, flags: Mapping[str, bool]) -> Iterator[None]:
    """Set the modes of both models and disable dropout; restore them, and random numbers, afterwards."""
    with ExitStack() as stack:
        for model in (models.reference, models.prepared):
            stack.enter_context(unchanged(model))
            make_deterministic(model, flags)
        yield
