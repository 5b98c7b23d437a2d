"""Record what a contract checks: weights, layouts, breaks, casts, verification and time of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from prepare.core.forward.call import call_of
from prepare.core.forward.workload import for_each_size
from prepare.core.model.deep_copy import CopyError, copy_or_build
from prepare.core.model.module_kinds import class_before_repair
from prepare.core.model.tensors import is_strided, name_of, named_modules, named_tensors
from prepare.core.model.threads import with_threads
from prepare.core.utils.environment import environment
from prepare.core.utils.machine import disturbance
from prepare.core.utils.numbers import finite, is_wide
from prepare.core.utils.packages import version_of
from prepare.core.utils.suggest import choose
from prepare.errors import ConfigError, RefusedError
from prepare.pipeline import Pipeline
from prepare.stages.contract.compare import compare
from prepare.stages.contract.records import Contract, ContractCheck, TimeRatio
from prepare.stages.flow import observe
from prepare.stages.flow.layouts import layout_of
from prepare.stages.flow.operator_watcher import CastWatcher
from prepare.stages.verify.inputs import user_call, user_formatter

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from prepare.core.forward.autocast import Amp
    from prepare.stages.flow.records import Flow
    from prepare.stages.verify.records import Verification

_PACKAGES = ("torch", "monai", "diffusers", "transformers", "timm", "torchvision",
    "dynamic-network-architectures")  # fmt: skip
_SECONDS = 9.0
_SAME, _OTHER = "in the layout of its parameter", "in another layout than its parameter"
_MODES = ("eval", "train")
Recipe = Pipeline | Mapping[str, Any] | str | Path


def record(
    model: nn.Module,
    batch: Any,
    recipe: Recipe | None = None,
    *,
    mode: Literal["eval", "train"] = "eval",
    amp: Amp = "none",
    optimizer: Optimizer | None = None,
    threads: int | None = None,
    time: bool = False,
) -> Contract:
    """Return the contract of a model: its structure, strides, breaks, casts and the error of its results.

    Args:
        model: not changed. With a recipe, copies of it are prepared and verified against it; without one
            the model itself is looked at, as it was prepared before, and nothing is verified.
        batch: a tensor, a tuple of positional or a mapping of named arguments, or an Example; or a Workload,
            to record every size of it.
        recipe: the steps, `{name: options}`, or the path of a recipe.
        mode: the mode in which the model runs; `train` also follows the gradients.
        amp: run the forward under `torch.autocast` to this dtype.
        optimizer: of the model, without a recipe: the layouts of its state are recorded too.
        threads: the number of threads of torch, on which the layouts of some kernels depend.
        time: also measure the time relative to the unprepared model, with its interval; needs a recipe.

    Raises:
        ConfigError: the recipe is wrong, or `time` or `optimizer` does not go with it.
        ModelError: the forward or backward raised.
    """
    _check_arguments(recipe, mode, optimizer, time=time)
    how: dict[str, Any] = {"mode": mode, "amp": amp, "threads": threads}
    if recipe is None:
        flags = {module: module.training for module in model.modules()}
        model.train(mode == "train")
        try:
            return observe_contract(model, batch, **how, optimizer=optimizer)
        finally:
            for module, flag in flags.items():
                module.training = flag
    if isinstance(recipe, str | Path):
        recipe = Pipeline.load(recipe)
    pipeline = recipe if isinstance(recipe, Pipeline) else Pipeline.from_config(recipe)
    pipeline.warn_of_left_out()
    try:
        reference, prepared = (copy_or_build(model).train(mode == "train") for _ in range(2))
    except CopyError as error:
        remedy = "prepare it, and record it without a recipe"
        raise RefusedError("model", f"cannot be copied: {error}", remedy) from error
    # The contract holds the numbers; a known issue shows in its verification.
    pipeline.apply(prepared, known_issues="ignore")
    how |= {"pipeline": pipeline, "reference": reference, "time": time}
    return observe_contract(prepared, batch, **how)


def check(
    model: nn.Module,
    batch: Any,
    contract: Contract,
    recipe: Recipe | None = None,
    *,
    optimizer: Optimizer | None = None,
) -> ContractCheck:
    """Compare a model of today with a contract, in the contract's mode and number of threads.

    `recipe` is that of the contract by default, which may set only what is harmless (see
    `Pipeline.from_recipe`); one that differs from it breaks the contract. The time is
    measured again if the contract has one. A change of a library's version alone breaks nothing.

    Raises:
        ConfigError: the recipe is wrong, or has no effect on this model.
        ModelError: the forward or backward raised.
    """
    if recipe is None and contract.steps is not None:
        recipe = Pipeline.from_recipe(contract.steps)
    today = record(
        model,
        batch,
        recipe,
        mode=contract.mode,  # type: ignore[arg-type]
        amp=contract.amp,  # type: ignore[arg-type]
        optimizer=optimizer,
        threads=contract.threads,
        time=contract.is_timed,
    )
    return compare(contract, today)


@for_each_size("batch")
def observe_contract(
    prepared: nn.Module,
    batch: Any,
    *,
    mode: str,
    amp: Amp = "none",
    pipeline: Pipeline | None = None,
    reference: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    threads: int | None = None,
    time: bool = False,
) -> Contract:
    """Return the contract that `prepared` keeps now; it is in the mode `mode`, and is not changed.

    `threads` is the number for torch while the layouts are observed: kernels depend on it. Without a
    `reference` nothing is verified and timed.
    """
    call = call_of(batch)
    if pipeline is not None:
        call = user_call(call, prepared, pipeline)
    watcher = CastWatcher(prepared)
    with with_threads(threads or torch.get_num_threads()), watcher:
        flow = observe(prepared, call, backward=mode == "train", amp=amp)
    verification, time_ratio, untimed = None, None, ""
    if time and reference is None:
        untimed = "not measured: there is no copy of the unprepared model"
    if reference is not None:
        from prepare.stages.verify import verify

        verification = verify(reference, prepared, batch, pipeline=pipeline, mode=mode, amp=amp)  # type: ignore[arg-type]
        if time:
            time_ratio, untimed = _time(reference, prepared, batch, pipeline, mode=mode, amp=amp)
    places: dict[str, Counter[str]] = {}
    sources: dict[str, str] = {}
    for module, what, count, source in _places(flow, watcher):
        places.setdefault(module, Counter())[what] += count
        sources[f"{module}: {what}"] = source
    return Contract(
        model=type(prepared).__name__,
        mode=mode,
        amp=amp,
        steps=None if pipeline is None else pipeline.to_recipe(),
        threads=threads or torch.get_num_threads(),
        seen={name: found for name in _PACKAGES if (found := version_of(name))},
        # Another version of torch may need no repair.
        modules={n: class_before_repair(type(m)).__name__ for n, m in named_modules(prepared)},
        weights={each.path: _described(each.tensor) for each in named_tensors(prepared)},
        layouts=_layouts(flow),
        flow={module: dict(counts) for module, counts in places.items()},
        sources=sources,
        verified="" if verification is None else verification.status,
        errors=dict(_errors(verification)),
        optimizer={} if optimizer is None else dict(_states(prepared, optimizer)),
        time=time_ratio,
        untimed=untimed,
    )


def _described(tensor: Tensor) -> str:
    """Return shape, strides, layout, dtype and type of device, with spaces between them."""
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    strides = ",".join(map(str, tensor.stride())) if is_strided(tensor) else str(tensor.layout)
    layout = layout_of(tensor) if is_strided(tensor) else "none"
    return f"{shape} {strides or '-'} {layout} {name_of(tensor.dtype)} {tensor.device.type}"


def _layouts(flow: Flow) -> dict[str, str]:
    """Return the layout of the outputs of each convolution; of several, one that is not wanted."""
    kept = {*flow.wanted.values(), "ambiguous"}
    layouts: dict[str, str] = {}
    for row in flow.convolutions:
        if layouts.get(row.module, "ambiguous") in kept:
            layouts[row.module] = row.output
    return layouts


def _places(flow: Flow, watcher: CastWatcher) -> Iterator[tuple[str, str, int, str]]:
    """Yield the module of each break and cast, what it is, its number and its line of code."""
    for each in flow.events:
        if each.kind == "break":
            what = f"{each.kind} in {each.phase}: {each.cause}"
            yield each.module, what, each.count, each.source
    for site, count in watcher.counts.items():
        yield site.module, f"cast in forward: {site.dtypes}", count, site.source


def _errors(verification: Verification | None) -> Iterator[tuple[str, float]]:
    for check in verification.checks if verification else ():
        if (part := finite(check.part)) is not None:
            yield f"{check.what}{f' ({check.inputs})' if check.inputs else ''}", part


def _states(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, str]]:
    """Yield the name and the layout of each tensor of an optimizer's state that has a parameter's shape."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, tensor in state.items():
            if isinstance(tensor, Tensor) and tensor.shape == parameter.shape and tensor.dim():
                same = tensor.stride() == parameter.stride()
                name = names.get(id(parameter), "a parameter of another model")
                yield f"{key} of {name}", _SAME if same else _OTHER


def _time(
    reference: nn.Module,
    prepared: nn.Module,
    batch: Any,
    pipeline: Pipeline | None,
    *,
    mode: str,
    amp: Amp,
) -> tuple[TimeRatio | None, str]:
    """Return the ratio of times, or, if it is noise, why it is not recorded."""
    from prepare.stages.bench import compare

    formatter = None if pipeline is None else user_formatter(pipeline)
    comparison = compare(
        {"unprepared": reference, "prepared": prepared},
        batch,
        train=mode == "train",
        amp=amp,
        budget=_SECONDS,
        format={"prepared": formatter} if formatter else {},
    )
    row = comparison.row("prepared")
    if row.ratio is None or row.ratio_interval is None:
        return None, row.reason or "it has no interval"
    low, high = row.ratio_interval
    disturbed = disturbance(comparison.settings)
    if disturbed or is_wide(row.ratio_interval):
        return None, f"{low:.2f} to {high:.2f} times as long: {disturbed or 'too wide an interval'}"
    where = environment()
    threads = f"{comparison.settings.get('threads', where['threads'])} threads"
    processor = where["cpu"] or "a processor without a name"
    machine = ", ".join([processor, threads, *where["devices"]])
    return TimeRatio(ratio=row.ratio, low=low, high=high, machine=machine), ""


def _check_arguments(recipe: Any, mode: str, optimizer: Optimizer | None, *, time: bool) -> None:
    if mode not in _MODES:
        raise ConfigError("mode", f"{mode!r} is not a mode", choose(mode, _MODES))
    if time and recipe is None:
        wrong = "needs a recipe: the time is relative to the unprepared model"
        raise ConfigError("time", wrong, "give recipe, or leave time out")
    if optimizer is not None and recipe is not None:
        wrong = "belongs to the model, and a recipe is applied to a copy of it"
        raise ConfigError(
            "optimizer", wrong, "apply the recipe to the model, and give no recipe here"
        )
