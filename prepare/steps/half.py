"""Cast floating-point parameters and buffers to a 16-bit dtype."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from prepare.core.utils.wording import in_training, option, words
from prepare.errors import Problem
from prepare.patterns import Patterns
from prepare.registry import register
from prepare.step import TensorStep, Want

if TYPE_CHECKING:
    from prepare.core.model.tensors import NamedTensor


@register("half")
class Half(TensorStep):
    """Casts floating-point parameters and buffers to 16 bits; never integers or complex numbers.

    Helps: half the memory, and faster convolutions on hardware with 16-bit units.
    Hurts: float16 overflows above 65504, and the running statistics of a batch norm stop changing or
    overflow in it. Therefore `keep` skips batch and instance norms by default; `keep=[]` casts everything,
    exactly as `.half()` does. On a CPU float16 is very slow: use bfloat16 there. For training, keep float32
    parameters and use autocast.
    Source: `torch.nn.Module.half`, `torch.nn.Module.bfloat16`; NVIDIA/apex issue 144 for the norms.
    """

    dtype: Literal["float16", "bfloat16"] = "float16"
    keep: Literal["norms"] | Patterns = "norms"
    """Patterns of modules to skip; the word `norms` means batch and instance norms."""

    def in_training(self) -> Iterable[Problem]:
        if self.dtype == "float16":
            instead = words(
                cli="precision=float32 with amp=float16, which runs the forward under torch.autocast, or "
                "precision=bfloat16",
                python=f"{option('half', 'dtype', 'bfloat16')}, or drop the step and use torch.autocast "
                "around the forward",
            )
            yield Problem(
                f"steps.{self.name}.dtype",
                f"parameters in float16 cannot be trained{in_training()}: GradScaler refuses them, "
                "and Adam divides by zero",
                f"choose {instead}",
            )

    def want(self, tensor: NamedTensor) -> Want | None:
        return Want(dtype=self.dtype) if tensor.tensor.is_floating_point() else None
