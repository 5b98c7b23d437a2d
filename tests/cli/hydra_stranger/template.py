"""Somebody else's training code, in the shapes of lightning-hydra-template and of timm's train.py; all their own."""

import hydra
import torch
from torch import nn


class Net(nn.Module):
    """Their network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, 2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def create_model(model_name: str, **kwargs: int) -> nn.Module:
    """Their registry of networks, as timm's."""
    return {"net": Net}[model_name](**kwargs)


class LitModule(nn.Module):
    """Their module of Lightning: a network, and a partial that makes the optimizer."""

    def __init__(self, net: nn.Module, optimizer) -> None:
        super().__init__()
        self.net, self.optimizer = net, optimizer

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch).float().square().mean()


class Trainer:
    """Their trainer, which asks each callback as Lightning does."""

    def __init__(self, callbacks: list) -> None:
        self.callbacks = callbacks

    def fit(self, module: LitModule, batches: list[torch.Tensor]) -> list[float]:
        for callback in self.callbacks:
            callback.setup(self, module, "fit")
        optimizer = module.optimizer(params=module.parameters())
        losses = []
        for batch in batches:
            loss = module.training_step(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses


class Echo:
    """Their callback."""

    def setup(self, trainer: Trainer, module: LitModule, stage: str) -> None:
        self.seen = stage


def train(cfg) -> tuple[nn.Module, list[float]]:
    """Their train function, as in src/train.py of the template."""
    torch.manual_seed(cfg.seed)
    batches = [torch.randn(2, 3, 6, 6) for _ in range(2)]
    module = hydra.utils.instantiate(cfg.model)
    callbacks = [hydra.utils.instantiate(each) for each in cfg.callbacks.values()]
    return module.net, Trainer(callbacks).fit(module, batches)
