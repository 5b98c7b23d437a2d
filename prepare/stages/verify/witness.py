"""Ask finite differences in float64 whether the gradients of the unprepared model, as it is, are wrong.

Asked only where a known issue of wrong gradients holds for a module of it, and where its gradients differ
from those of the exact run, in which norms get contiguous tensors.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from prepare.core.model.call_issues import formats_of
from prepare.core.model.forward_code import forward_code
from prepare.core.model.issue_sizes import SIZES
from prepare.core.model.known_issues import Issue, standing
from prepare.core.model.module_kinds import CONVOLUTIONS_2D_3D
from prepare.core.model.tensors import is_plain, name_of
from prepare.stages.verify.execution.single_run import (
    cast,
    random_gradient,
    run_model,
    same_stand_in,
)
from prepare.stages.verify.tolerance import dense

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prepare.core.forward.call import Call
    from prepare.stages.verify.execution.runner import Runner, RunResults
    from prepare.stages.verify.execution.single_run import RunResult

_DIRECTIONS, _STEP = 3, 1e-6
# Gradients differ if they do by more than the first part of their largest number, and the right ones fit so
# much better as the second says. Less than the third part of the
# largest of all is rounding, as that of a bias before a norm.
_DIFFERENT, _BETTER, _NEGLIGIBLE = 1e-3, 0.1, 1e-6


def issue_of_gradients(runner: Runner, call: Call, results: RunResults) -> Issue | None:
    """Return the known issue by which the unprepared model's own gradients are wrong; None if they are not.

    `results` are those of `call`, with an exact run in float64.
    """
    issue = _possible(runner, call)
    if issue is None or runner.budget.refuses(runner.cost, torch.float64):
        return None
    if _is_as_baseline(runner, call, results):
        return None
    model, doubled = runner.models.reference, call.map(_doubled)
    run = partial(run_model, model, flags=runner.flags, dtype=torch.float64)
    own = _gradients(run(doubled, _double_stand_in, frozen_inputs=True))
    exact = _gradients(results.exact)
    sizes = {name: float(each.abs().max()) for name, each in exact.items() if each.numel()}
    least = _NEGLIGIBLE * max(sizes.values(), default=0.0)
    different = {
        name: (right, gradient)
        for name, right in exact.items()
        if sizes.get(name, 0.0) > least
        and (gradient := own.get(name)) is not None and _differ(right, gradient)
    }  # fmt: skip
    parameters = dict(model.named_parameters())
    errors = [0.0, 0.0]
    for seed in range(_DIRECTIONS if different else 0):
        generator = torch.Generator().manual_seed(seed)
        direction, slopes = {}, [0.0, 0.0]
        for name, pair in different.items():
            step = torch.randn(pair[0].shape, generator=generator, dtype=torch.float64)
            step /= pair[0].double().norm().cpu() or 1.0
            direction[id(parameters[name])] = step
            slopes = [
                slope + float((step * each.cpu().double()).sum())
                for slope, each in zip(slopes, pair, strict=True)
            ]
        ahead, back = (
            _loss(run(call.map(_contiguous), partial(_moved, direction, sign), backward=False))
            for sign in (_STEP, -_STEP)
        )
        measured = (ahead - back) / (2 * _STEP)
        errors = [error + abs(measured - s) for error, s in zip(errors, slopes, strict=True)]
    return issue if different and errors[0] < _BETTER * errors[1] else None


def _is_as_baseline(runner: Runner, call: Call, results: RunResults) -> bool:
    """Return whether the model as it is has the gradients of the baseline, whose norms are contiguous.

    That can be told in the dtype of the unprepared model only, where both run the same kernels.
    """
    models = runner.models
    dtypes = {each.dtype for each in models.reference.parameters()}
    if dtypes != {models.dtype} or models.amp != "none" or not results.baseline:
        return False
    own = _gradients(
        run_model(models.reference, call, same_stand_in, flags=runner.flags, frozen_inputs=True)
    )
    baseline = _gradients(results.baseline[0])
    return own.keys() == baseline.keys() and not any(_differ(baseline[n], own[n]) for n in own)


def _gradients(result: RunResult) -> dict[str, Tensor]:
    return {name: dense(each) for name, each in result.parameters.items() if each is not None}


def _possible(runner: Runner, call: Call) -> Issue | None:
    """Return the first known issue of gradients that a module of the unprepared model may meet."""
    modules = dict(runner.models.reference.named_modules())
    # A computed weight is left out: reading one may change the tensors behind it.
    kept = (
        m._parameters.get("weight") for m in modules.values() if isinstance(m, CONVOLUTIONS_2D_3D)
    )
    weights = [weight for weight in kept if weight is not None]
    if any(each.device.type != "cpu" for each in runner.models.reference.parameters()):
        return None
    formats = {name for weight in weights for name in formats_of(weight)} or {"contiguous"}
    dtypes = {name_of(each.dtype) for each in runner.models.reference.parameters()}
    shape = (call.batch or 1,)
    for issue in standing("cpu"):
        if issue.effect != "wrong" or issue.part != "gradients":
            continue
        for operation in issue.operations:
            met = (
                runner.flags.get(name) and isinstance(m, getattr(nn, operation)) and _is_near(issue, m, shape)
                for name, m in modules.items()
            )  # fmt: skip
            if issue.concerns(operation, formats, dtypes) and any(met):
                return issue
    return None


def _is_near(issue: Issue, module: nn.Module, shape: tuple[int, ...]) -> bool:
    if forward_code(module).repaired:
        return False
    return not issue.sizes or SIZES[issue.sizes].holds(module, shape) is not False


def _differ(right: Tensor, gradient: Tensor) -> bool:
    if not right.numel():
        return False
    return not (right - gradient).abs().max() <= _DIFFERENT * right.abs().max()


def _loss(result: RunResult) -> float:
    """Return the sum whose gradient a run computes: see `random_gradient`."""
    total = 0.0
    for seed, name in enumerate(result.roots):
        out = result.outputs[name]
        if out is not None and out.numel():
            total += float((out * random_gradient(out, seed)).sum())
    return total


def _doubled(tensor: Tensor) -> Tensor:
    """Return a copy in float64 with the same strides; other numbers are kept."""
    is_real = is_plain(tensor) and tensor.is_floating_point()
    return tensor.detach().to(torch.float64, copy=True) if is_real else tensor


def _contiguous(tensor: Tensor) -> Tensor:
    return cast(tensor.detach(), torch.float64)


def _double_stand_in(tensor: Tensor) -> Tensor:
    if not is_plain(tensor) or not tensor.is_floating_point():
        return same_stand_in(tensor)
    values = _doubled(tensor)
    return (
        nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
    )


def _moved(direction: Mapping[int, Tensor], step: float, tensor: Tensor) -> Tensor:
    values = cast(tensor, torch.float64)
    if (change := direction.get(id(tensor))) is not None:
        with torch.no_grad():
            values.add_(change.to(values.device), alpha=step)
    return values
