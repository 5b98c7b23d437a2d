"""Small networks that meet a known issue of torch."""

import torch
from torch import nn

from prepare.pipeline import Pipeline

FLAT = Pipeline.from_config({"conv2d_memory_format": {}})


def last(tensor):
    return tensor.to(memory_format=[torch.channels_last, torch.channels_last_3d][tensor.dim() - 4])


def is_last(tensor):
    kind = [torch.channels_last, torch.channels_last_3d][tensor.dim() - 4]
    return tensor.is_contiguous(memory_format=kind)


def with_norm(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.SiLU(), nn.Conv2d(8, 4, 3))


def gradient(model):
    torch.manual_seed(1)
    loss = (model(torch.randn(1, 3, 12, 12)) ** 2).sum()
    return torch.autograd.grad(loss, model[0].weight)[0]
