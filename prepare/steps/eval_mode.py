"""Puts modules in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from prepare.errors import Problem
from prepare.patterns import Patterns
from prepare.registry import register
from prepare.step import ModuleStep

if TYPE_CHECKING:
    import torch


@register("eval_mode")
class EvalMode(ModuleStep):
    """Puts modules in evaluation mode: all of them, or with `include` and `exclude` some.

    Sets `training` of each module, and calls no `train()` or `eval()` that a model has written itself.
    The command line calls `model.eval()` anyway, unless mode=train; there, and in training code, this
    step is for a part: `include: [norms]` freezes the running statistics of every norm. The whole
    model in evaluation mode, and mode=train, contradict each other and are an error.
    Helps: fine-tuning with small batches, whose statistics would spoil those of a pretrained norm.
    Hurts: `model.train()`, which many training loops call at every epoch, takes it back: apply again
    after it. A frozen norm still trains its weight and bias.
    Source: `torch.nn.Module.eval`.
    """

    keeps_tensors: ClassVar[bool] = True
    include: Patterns = ()
    exclude: Patterns = ()

    def in_training(self) -> Iterable[Problem]:
        if not self.include and not self.exclude:
            yield Problem(
                f"steps.{self.name}",
                "puts the whole model in evaluation mode, and mode=train is for training",
                "choose mode=eval, or name a part of the model, as in steps.eval_mode.include=[norms]",
            )

    def targets(self, model: torch.nn.Module) -> Iterator[str]:
        return (name for name, module in model.named_modules() if module.training)

    def rewrite(self, model: torch.nn.Module, name: str) -> Mapping[str, torch.nn.Module]:
        module = model.get_submodule(name)
        module.training = False
        return {name: module}
