"""The repair of convolutions whose weight is computed before each forward: make it channels-last."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from prepare.core.model.module_kinds import mark_repair
from prepare.core.model.tensors import computed_names, weight_hooks
from prepare.steps.repairs.base import Repair, to_channels_last

_CONVOLUTIONS = {4: (nn.Conv2d, nn.ConvTranspose2d), 5: (nn.Conv3d, nn.ConvTranspose3d)}


class LaidOut(nn.Module):
    """The last parametrization of a convolution's weight: it makes the computed weight channels-last.

    Helps: weight_norm, spectral_norm and others return a contiguous weight, whatever their source tensors.
    Hurts: the weight is copied in each forward, or once in `parametrize.cached()`.
    Source: a parametrization without state; the keys of `state_dict` are the same.
    """

    def forward(self, weight: Tensor) -> Tensor:
        return to_channels_last(weight)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Pass an assigned weight on unchanged to the parametrizations before this one."""
        return weight


@mark_repair
class LaysOut:
    """A forward pre-hook that makes the weight of torch's older hooks (weight_norm, pruning) channels-last.

    Helps and hurts: as `LaidOut`. Does nothing once the other hooks are removed.
    """

    name = "weight"

    def __call__(self, module: Any, args: Any) -> None:
        if self.name not in module._parameters:
            module.weight = to_channels_last(module.weight)


class _ComputedWeight(Repair):
    """Add one parametrization, or one hook, after those that compute a convolution's weight."""

    name = "computed_weight"

    def concerns(self, module: nn.Module) -> bool:
        return bool(self.ranks(module)) and "weight" in computed_names(module)

    def fits(self, module: nn.Module) -> bool:
        return self.concerns(module) and not self.is_repaired(module)

    def ranks(self, module: nn.Module) -> tuple[int, ...]:
        return tuple(rank for rank, classes in _CONVOLUTIONS.items() if isinstance(module, classes))

    def repair(self, module: nn.Module, formats: Mapping[int, str]) -> None:
        self.undo(module)  # others may have been added after ours
        if parametrize.is_parametrized(module, "weight"):
            _parametrizations(module).append(LaidOut().train(module.training))
        else:
            module.register_forward_pre_hook(LaysOut())

    def is_repaired(self, module: nn.Module) -> bool:
        if parametrize.is_parametrized(module, "weight"):
            return type(_parametrizations(module)[-1]) is LaidOut
        hooks = [hook for hook, name in weight_hooks(module) if name == "weight"]
        return bool(hooks) and type(hooks[-1]) is LaysOut

    def undo(self, module: nn.Module) -> None:
        if parametrize.is_parametrized(module, "weight"):
            parametrizations = _parametrizations(module)
            for index in reversed(range(len(parametrizations))):
                if type(parametrizations[index]) is LaidOut:
                    del parametrizations[index]
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if type(hook) is LaysOut]:
            del hooks[key]


REPAIR = _ComputedWeight()


def _parametrizations(module: Any) -> Any:
    return module.parametrizations.weight
