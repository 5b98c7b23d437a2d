"""Lays the weights of 3-d convolutions out in a memory format."""

from typing import ClassVar, Literal

from prepare.registry import register
from prepare.steps._convolution import ConvolutionFormat


@register("conv3d_memory_format")
class Conv3dMemoryFormat(ConvolutionFormat):
    """Lays the weights of Conv3d and ConvTranspose3d, and of their subclasses, out in a memory format.

    Helps: convolutions then run their channels-last kernels (NDHWC) and hand that layout on, which
    tensor cores and oneDNN are fastest in.
    Hurts: where something between the convolutions takes the layout back, every border costs a copy.
    Source: `torch.nn.utils.convert_conv3d_weight_memory_format`, the same strides to the last one.
    """

    spatial: ClassVar[int] = 3
    memory_format: Literal["contiguous", "channels_last_3d"] = "channels_last_3d"
