"""Repair modules that lose a channels-last layout, or compute wrong results in it, with this torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from prepare.patterns import Patterns
from prepare.registry import register
from prepare.steps import repairs
from prepare.steps._convolution import ForChannelsLast
from prepare.steps.device import ForDevice

if TYPE_CHECKING:
    import torch

    from prepare.steps.repairs.base import Repair


@register("repair_layout")
class RepairLayout(ForDevice, ForChannelsLast):
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

    keeps_tensors: ClassVar[bool] = True
    include: Patterns = ()
    exclude: Patterns = ()
    exact: bool = False
    """Also repair what only has fewer digits in channels-last, which costs time (batch norms)."""
    force: bool = False
    """Apply every repair, whatever the device, and whatever the format of the convolutions."""

    def candidates(self, model: torch.nn.Module) -> Iterator[str]:
        for name, module in model.named_modules(remove_duplicate=False):
            if any(repair.fits(module) or repair.is_repaired(module) for repair in _all()):
                yield name

    @classmethod
    def undo(cls, model: torch.nn.Module) -> None:
        """Undo the repair of every module of `model`, in place."""
        for module in list(model.modules()):
            while repair := next((repair for repair in _all() if repair.is_repaired(module)), None):
                repair.undo(module)

    @classmethod
    def follow(cls, model: torch.nn.Module, reference: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            same = reference.get_submodule(name)
            for repair in _all():
                if repair.is_repaired(same) and repair.fits(module):
                    repair.repair(module, {4: "channels_last", 5: "channels_last_3d"})

    def targets(self, model: torch.nn.Module) -> Iterator[str]:
        formats, useful = self.formats(model, force=self.force), self._useful(model)
        for name, module in model.named_modules():
            if any(_applies(repair, module, formats) for repair in useful):
                yield name

    def rewrite(self, model: torch.nn.Module, name: str) -> Mapping[str, torch.nn.Module]:
        return dict(self.rewrites(model, (name,)))

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

    def _useful(self, model: torch.nn.Module) -> tuple[Repair, ...]:
        """Return the repairs of known issues of this device and torch; with `force`, all repairs."""
        from prepare.core.model.known_issues import standing

        if self.force:
            return _all()
        names = {
            issue.repair
            for issue in standing(self.device_of(model))
            if self.exact or issue.effect != "inexact"
        }
        return tuple(repair for repair in _all() if repair.name in names)


undo = RepairLayout.undo


@cache
def _all() -> tuple[Repair, ...]:
    return tuple(repairs.find_repair(name) for name in repairs.repair_names())


def _applies(repair: Repair, module: torch.nn.Module, formats: Mapping[int, str]) -> bool:
    return repair.fits(module) and not formats.keys().isdisjoint(repair.ranks(module))
