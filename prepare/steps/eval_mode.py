"""Put modules in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from prepare.core.utils.text import EVAL_MODE
from prepare.errors import Problem
from prepare.patterns import Patterns
from prepare.registry import register
from prepare.step import ModuleStep

if TYPE_CHECKING:
    import torch


@register("eval_mode")
class EvalMode(ModuleStep):
    """Puts modules in evaluation mode: all of them, or those that `include` and `exclude` select.

    Sets `training` of each module; does not call a `train()` or `eval()` that the model overrides. The
    command line calls `model.eval()` anyway, unless mode=train. With mode=train, and in training code,
    use this step for a part of the model: `include: [norms]` freezes the running statistics of every
    norm. The whole model in evaluation mode together with mode=train is an error.
    Helps: fine-tuning with small batches, whose statistics would degrade those of a pretrained norm.
    Hurts: `model.train()`, which many training loops call at every epoch, reverts it: apply again
    afterwards. A frozen norm still trains its weight and bias.
    Source: `torch.nn.Module.eval`.
    """

    keeps_tensors: ClassVar[bool] = True
    include: Patterns = ()
    exclude: Patterns = ()

    def in_training(self) -> Iterable[Problem]:
        if not self.include and not self.exclude:
            wrong = "puts the whole model in evaluation mode, and such a model is not trained"
            part = f"steps.{self.name}.include=[norms]"
            remedy = f"{EVAL_MODE}, or name a part of the model, as in {part}"
            yield Problem(f"steps.{self.name}", wrong, remedy)

    def targets(self, model: torch.nn.Module) -> Iterator[str]:
        return (name for name, module in model.named_modules() if module.training)

    def rewrite(self, model: torch.nn.Module, name: str) -> Mapping[str, torch.nn.Module]:
        module = model.get_submodule(name)
        module.training = False
        return {name: module}
