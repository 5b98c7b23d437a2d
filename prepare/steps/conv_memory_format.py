"""Convert the weights of convolutions to a memory format; the bases of the steps that act by that format."""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from prepare.core.model.memory_format import CHANNELS_LAST
from prepare.errors import Problem
from prepare.patterns import Patterns
from prepare.registry import register
from prepare.step import ModuleStep, Step, TensorStep, Want

if TYPE_CHECKING:
    import torch

    from prepare.core.model.tensors import NamedTensor
    from prepare.steps.repairs.base import SwapClass

_CONTIGUOUS = Want(memory_format="contiguous")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionFormat(TensorStep):
    """Request a memory format for the weights of all convolutions of one rank, also transposed ones."""

    spatial: ClassVar[int]
    memory_format: str
    include: Patterns = ()
    exclude: Patterns = ()

    def want(self, tensor: NamedTensor) -> Want | None:
        from prepare.core.model.module_kinds import reads_contiguous

        if "weight" not in (tensor.name, tensor.computes):
            return None
        fits = isinstance(tensor.module, _classes(self.spatial))
        # A computed weight also depends on vectors (weight_g, spectral_norm's u), which have no such
        # format.
        if fits and tensor.tensor.dim() == self.spatial + 2:
            return _CONTIGUOUS if reads_contiguous(tensor.module) else self._want
        return None

    def formats(self, model: torch.nn.Module | None = None) -> Mapping[int, str]:
        return {self.spatial + 2: self.memory_format}

    @cached_property
    def _want(self) -> Want:
        return Want(memory_format=self.memory_format)

    def nothing_matched(self, model: torch.nn.Module) -> str:
        from torch.nn.parameter import is_lazy

        own, other, name = self.spatial, 5 - self.spatial, type(model).__name__
        counts = {
            spatial: sum(isinstance(module, _classes(spatial)) for module in model.modules())
            for spatial in (2, 3)
        }
        if any(map(is_lazy, model.parameters())):
            return f"{name} has lazy modules without weights yet; run one forward pass first"
        if counts[own]:
            why = self._without_data(model) or "the patterns exclude all of them"
            return f"{name} has {counts[own]} Conv{own}d, and {why}"
        if counts[other]:
            contents = f"{name} has no Conv{own}d and {counts[other]} Conv{other}d"
            meant = f"the step conv{other}d_memory_format (memfmt={CHANNELS_LAST[other + 2]})"
            return f"{contents}; did you mean {meant}?"
        in_1d = sum(isinstance(module, _classes(1)) for module in model.modules())
        if in_1d:
            return f"{name} has {in_1d} Conv1d, and torch has no channels-last format for those"
        return (
            f"{name} has no Conv2d and no Conv3d; weights of other modules need a step of your own"
        )

    def remarks(self, model: torch.nn.Module) -> Iterator[Problem]:
        if wrong := self._without_data(model):
            remedy = "prepare the model before it is partitioned, or inside deepspeed.zero.GatheredParameters"
            yield Problem(f"steps.{self.name}", wrong, remedy)

    def _without_data(self, model: torch.nn.Module) -> str:
        """Name the weights that hold no data here, as DeepSpeed's ZeRO-3 leaves them; empty for none."""
        from torch.nn.parameter import is_lazy

        named = model.named_parameters()
        flat = (path for path, held in named if not is_lazy(held) and held.shape == (0,))
        classes, empty = _classes(self.spatial), []
        for owner, dot, tensor in (path.rpartition(".") for path in flat):
            if tensor == "weight" and isinstance(model.get_submodule(owner), classes):
                empty.append(f"{owner}{dot}weight")
        verb = f"and {len(empty) - 1} more hold" if len(empty) > 1 else "holds"
        lost = "no data here: other ranks have it, and it is left as it is"
        return f"{empty[0]} {verb} {lost}" if empty else ""


@register("conv2d_memory_format")
class Conv2dMemoryFormat(ConvolutionFormat):
    """Converts the weights of Conv2d and ConvTranspose2d, and of their subclasses, to a memory format.

    Helps: convolutions run their channels-last kernels (NHWC) and pass that layout on; it is the fastest
    layout for tensor cores and for oneDNN.
    Hurts: if a module between the convolutions returns to contiguous, each change of layout costs a copy.
    Source: `torch.nn.utils.convert_conv2d_weight_memory_format`; the strides are exactly the same.
    """

    spatial: ClassVar[int] = 2
    memory_format: Literal["contiguous", "channels_last"] = "channels_last"


@register("conv3d_memory_format")
class Conv3dMemoryFormat(ConvolutionFormat):
    """Converts the weights of Conv3d and ConvTranspose3d, and of their subclasses, to a memory format.

    Helps: convolutions run their channels-last kernels (NDHWC) and pass that layout on; it is the fastest
    layout for tensor cores and for oneDNN.
    Hurts: if a module between the convolutions returns to contiguous, each change of layout costs a copy.
    Source: `torch.nn.utils.convert_conv3d_weight_memory_format`; the strides are exactly the same.
    """

    spatial: ClassVar[int] = 3
    memory_format: Literal["contiguous", "channels_last_3d"] = "channels_last_3d"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForChannelsLast(ModuleStep):
    """A step that acts only for the ranks that are in channels-last."""

    # The pipeline's tensor steps, set by `bind`; not an option.
    _tensor_steps: ClassVar[tuple[TensorStep, ...]] = ()

    def bind(self, steps: Iterable[Step]) -> Self:
        bound = dataclasses.replace(self)
        tensor_steps = tuple(each for each in steps if isinstance(each, TensorStep))
        object.__setattr__(bound, "_tensor_steps", tensor_steps)
        return bound

    def formats(self, model: torch.nn.Module, *, force: bool = False) -> dict[int, str]:
        """Return the ranks that are, or will be, in channels-last, and the format; with `force`, both."""
        asked = ChainMap(*(dict(each.formats(model)) for each in self._tensor_steps))
        return {
            rank: last
            for rank, last in CHANNELS_LAST.items()
            if force or asked.get(rank) == last
            or (rank not in asked and _has_weights_in(model, rank, last))
        }  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwapsClasses(ForChannelsLast):
    """A step that makes modules run other code, by a change of their class that can be undone."""

    keeps_tensors: ClassVar[bool] = True
    include: Patterns = ()
    exclude: Patterns = ()

    @classmethod
    def swaps(cls) -> Collection[SwapClass]:
        """Return all changes of a class that the step may make."""
        raise NotImplementedError

    def candidates(self, model: torch.nn.Module) -> Iterator[str]:
        swaps = self.swaps()
        for name, module in model.named_modules(remove_duplicate=False):
            if any(swap.is_repaired(module) or swap.fits(module) for swap in swaps):
                yield name

    @classmethod
    def undo(cls, model: torch.nn.Module) -> None:
        """Give every module of `model` its own class back, in place."""
        for module in list(model.modules()):
            cls.undo_module(module)

    @classmethod
    def undo_module(cls, module: torch.nn.Module) -> None:
        """Give one module its own class back."""
        while swap := next((each for each in cls.swaps() if each.is_repaired(module)), None):
            swap.undo(module)

    def rewrite(self, model: torch.nn.Module, name: str) -> Mapping[str, torch.nn.Module]:
        return dict(self.rewrites(model, (name,)))


def _has_weights_in(model: torch.nn.Module, rank: int, memory_format: str) -> bool:
    """Return whether a weight has exactly the strides of this format, and not those of contiguous too."""
    from prepare.core.model.memory_format import canonical_stride
    from prepare.core.model.tensors import is_lazy, is_strided

    classes = _classes(rank - 2)
    for module in model.modules():
        # Read Parameters only: reading a computed weight may change its source tensors.
        weight = module._parameters.get("weight") if isinstance(module, classes) else None
        if weight is None or is_lazy(weight) or not is_strided(weight) or weight.dim() != rank:
            continue
        stride = canonical_stride(weight.shape, memory_format)
        if weight.stride() == stride != canonical_stride(weight.shape, "contiguous"):
            return True
    return False


def _classes(spatial: int) -> tuple[type, type]:
    from torch import nn

    if spatial == 1:
        return (nn.Conv1d, nn.ConvTranspose1d)
    return (nn.Conv2d, nn.ConvTranspose2d) if spatial == 2 else (nn.Conv3d, nn.ConvTranspose3d)
