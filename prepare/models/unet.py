"""The U-Net in 2-d and 3-d: an encoder, a decoder, and a skip connection at every level."""

from collections import OrderedDict
from itertools import pairwise

import torch
from torch import Tensor, nn

from prepare.models import build_norm, check_positive


class _UNet(nn.Module):
    """The base of `UNet2d` and `UNet3d`; `dims` is the number of image axes."""

    dims: int

    def __init__(
        self,
        in_channels: int = 1,
        *,
        out_channels: int = 2,
        width: int = 32,
        depth: int = 4,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        check_positive(in_channels=in_channels, out_channels=out_channels, width=width, depth=depth)
        channels = [2 * width * 2**level for level in range(depth)]
        self.encoder = nn.ModuleList()
        self.upsample = nn.ModuleList()
        self.decoder = nn.ModuleList()
        self.pool = self._layer("MaxPool")(2)
        for before, after in pairwise([in_channels, *channels]):
            # The second convolution doubles the channels before pooling, not the first after
            # it: the paper avoids a bottleneck in this way (its section 2).
            self.encoder.append(self._block((before, after // 2, after), norm=norm))
        for fine, coarse in zip(channels[-2::-1], channels[:0:-1], strict=True):
            self.upsample.append(self._layer("ConvTranspose")(coarse, coarse, 2, stride=2))
            self.decoder.append(self._block((fine + coarse, fine, fine), norm=norm))
        # The paper's is of size 1, which torch computes without channels-last in a single thread.
        self.head = self._layer("Conv")(channels[0], out_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of every class at every pixel or voxel; see the class for the shapes."""
        halvings = len(self.upsample)
        if any(size % 2**halvings for size in x.shape[2:]):
            wrong = f"{type(self).__name__}: input of shape {list(x.shape)} cannot be halved {halvings} times"
            raise ValueError(f"{wrong}; give spatial sizes that are multiples of {2**halvings}")
        skips = []
        for block in self.encoder[:-1]:
            skips.append(block(x))
            x = self.pool(skips[-1])
        x = self.encoder[-1](x)
        for up, block in zip(self.upsample, self.decoder, strict=True):
            x = block(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)

    def _block(self, channels: tuple[int, int, int], *, norm: str) -> nn.Sequential:
        layers = OrderedDict()
        for i, (before, after) in enumerate(pairwise(channels), start=1):
            # Without bias: the normalisation that follows would remove it.
            layers[f"conv{i}"] = self._layer("Conv")(before, after, 3, padding=1, bias=False)
            layers[f"norm{i}"] = build_norm(norm, channels=after, dims=self.dims)
            layers[f"relu{i}"] = nn.ReLU()
        return nn.Sequential(layers)

    def _layer(self, kind: str) -> type[nn.Module]:
        return getattr(nn, f"{kind}{self.dims}d")


class UNet2d(_UNet):
    """The U-Net for images: the network of `UNet3d` with one axis fewer.

    Input `(batch, in_channels, height, width)`, output `(batch, out_channels, height, width)`;
    each size a multiple of `2 ** (depth - 1)`, or ValueError is raised.

    Ronneberger et al. 2015 (arXiv:1505.04597), with the changes of Çiçek et al. 2016: padded
    convolutions, normalisation, channels doubled before pooling. Keywords as in `UNet3d`.
    """

    dims = 2


class UNet3d(_UNet):
    """The U-Net for volumes, after Çiçek et al. 2016 (arXiv:1606.06650), figure 2.

    Input `(batch, in_channels, depth, height, width)`, output `(batch, out_channels, ...)` of the
    same spatial size: the convolutions are padded, where the paper's are not. Each size has to
    be a multiple of `2 ** (depth - 1)`, or ValueError is raised.

    `width` is the number of channels after the first convolution (the paper's is 32), `depth`
    the number of resolutions, `norm` one of "batch" (the paper's), "group", "instance"; a wrong
    value is a ValueError. With the paper's depth of 4 it holds 18 convolutions: eight in the
    encoder, six in the decoder, three transposed ones between them, and the head.
    """

    dims = 3
