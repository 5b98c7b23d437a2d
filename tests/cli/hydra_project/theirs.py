"""The code of another project: a network, data, and a trainer."""

import torch
from torch import nn

from prepare.pipeline import Pipeline


class Net(nn.Module):
    """Their network: they call it `model`, as most do."""

    def __init__(self, width: int, *, volumes: bool = False) -> None:
        super().__init__()
        conv = nn.Conv3d if volumes else nn.Conv2d
        self.layers = nn.Sequential(conv(1, width, 3), nn.ReLU(), conv(width, 2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Data:
    """Their data: batches of noise."""

    def __init__(self, size: list[int], batches: int) -> None:
        self.size, self.batches = tuple(size), batches

    def __iter__(self):
        return (torch.randn(2, 1, *self.size) for _ in range(self.batches))


class Trainer:
    """Their trainer."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def fit(self, model: nn.Module, data: Data, pipeline: Pipeline) -> list[float]:
        """The loss of each batch."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.lr)
        pipeline.apply(model, optimizer=optimizer)
        losses = []
        for batch in data:
            optimizer.zero_grad()
            loss = model(pipeline.format(batch)).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses
