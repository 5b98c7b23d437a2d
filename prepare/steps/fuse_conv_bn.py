"""Fold batch norms into the convolutions before them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prepare.core.utils.text import EVAL_MODE, plural
from prepare.errors import Problem
from prepare.patterns import Patterns
from prepare.registry import register
from prepare.step import ModuleStep

if TYPE_CHECKING:
    import torch

_SHOWN = 3


# With these methods a network such as RepVGG makes one convolution of its branches, and of their norms.
_DEPLOY = ("switch_to_deploy", "convert_to_deploy", "reparameterize")


@register("fuse_conv_bn")
class FuseConvBn(ModuleStep):
    """Folds each batch norm into the convolution before it, if nothing else uses that output.

    For inference only. The convolution stays the same module and gets a new weight and bias, as new
    Parameters; an Identity replaces the norm. Patterns select norms. A symbolic trace of the model, or of
    the parts that can be traced, shows which norm directly follows which convolution. The plan's warnings
    list the norms that stay, and why: norms in training mode or without running statistics, modules that
    are used twice, tied, hooked or parametrized, and grouped transposed convolutions. A module whose forward
    has optional arguments is searched by its parts.
    Helps: inference with batch norm: saves one pass over every activation, and its memory.
    Hurts: the model cannot be trained afterwards, and `state_dict` has other keys: load checkpoints first.
    Code that reads the norm (`block.bn.weight`), or calls the convolution outside the traced forward, finds
    other values; the run's verification detects the latter.
    Source: `torch.nn.utils.fusion.fuse_conv_bn_weights`; Jacob et al. 2018, arXiv 1712.05877, 3.2.
    """

    include: Patterns = ()
    exclude: Patterns = ()

    def in_training(self) -> Iterable[Problem]:
        wrong = "is for inference: a norm that is part of a convolution cannot be trained"
        remedy = f"{EVAL_MODE}, or drop the step"
        yield Problem(f"steps.{self.name}", wrong, remedy)

    def candidates(self, model: torch.nn.Module) -> Iterator[str]:
        from prepare.steps._fusion import is_norm

        for name, module in model.named_modules(remove_duplicate=False):
            if is_norm(module):
                yield name

    def targets(self, model: torch.nn.Module) -> Iterator[str]:
        from prepare.steps._fusion import find_pairs

        return iter(find_pairs(model)[0])

    def rewrites(
        self, model: torch.nn.Module, names: Iterable[str]
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Fuse all pairs in `names` after a single search of the model."""
        from prepare.steps._fusion import fuse

        kinds = {type(module) for module in model.modules()}
        deploy = [f"{k.__name__}.{name}" for k in kinds for name in _DEPLOY if hasattr(k, name)]
        if deploy:
            wrong = f"{deploy[0]} reads the batch norms that are folded here"
            problem = Problem(f"steps.{self.name}", wrong, "call it first, then prepare")
            warnings.warn(str(problem), stacklevel=2)
        return fuse(model, names)

    def remarks(self, model: torch.nn.Module) -> Iterator[Problem]:
        from prepare.steps._fusion import find_pairs

        unfused = find_pairs(model)[1]
        for reason in dict.fromkeys(unfused.values()):
            names = [name for name, why in unfused.items() if why == reason]
            shown = f"{', '.join(names[:_SHOWN])}{' ...' if len(names) > _SHOWN else ''}"
            wrong = f"{plural(len(names), 'batch norm')} not fused ({shown}): {reason}"
            yield Problem(f"steps.{self.name}", wrong)
