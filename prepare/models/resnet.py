"""A small residual network for images, as a typical 2-d classifier."""

from collections.abc import Sequence

from torch import Tensor, nn

from prepare.models import build_norm, check_positive


class ResNet2d(nn.Module):
    """A residual classifier of basic blocks, after He et al. 2016 (arXiv:1512.03385).

    Input `(batch, in_channels, height, width)`, output `(batch, classes)`. The stem is the one
    3x3 convolution of the paper's section 4.2, so small images are enough. Stage `i` holds `blocks[i]`
    basic blocks of `width * 2**i` channels and, from the second stage on, halves the size. Where
    size or channels change, the shortcut is a 1x1 convolution (the paper's option B).

    `norm` is one of "batch" (the paper's), "group", "instance"; a wrong value, an empty `blocks`
    or a count below one is a ValueError.
    """

    def __init__(
        self,
        in_channels: int = 3,
        *,
        classes: int = 10,
        width: int = 16,
        blocks: Sequence[int] = (2, 2, 2),
        norm: str = "batch",
    ) -> None:
        super().__init__()
        check_positive(in_channels=in_channels, classes=classes, width=width)
        if not isinstance(blocks, list | tuple) or not blocks:
            wrong = f"blocks: {blocks!r} is not a list of counts"
            raise ValueError(f"{wrong}; give one for each stage, as in [2,2,2]")
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, kernel_size=3, padding=1, bias=False),
            build_norm(norm, channels=width, dims=2),
            nn.ReLU(),
        )
        self.stages = nn.ModuleList()
        before = width
        for stage, count in enumerate(blocks):
            check_positive(blocks=count)
            after, stride = width * 2**stage, 1 if stage == 0 else 2
            self.stages.append(_stage(before, after, count=count, stride=stride, norm=norm))
            before = after
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of every class, `(batch, classes)`."""
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        # flatten, not view: a view of a channels-last activation can fail.
        return self.head(self.pool(x).flatten(1))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and the shortcut around them; `stride` is that of the first convolution."""

    def __init__(self, before: int, after: int, *, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = build_norm(norm, channels=after, dims=2)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = build_norm(norm, channels=after, dims=2)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, kernel_size=1, stride=stride, bias=False),
                build_norm(norm, channels=after, dims=2),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, before, h, w)` to `(batch, after, h / stride, w / stride)`, sizes rounded up."""
        out = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


def _stage(before: int, after: int, *, count: int, stride: int, norm: str) -> nn.Sequential:
    first = BasicBlock(before, after, stride=stride, norm=norm)
    rest = (BasicBlock(after, after, stride=1, norm=norm) for _ in range(count - 1))
    return nn.Sequential(first, *rest)
