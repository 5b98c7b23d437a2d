"""Repairs the modules that lose a channels-last layout, or that are wrong in it, on this device and torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Self

from prepare.patterns import Patterns
from prepare.registry import register
from prepare.step import ModuleStep, Step
from prepare.steps import repairs

if TYPE_CHECKING:
    import torch

    from prepare.steps.repairs.base import Repair

_CHANNELS_LAST = {4: "channels_last", 5: "channels_last_3d"}


def undo(model: torch.nn.Module) -> None:
    """Makes every repaired module of `model` what it was, in place."""
    for module in list(model.modules()):
        while found := next((repair for repair in _all() if repair.is_repaired(module)), None):
            found.undo(module)


@register("repair_layout")
class RepairLayout(ModuleStep):
    """Makes norms, pooling, softmax and some convolutions keep a channels-last layout, rightly and quickly.

    Repairs what is known to be wrong or slow on the pipeline's device (else the model's) with this
    torch, for the ranks whose convolutions the pipeline, or else the model, has in channels-last. A
    module keeps its identity, hooks and state_dict: it gets a subclass of its own class. Contiguous
    inputs go through torch's own code, but for those 3-d convolutions in training whose weight gradients
    are garbage without it. Modules of a user's subclass are left alone.
    Helps: networks with instance norm (nnU-Net, MONAI): on a CPU their gradients are wrong at batch
    1 without it, and every norm copies its input; group norm on a CPU loses all digits far from 0. Large
    convolutions that give few pixels (the last stages of a ResNet at batch 1) copy no weight there.
    Hurts: a small activation is copied to contiguous and back, which for group norm costs several
    times torch's (inexact) kernel. TorchScript cannot compile a repaired norm. To take it all back:
    `from prepare.steps import repair_layout; repair_layout.undo(model)`.
    Source: pytorch#59168, #113437; `prepare/core/model/known_issues.yaml` has the evidence.
    """

    keeps_tensors: ClassVar[bool] = True
    include: Patterns = ()
    exclude: Patterns = ()
    force: bool = False
    """Repairs all that can be, known on this device or not, and in whatever format convolutions are."""

    # What the other steps of the pipeline say, once it is bound to them; no options.
    _device: ClassVar[str | None] = None
    _asked: ClassVar[Mapping[int, str]] = {}

    def bind(self, steps: Iterable[Step]) -> Self:
        bound = dataclasses.replace(self)
        for step in steps:
            if step.name == "device":
                object.__setattr__(bound, "_device", step.device)
            elif hasattr(step, "spatial"):
                asked = {**bound._asked, step.spatial + 2: step.memory_format}
                object.__setattr__(bound, "_asked", asked)
        return bound

    def candidates(self, model: torch.nn.Module) -> Iterator[str]:
        for name, module in model.named_modules(remove_duplicate=False):
            if any(repair.fits(module) or repair.is_repaired(module) for repair in _all()):
                yield name

    def targets(self, model: torch.nn.Module) -> Iterator[str]:
        formats, known = self._formats(model), self._known(model)
        for name, module in model.named_modules():
            if any(_helps(repair, module, formats) for repair in known):
                yield name

    def rewrite(self, model: torch.nn.Module, name: str) -> Mapping[str, torch.nn.Module]:
        module, formats = model.get_submodule(name), self._formats(model)
        for repair in self._known(model):
            if _helps(repair, module, formats):
                repair.repair(module, formats)
        return {name: module}

    def _known(self, model: torch.nn.Module) -> tuple[Repair, ...]:
        """The repairs of what is known of this device and torch; with `force` every one."""
        from prepare.core.model.known_issues import standing

        if self.force:
            return _all()
        named = {issue.repair for issue in standing(self._device or _device_of(model))}
        return tuple(repair for repair in _all() if repair.name in named)

    def _formats(self, model: torch.nn.Module) -> dict[int, str]:
        """The ranks that are, or will be, in channels-last; with `force` both."""
        return {
            rank: wanted
            for rank, wanted in _CHANNELS_LAST.items()
            if self.force or self._asked.get(rank) == wanted
            or (rank not in self._asked and _has_weights_in(model, rank, wanted))
        }  # fmt: skip


@cache
def _all() -> tuple[Repair, ...]:
    return tuple(repairs.find_repair(name) for name in repairs.repair_names())


def _helps(repair: Repair, module: torch.nn.Module, formats: Mapping[int, str]) -> bool:
    return repair.fits(module) and not formats.keys().isdisjoint(repair.ranks(module))


def _device_of(model: torch.nn.Module) -> str:
    tensors = (tensor for each in (model.parameters(), model.buffers()) for tensor in each)
    return next((tensor.device.type for tensor in tensors), "cpu")


def _has_weights_in(model: torch.nn.Module, rank: int, memory_format: str) -> bool:
    """Whether a convolution's weight has exactly the strides of this format, and not of contiguous too."""
    from torch import nn

    from prepare.core.model.memory_format import canonical_stride
    from prepare.core.model.tensors import is_lazy, is_strided

    kinds = {4: (nn.Conv2d, nn.ConvTranspose2d), 5: (nn.Conv3d, nn.ConvTranspose3d)}[rank]
    for module in model.modules():
        # Only a Parameter: to ask for a computed weight may change what it is computed from.
        weight = module._parameters.get("weight") if isinstance(module, kinds) else None
        if weight is None or is_lazy(weight) or not is_strided(weight) or weight.dim() != rank:
            continue
        wanted = canonical_stride(weight.shape, memory_format)
        if weight.stride() == wanted != canonical_stride(weight.shape, "contiguous"):
            return True
    return False
