"""The repair of convolutions whose weight is computed before each forward: it comes out channels-last."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from prepare.core.model.repair_marker import mark_repair
from prepare.core.model.tensors import computed_names, weight_hooks
from prepare.steps.repairs.base import FORMATS, Repair

_CONVOLUTIONS = {
    4: (nn.Conv2d, nn.ConvTranspose2d),
    5: (nn.Conv3d, nn.ConvTranspose3d),
}


class LaidOut(nn.Module):
    """A parametrization, the last of a convolution's weight, that lays out what those before it computed.

    Helps: weight_norm, spectral_norm and others give a contiguous weight, however its originals lie.
    Hurts: the weight is copied in each forward, or once in `parametrize.cached()`.
    Source: a parametrization without state; the keys of `state_dict` are the same.
    """

    def forward(self, weight: Tensor) -> Tensor:
        return _laid_out(weight)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What is assigned to the weight goes to those before as it is."""
        return weight


@mark_repair
class LaysOut:
    """A hook before forward that lays out what torch's older hooks (weight_norm, pruning) computed.

    Helps and hurts: as `LaidOut`. Once the others are removed it does nothing.
    """

    name = "weight"

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.name not in module._parameters:
            module.weight = _laid_out(module.weight)


class _ComputedWeight(Repair):
    """Adds one parametrization, or one hook, after those that compute a convolution's weight."""

    name = "computed_weight"

    def fits(self, module: nn.Module) -> bool:
        convolution = bool(self.ranks(module))
        return convolution and "weight" in computed_names(module) and not self.is_repaired(module)

    def ranks(self, module: nn.Module) -> tuple[int, ...]:
        return tuple(rank for rank, classes in _CONVOLUTIONS.items() if isinstance(module, classes))

    def repair(self, module: nn.Module, formats: Mapping[int, str]) -> None:
        self.undo(module)  # where others were added since
        if parametrize.is_parametrized(module, "weight"):
            module.parametrizations.weight.append(LaidOut().train(module.training))
        else:
            module.register_forward_pre_hook(LaysOut())

    def is_repaired(self, module: nn.Module) -> bool:
        if parametrize.is_parametrized(module, "weight"):
            return type(module.parametrizations.weight[-1]) is LaidOut
        hooks = [hook for hook, name in weight_hooks(module) if name == "weight"]
        return bool(hooks) and type(hooks[-1]) is LaysOut

    def undo(self, module: nn.Module) -> None:
        if parametrize.is_parametrized(module, "weight"):
            steps = module.parametrizations.weight
            for place in reversed(range(len(steps))):
                if type(steps[place]) is LaidOut:
                    del steps[place]
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if type(hook) is LaysOut]:
            del hooks[key]


REPAIR = _ComputedWeight()


def _laid_out(weight: Tensor) -> Tensor:
    return weight.to(memory_format=FORMATS[weight.dim()])
