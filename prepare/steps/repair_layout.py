"""Repair modules that lose a channels-last layout, or compute wrong results in it, with this torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Self

from prepare.patterns import Patterns
from prepare.registry import register
from prepare.step import ModuleStep, Step
from prepare.steps import repairs
from prepare.steps._convolution import ConvolutionFormat
from prepare.steps.device import Device

if TYPE_CHECKING:
    import torch

    from prepare.steps.repairs.base import Repair

_CHANNELS_LAST = {4: "channels_last", 5: "channels_last_3d"}


def undo(model: torch.nn.Module) -> None:
    """Undo the repair of every module of `model`, in place."""
    for module in list(model.modules()):
        while repair := next((repair for repair in _all() if repair.is_repaired(module)), None):
            repair.undo(module)


@register("repair_layout")
class RepairLayout(ModuleStep):
    """Makes norms, pooling, softmax and some convolutions keep a channels-last layout, correct and fast.

    Repairs the modules that are known to be wrong or slow on the pipeline's device (or else the model's)
    with this torch, for the ranks whose convolutions are in channels-last in the pipeline (or else in the
    model). A repaired module keeps its identity, hooks and state_dict: its class becomes a subclass of its
    own class, named `Keeping...` (`KeepingConv3d`) because it keeps the layout of its input. Contiguous
    inputs run torch's own code, except in 3-d convolutions whose weight gradients would be garbage in
    training. Modules of a user's subclass are not changed.
    Helps: networks with instance norm (nnU-Net, MONAI): on a CPU, without it, their gradients are wrong
    at batch 1, and every norm copies its input; group norm on a CPU loses all digits far from 0. Large
    convolutions with few output pixels (the last stages of a ResNet at batch 1) no longer copy their weight.
    Hurts: a small activation is copied to contiguous and back, which for group norm costs several
    times torch's (inexact) kernel. TorchScript cannot compile a repaired norm. To undo all repairs:
    `from prepare.steps import repair_layout; repair_layout.undo(model)`.
    Source: pytorch#59168, #113437; `prepare/core/model/known_issues.yaml` has the evidence.
    """

    keeps_tensors: ClassVar[bool] = True
    include: Patterns = ()
    exclude: Patterns = ()
    force: bool = False
    """Apply every repair, whatever the device, and whatever the format of the convolutions."""

    # Values of the other steps of the pipeline, set by `bind`; these are not options.
    _device: ClassVar[str | None] = None
    _formats_by_rank: ClassVar[Mapping[int, str]] = {}

    def bind(self, steps: Iterable[Step]) -> Self:
        bound = dataclasses.replace(self)
        for step in steps:
            if isinstance(step, Device):
                object.__setattr__(bound, "_device", step.device)
            elif isinstance(step, ConvolutionFormat):
                formats = {**bound._formats_by_rank, step.spatial + 2: step.memory_format}
                object.__setattr__(bound, "_formats_by_rank", formats)
        return bound

    def candidates(self, model: torch.nn.Module) -> Iterator[str]:
        for name, module in model.named_modules(remove_duplicate=False):
            if any(repair.fits(module) or repair.is_repaired(module) for repair in _all()):
                yield name

    def targets(self, model: torch.nn.Module) -> Iterator[str]:
        formats, useful = self._formats(model), self._useful(model)
        for name, module in model.named_modules():
            if any(_applies(repair, module, formats) for repair in useful):
                yield name

    def rewrite(self, model: torch.nn.Module, name: str) -> Mapping[str, torch.nn.Module]:
        module, formats = model.get_submodule(name), self._formats(model)
        for repair in self._useful(model):
            if _applies(repair, module, formats):
                repair.repair(module, formats)
        return {name: module}

    def _useful(self, model: torch.nn.Module) -> tuple[Repair, ...]:
        """Return the repairs of known issues of this device and torch; with `force`, all repairs."""
        from prepare.core.model.known_issues import standing

        if self.force:
            return _all()
        names = {issue.repair for issue in standing(self._device or _device_of(model))}
        return tuple(repair for repair in _all() if repair.name in names)

    def _formats(self, model: torch.nn.Module) -> dict[int, str]:
        """Return the ranks that are, or will be, in channels-last, and the format; with `force`, both."""
        return {
            rank: last
            for rank, last in _CHANNELS_LAST.items()
            if self.force or self._formats_by_rank.get(rank) == last
            or (rank not in self._formats_by_rank and _has_weights_in(model, rank, last))
        }  # fmt: skip


@cache
def _all() -> tuple[Repair, ...]:
    return tuple(repairs.find_repair(name) for name in repairs.repair_names())


def _applies(repair: Repair, module: torch.nn.Module, formats: Mapping[int, str]) -> bool:
    return repair.fits(module) and not formats.keys().isdisjoint(repair.ranks(module))


def _device_of(model: torch.nn.Module) -> str:
    tensors = (tensor for each in (model.parameters(), model.buffers()) for tensor in each)
    return next((tensor.device.type for tensor in tensors), "cpu")


def _has_weights_in(model: torch.nn.Module, rank: int, memory_format: str) -> bool:
    """Return whether a weight has exactly the strides of this format, and not those of contiguous too."""
    from torch import nn

    from prepare.core.model.memory_format import canonical_stride
    from prepare.core.model.tensors import is_lazy, is_strided

    classes = {4: (nn.Conv2d, nn.ConvTranspose2d), 5: (nn.Conv3d, nn.ConvTranspose3d)}[rank]
    for module in model.modules():
        # Read Parameters only: reading a computed weight may change its source tensors.
        weight = module._parameters.get("weight") if isinstance(module, classes) else None
        if weight is None or is_lazy(weight) or not is_strided(weight) or weight.dim() != rank:
            continue
        stride = canonical_stride(weight.shape, memory_format)
        if weight.stride() == stride != canonical_stride(weight.shape, "contiguous"):
            return True
    return False
