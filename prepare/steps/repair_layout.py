"""Repair modules that lose a channels-last layout, or compute wrong results in it, with this torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prepare.registry import register
from prepare.steps.conv_memory_format import SwapsClasses
from prepare.steps.device import ForDevice
from prepare.steps.repairs import all_repairs

if TYPE_CHECKING:
    import torch

    from prepare.steps.repairs.base import SwapClass


@register("repair_layout")
class RepairLayout(ForDevice, SwapsClasses):
    """Makes norms, pooling, softmax and some convolutions keep a channels-last layout, correct and fast.

    Repairs the modules that are known to be wrong or slow on the pipeline's device (or else the model's)
    with this torch, for the ranks whose convolutions are in channels-last in the pipeline (or else in the
    model). A repaired module keeps its identity, hooks and state_dict: its class becomes a subclass of its
    own class, named `Keeping...` (`KeepingConv3d`) because it keeps the layout of its input. Contiguous
    inputs run torch's own code, except in 3-d convolutions whose weight gradients would be garbage in
    training. A module of a user's subclass is repaired if its own forward runs torch's (`super().forward(x)`,
    as in the decoders of videos), and one with a forward on the instance (hooks of accelerate and diffusers)
    if that reaches the repair; else it stays a known issue, and the plan names the code that runs.
    Helps: networks with instance norm (nnU-Net, MONAI): on a CPU, without it, their gradients are wrong
    at batch 1, and every norm copies its input; group norm on a CPU loses all digits far from 0. Large
    convolutions with few output pixels (the last stages of a ResNet at batch 1) no longer copy their weight.
    Decoders of one video on a CPU (Wan) leave torch's reference kernel.
    Hurts: a small activation is copied to contiguous and back, which for group norm costs several
    times torch's (inexact) kernel. TorchScript cannot compile a repaired norm. To undo all repairs:
    `from prepare.steps import repair_layout; repair_layout.undo(model)`.
    Source: pytorch#59168, #113437; `prepare/core/model/known_issues.yaml` has the evidence.
    """

    exact: bool = False
    """Also repair what only has fewer digits in channels-last, which costs time (batch norms)."""
    force: bool = False
    """Apply every repair, whatever the device, and whatever the format of the convolutions."""

    @classmethod
    def swaps(cls) -> Collection[SwapClass]:
        return all_repairs().values()

    def targets(self, model: torch.nn.Module) -> Iterator[str]:
        formats, useful = self.formats(model, force=self.force), self._useful(model)
        for name, module in model.named_modules():
            if any(_applies(repair, module, formats) for repair in useful):
                yield name

    def rewrites(
        self, model: torch.nn.Module, names: Iterable[str]
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Repair all modules in `names` for the formats that are found once."""
        formats, useful = self.formats(model, force=self.force), self._useful(model)
        for name in names:
            module = model.get_submodule(name)
            for repair in useful:
                if _applies(repair, module, formats):
                    repair.repair(module, formats)
            yield name, module

    def _useful(self, model: torch.nn.Module) -> tuple[SwapClass, ...]:
        """Return the repairs of known issues of this device and torch; with `force`, all repairs."""
        from prepare.core.model.known_issues import standing

        if self.force:
            return tuple(all_repairs().values())
        names = {
            issue.repair
            for issue in standing(self.device_of(model))
            if self.exact or issue.effect != "inexact"
        }
        return tuple(repair for repair in all_repairs().values() if repair.name in names)


undo = RepairLayout.undo


def _applies(repair: SwapClass, module: torch.nn.Module, formats: Mapping[int, str]) -> bool:
    return repair.fits(module) and not formats.keys().isdisjoint(repair.ranks(module))
