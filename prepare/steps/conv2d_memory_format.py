"""Convert the weights of 2-d convolutions to a memory format."""

from typing import ClassVar, Literal

from prepare.registry import register
from prepare.steps._convolution import ConvolutionFormat


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
