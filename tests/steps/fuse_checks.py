"""A convolution with a norm after it, and short cuts that fuse the two."""

import torch
from torch import nn

from prepare.pipeline import Pipeline

FUSE = Pipeline.from_config({"fuse_conv_bn": {}})


def lively(model):
    """As after training: a fresh norm's statistics would be 0 and 1, and a wrong formula would pass."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            with torch.no_grad():
                for tensor in (module.running_mean, module.weight, module.bias):
                    if tensor is not None:
                        tensor.add_(torch.randn_like(tensor) * 0.3)
                if module.running_var is not None:
                    module.running_var.uniform_(0.5, 2)
    return model.eval()


def fused(model):
    return [name for name, module in model.named_modules() if type(module) is nn.Identity]


class Net(nn.Module):
    """A convolution and a norm, called as `call` says."""

    def __init__(self, call=lambda net, x: net.bn(net.conv(x)), conv=None, bn=None):
        super().__init__()
        self.conv, self.bn = conv or nn.Conv2d(3, 4, 3), bn or nn.BatchNorm2d(4)
        self.call = call

    def forward(self, x):
        return self.call(self, x)
