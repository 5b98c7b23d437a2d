"""Observe what a contract checks: weights, layouts, breaks, casts, verification and time of a model."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.contract.records import Contract, Place, TimeRatio, Tolerance
from prepare.core.forward.call import call_of
from prepare.core.model.repair_marker import is_repair
from prepare.core.model.tensors import is_strided, name_of, named_modules, named_tensors
from prepare.core.model.threads import with_threads
from prepare.flow import observe
from prepare.flow.layouts import layout_of
from prepare.flow.operator_watcher import CastWatcher
from prepare.verify.inputs import user_call, user_formatter

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from prepare.core.forward.autocast import Amp
    from prepare.flow.records import Flow
    from prepare.pipeline import Pipeline
    from prepare.verify.records import Verification

_PACKAGES = ("torch", "monai", "diffusers", "transformers", "timm", "torchvision",
    "dynamic-network-architectures")  # fmt: skip
_SECONDS = 9.0
_SAME, _OTHER = "in the layout of its parameter", "in another layout than its parameter"


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
    verification: Verification | None = None,
    time: bool = False,
) -> Contract:
    """Return the contract that `prepared` keeps now; it is in the mode `mode`, and is not changed.

    `threads` is the number for torch while the layouts are observed: kernels depend on it. Without a
    `reference` nothing is verified and timed, except that `verification` may have been made before.
    """
    call = call_of(batch)
    if pipeline is not None:
        call = user_call(call, prepared, pipeline)
    watcher = CastWatcher(prepared)
    with with_threads(threads or torch.get_num_threads()), watcher:
        flow = observe(prepared, call, backward=mode == "train", amp=amp)
    if verification is None and reference is not None:
        from prepare.verify import verify

        verification = verify(reference, prepared, batch, pipeline=pipeline, mode=mode, amp=amp)  # type: ignore[arg-type]
    ratio = None
    if time and reference is not None:
        ratio = _time(reference, prepared, batch, pipeline, mode=mode, amp=amp)
    return Contract(
        model=type(prepared).__name__,
        mode=mode,
        amp=amp,
        steps=None if pipeline is None else pipeline.to_recipe(),
        threads=threads or torch.get_num_threads(),
        seen=_versions(),
        modules={name: _class_name(module) for name, module in named_modules(prepared)},
        weights={each.path: _described(each.tensor) for each in named_tensors(prepared)},
        layouts=_layouts(flow),
        places=tuple(_places(flow, watcher)),
        verified="" if verification is None else verification.status,
        tolerances=() if verification is None else tuple(_tolerances(verification)),
        optimizer={} if optimizer is None else dict(_states(prepared, optimizer)),
        time=ratio,
    )


def _class_name(module: nn.Module) -> str:
    """Return the name of the class; of a repaired module, that of the class that was repaired.

    Another version of torch may need no repair.
    """
    cls = type(module)
    return (cls.__mro__[1] if is_repair(cls) else cls).__name__


def _described(tensor: Tensor) -> str:
    """Return shape, strides, layout, dtype and type of device, with spaces between them."""
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    strides = ",".join(map(str, tensor.stride())) if is_strided(tensor) else str(tensor.layout)
    layout = layout_of(tensor) if is_strided(tensor) else "none"
    return f"{shape} {strides or '-'} {layout} {name_of(tensor.dtype)} {tensor.device.type}"


def _layouts(flow: Flow) -> dict[str, str]:
    """Return the layout of the outputs of each convolution; of several, one that is not wanted."""
    kept = {*flow.wanted.values(), "ambiguous"}
    found: dict[str, str] = {}
    for row in flow.convolutions:
        if found.get(row.module, "ambiguous") in kept:
            found[row.module] = row.output
    return found


def _places(flow: Flow, watcher: CastWatcher) -> Iterator[Place]:
    found: dict[tuple[str, str, str, str], Place] = {}
    places = [
        Place(kind="break", phase=each.phase, module=each.module, cause=each.cause,
              count=each.count, source=each.source)
        for each in flow.events
        if each.kind == "break"
    ]  # fmt: skip
    places += [
        Place(kind="cast", phase="forward", module=site.module, cause=site.dtypes, count=count,
              source=site.source)
        for site, count in watcher.counts.items()
    ]  # fmt: skip
    for place in places:
        known = found.get(place.key)
        count = place.count + (known.count if known else 0)
        found[place.key] = Place(kind=place.kind, phase=place.phase, module=place.module,
                                 cause=place.cause, count=count, source=place.source)  # fmt: skip
    yield from found.values()


def _tolerances(verification: Verification) -> Iterator[Tolerance]:
    for check in verification.checks:
        if check.error is not None and check.allowed is not None:
            inputs = f" ({check.inputs})" if check.inputs else ""
            yield Tolerance(what=f"{check.what}{inputs}", error=check.error, allowed=check.allowed)


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
) -> TimeRatio | None:
    from prepare.bench import compare
    from prepare.core.utils.environment import environment
    from prepare.core.utils.machine import disturbance

    formatter = None if pipeline is None else user_formatter(pipeline)
    found = compare(
        {"unprepared": reference, "prepared": prepared},
        batch,
        train=mode == "train",
        amp=amp,
        budget=_SECONDS,
        format={"prepared": formatter} if formatter else {},
    )
    row = found.row("prepared")
    if row.ratio is None or row.ratio_interval is None:
        return None
    where = environment()
    low, high = row.ratio_interval
    machine = f"{where['cpu']}, {found.settings.get('threads', where['threads'])} threads"
    return TimeRatio(ratio=row.ratio, low=low, high=high,
                     machine=", ".join([machine, *where["devices"]]),
                     disturbed=disturbance(found.settings))  # fmt: skip


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
