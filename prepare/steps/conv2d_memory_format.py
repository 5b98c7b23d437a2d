"""Lays the weights of 2-d convolutions out in a memory format."""

from typing import ClassVar, Literal

from prepare.registry import register
from prepare.steps._convolution import ConvolutionFormat


@register("conv2d_memory_format")
class Conv2dMemoryFormat(ConvolutionFormat):
    """Lays the weights of Conv2d and ConvTranspose2d, and of their subclasses, out in a memory format.

    Helps: convolutions then run their channels-last kernels (NHWC) and hand that layout on, which
    tensor cores and oneDNN are fastest in.
    Hurts: where something between the convolutions takes the layout back, every border costs a copy.
    Source: `torch.nn.utils.convert_conv2d_weight_memory_format`, the same strides to the last one.
    """

    spatial: ClassVar[int] = 2
    memory_format: Literal["contiguous", "channels_last"] = "channels_last"
