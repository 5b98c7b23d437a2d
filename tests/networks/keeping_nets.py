"""Networks whose own code loses a channels-last layout, in ways that the step keep_layout mends."""

import functools

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

LAST = torch.channels_last_3d


class CausalConv(nn.Conv3d):
    """A convolution that pads in its own code, and joins the last frame of the call before."""

    def forward(self, x: Tensor, last: Tensor | None = None) -> Tensor:
        if last is not None:
            x = torch.cat([last, x], dim=2)
        x = F.pad(x, (1, 1, 1, 1, 2 if last is None else 1, 0))
        return super().forward(x)


class Chunked(nn.Module):
    """Convolves frame by frame; the frames have odd strides, which torch's kernels read as contiguous."""

    __frames = 2

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(3, 8, 3, padding=1)
        self.conv = CausalConv(8, 8, 3)

    def forward(self, x: Tensor, *, scale: float = 0.5) -> Tensor:
        x, outputs, last = self.first(x), [], None
        for index in range(self.__frames):
            frame = x[:, :, index].unsqueeze(1).permute(0, 2, 1, 3, 4)
            outputs.append(self.conv(frame, last) * scale)
            last = frame.clone()
        return torch.cat(outputs, 2)


class Purposeful(nn.Module):
    """Asks for a contiguous tensor, and reads it as one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).contiguous()
        rows = x.view(x.shape[0], -1)
        return torch.as_strided(x, (rows.shape[0], 4), (x.stride(0), x[0, 0].numel()))


def doubled(method):
    """Decorate a method: twice its output."""

    @functools.wraps(method)
    def wrapper(self, x):
        return 2 * method(self, x)

    return wrapper


class Decorated(CausalConv):
    """Its forward is decorated, and calls that of its base."""

    @doubled
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 0, 0, 0, 0, 0)))


def chunked() -> nn.Module:
    """Return `Chunked` with weights in channels-last."""
    torch.manual_seed(0)
    return Chunked().eval().to(memory_format=LAST)


def video(batch: int = 2) -> Tensor:
    """Return two frames in channels-last."""
    torch.manual_seed(1)
    return torch.randn(batch, 3, 2, 6, 7).contiguous(memory_format=LAST)


def convolution() -> nn.Module:
    """Return a network that loses no layout."""
    return nn.Sequential(nn.Conv3d(3, 8, 3, padding=1), nn.ReLU())


class Branching(Chunked):
    """Reads the values of its input, so that its flow cannot be predicted."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else torch.cat([x])


class Folding(nn.Module):
    """Folds pixels into channels and back, by views, by `flatten` and by einops."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second, self.third = nn.Conv2d(32, 16, 1), nn.Conv2d(4, 8, 3, padding=1)
        self.last = nn.Conv2d(32, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        n, c, h, w = x.shape
        x = x.view(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).contiguous()
        x = self.second(x.view(n, c * 4, h // 2, w // 2))
        x = self.third(rearrange(x, "n (c p q) h w -> n c (h p) (w q)", p=2, q=2))
        x = x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 1, 3, 5, 2, 4)
        return self.last(x.flatten(1, 3))


def folding() -> nn.Module:
    """Return `Folding` with weights in channels-last."""
    torch.manual_seed(0)
    return Folding().eval().to(memory_format=torch.channels_last)


def image(batch: int = 2) -> Tensor:
    """Return images in channels-last."""
    torch.manual_seed(1)
    return torch.randn(batch, 3, 6, 8).contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("keeping_nets::first_rows", mutates_args=())
def first_rows(x: Tensor) -> Tensor:
    """Return the first elements of each sample in memory: a kernel that needs a contiguous input."""
    return torch.as_strided(x, (x.shape[0], 4), (x.stride(0), 1)).clone()


@first_rows.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], 4)
