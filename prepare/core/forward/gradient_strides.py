"""Find the parameters whose gradient has other strides than DistributedDataParallel expects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.autocast import autocast, check_amp, device_of
from prepare.core.forward.compiled import eager_if_compiled
from prepare.core.forward.explain_error import explained
from prepare.core.forward.nested import arguments, tensors_in
from prepare.core.forward.stand_ins import (
    copy_of,
    lazy_parameter,
    real_stand_in,
    stand_ins_for,
)
from prepare.core.forward.unchanged import unchanged
from prepare.core.model.known_issues import REPAIR_STEP
from prepare.core.utils.signals import held_interrupts, interruptible
from prepare.core.utils.wording import step
from prepare.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping

_RANKS = {4: "conv2d_memory_format", 5: "conv3d_memory_format"}


@dataclass(frozen=True)
class GradientStrides:
    """A parameter whose gradient has other strides than its bucket in DistributedDataParallel.

    `bucket` are the strides of the view into the bucket, which are those of the parameter if its memory has
    no gaps. `why` is the cause, and `remedy` what to do before the model is wrapped.
    """

    parameter: str
    shape: tuple[int, ...]
    bucket: tuple[int, ...]
    gradient: tuple[int, ...]
    why: str
    remedy: str

    def __str__(self) -> str:
        found = f"its gradient has strides {self.gradient}, its bucket {self.bucket}"
        return f"{self.parameter} {list(self.shape)}: {found}: {self.why}; {self.remedy}"


def gradient_strides(model: nn.Module, batch: Any, amp: str) -> list[GradientStrides]:
    """Return every parameter whose gradient would not have the strides of its bucket.

    Raises:
        RefusedError: `amp` is unknown, a lazy module has no parameters yet, or no output can be trained.
        ModelError: the forward or backward raised.
    """
    check_amp(amp)
    if name := lazy_parameter(model):
        raise RefusedError(name, "this parameter has no shape yet", "run one forward first")
    fresh = _gradients(model, batch, amp)
    found = []
    for name, parameter in model.named_parameters():
        bucket, old, new = _bucket(parameter), parameter.grad, fresh.get(name)
        if old is not None and old.stride() != bucket:
            strides = old.stride()
            why = "it holds a gradient from before its layout changed, and torch adds to that in place"
            remedy = "call zero_grad(set_to_none=True)"
        elif new is not None and new.stride() != bucket:
            strides = new.stride()
            why, remedy = _cause(model, name, parameter, strides)
        else:
            continue
        shape = tuple(parameter.shape)
        found.append(GradientStrides(name, shape, bucket, strides, why, remedy))
    return found


def _gradients(model: nn.Module, batch: Any, amp: str) -> Mapping[str, Tensor | None]:
    """Run one forward and backward on stand-ins; return the gradients by the names of the parameters."""
    whole = unchanged(model, arguments(batch), stand_in=real_stand_in)
    with held_interrupts(), eager_if_compiled(model), whole:
        args, kwargs = stand_ins_for(arguments(batch), copy_of)
        try:
            with torch.inference_mode(mode=False), torch.enable_grad():
                with autocast(amp, device_of([model], tensors_in([*args, *kwargs.values()]))):
                    output = interruptible(model, *args, **kwargs)
                roots = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
                if not roots:
                    wrong = "does not require gradients"
                    raise RefusedError("the output", wrong, "train a parameter")
                losses = [root.abs().square().float().mean() for root in roots]
                interruptible(torch.stack(losses).sum().backward)
        except (RefusedError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise explained(model, error) from error
        return {name: parameter.grad for name, parameter in model.named_parameters()}


def _bucket(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of the view into a bucket, as torch's reducer makes it."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter.detach()):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def _cause(
    model: nn.Module, name: str, parameter: Tensor, gradient: tuple[int, ...]
) -> tuple[str, str]:
    owner = model.get_submodule(name.rpartition(".")[0])
    sizes = zip(parameter.shape, parameter.stride(), gradient, strict=True)
    if {size for size, own, other in sizes if own != other} == {1}:
        why = (
            "they differ only in dimensions of size 1, where torch accepts any stride, but DDP compares all: "
            "the parameter has one format, and the activations have another"
        )
        view = f"{name}.data.as_strided({list(parameter.shape)}, {list(gradient)})"
        remedy = f"reset it with {name}.data = {view}"
        wanted = _RANKS.get(parameter.dim())
        if wanted and isinstance(owner, nn.modules.conv._ConvNd):
            remedy = f"prepare it in the format of the activations with {step(wanted)}"
            if parameter.stride(1) == 1 and parameter.stride(-1) != 1:  # it is in channels-last
                repair = step(REPAIR_STEP)
                remedy = f"bring the activations into the format of the parameter with {repair}"
        return why, f"{remedy}, before DistributedDataParallel"
    why = "a hook of the parameter, or a custom function, returns it in another layout"
    return why, "let it return the layout of the parameter"
