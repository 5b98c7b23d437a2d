"""Convert the weights of 3-d convolutions to a memory format."""

from typing import ClassVar, Literal

from prepare.registry import register
from prepare.steps._convolution import ConvolutionFormat


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
