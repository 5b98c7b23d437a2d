"""What a repair is: one kind of module made to keep its input's layout, in place, and the way back."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from prepare.core.model.repair_marker import mark_repair

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(x: Tensor) -> bool:
    """Whether `x` lies in the channels-last format of its rank, and not in the contiguous one as well.

    With one channel, or one element in space, strides may satisfy both; then those of the channels
    and of the last dimension tell which was meant.
    """
    if x.dim() not in FORMATS:
        return False
    # Not `is_contiguous`, which `vmap` does not answer for these formats.
    last, step, sizes, strides = x.dim() - 1, 1, x.shape, x.stride()
    for dim in (1, *range(last, 1, -1), 0):
        if strides[dim] != step and (sizes[dim] != 1 or dim in (1, last)):
            return False
        step *= sizes[dim]
    return True


class Repair:
    """Makes modules of one kind keep the layout of a channels-last input, and as right as before.

    Each file beside this one holds one, named `REPAIR`. A repair writes into no tensor and adds no
    Parameter or buffer: `state_dict`, optimizers and references to the module stay as they are.
    """

    name: str

    def fits(self, module: nn.Module) -> bool:
        """Whether this is a module of a kind that it repairs, and not repaired yet. Pure."""
        raise NotImplementedError

    def ranks(self, module: nn.Module) -> tuple[int, ...]:
        """How many dimensions the inputs may have for which it repairs this module: by its class's name."""
        return {"2d": (4,), "3d": (5,)}.get(type(module).__name__[-2:], (4, 5))

    def repair(self, module: nn.Module, formats: Mapping[int, str]) -> None:
        """Repairs `module` in place, for inputs of these ranks: `{5: "channels_last_3d"}`."""
        raise NotImplementedError

    def is_repaired(self, module: nn.Module) -> bool:
        """Whether it is as this repair leaves it."""
        raise NotImplementedError

    def undo(self, module: nn.Module) -> None:
        """Makes a repaired `module` what it was."""
        raise NotImplementedError


class SwapClass(Repair):
    """Repairs by giving a module a subclass of its own class: it is the same object, with its hooks.

    `swaps` is `{torch's class: the subclass}`. Only modules of exactly such a class fit; a subclass
    with a forward of its own may do anything, and is left alone. The subclasses stand at the top of
    a file, so that models are pickled and copied as ever, and take what they need from the input.
    """

    def __init__(self, name: str, swaps: Mapping[type[nn.Module], type[nn.Module]]) -> None:
        self.name = name
        self.swaps = {original: mark_repair(repair) for original, repair in swaps.items()}
        self._back = {swapped: original for original, swapped in swaps.items()}

    def fits(self, module: nn.Module) -> bool:
        return type(module) in self.swaps

    def repair(self, module: nn.Module, formats: Mapping[int, str]) -> None:
        module.__class__ = self.swaps[type(module)]

    def is_repaired(self, module: nn.Module) -> bool:
        return type(module) in self._back

    def undo(self, module: nn.Module) -> None:
        module.__class__ = self._back[type(module)]
