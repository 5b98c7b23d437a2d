"""A network with many kinds of layers, and the faults that a verification must find in it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    """Batch and group norm, grouped and transposed convolutions, dropout, pooling; nested outputs."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.act = nn.SiLU()
        self.mix = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.gn = nn.GroupNorm(2, 8)
        self.gelu = nn.GELU()
        self.pool = nn.MaxPool2d(2)
        self.drop = nn.Dropout(0.5)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.grow = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.relu = nn.ReLU()
        self.head = nn.Linear(8, 5)
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 1.5, 2.0]))
        self.register_buffer("order", torch.tensor([3, 0, 2, 1]))
        nn.init.normal_(self.bn.weight, 1.0, 0.2)
        nn.init.normal_(self.bn.bias, 0.0, 0.2)
        nn.init.normal_(self.gn.bias, 0.0, 0.2)

    def forward(self, x):
        x = self.act(self.bn(self.stem(x)))
        x = self.drop(self.pool(self.gelu(self.gn(self.mix(x)))))
        image = self.grow(self.relu(self.up(x)))[:, self.order] * self.scale.view(1, 4, 1, 1)
        return {"logits": self.head(x.mean((2, 3))), "images": [image, image.softmax(1)]}


def changed(path, change):
    """Return a fault that replaces the values of one parameter or buffer by `change(values)`."""

    def fault(model):
        owner, _, name = path.rpartition(".")
        tensor = getattr(model.get_submodule(owner), name)
        with torch.no_grad():
            tensor.copy_(change(tensor.detach().clone()))

    return fault


def in_first(value):
    def change(tensor):
        tensor[(0,) * tensor.dim()] = value(tensor[(0,) * tensor.dim()])
        return tensor

    return change


CHANGES = {
    "one element off": in_first(lambda value: value * 1.05 + 0.01),
    "NaN in one": in_first(lambda value: float("nan")),
    "Inf in one": in_first(lambda value: float("inf")),
    "swapped": lambda tensor: tensor.flip(0),
    "negative": lambda tensor: -tensor,
    "zeros": torch.zeros_like,
    "a percent more": lambda tensor: tensor * 1.01,
}
PARAMETERS = ("stem.weight", "mix.weight", "up.weight", "head.bias", "bn.bias")
BUFFERS = {
    "bn.running_mean": lambda t: t + 0.1,
    "bn.running_var": lambda t: t * 1.1,
    "bn.num_batches_tracked": lambda t: t + 1,
    "scale": lambda t: t * 1.01,
    "order": lambda t: t.flip(0),
}


def replaced(name, module):
    return lambda model: setattr(model, name, module())


def attribute(name, key, value):
    return lambda model: setattr(model.get_submodule(name), key, value)


def output_hook(name, change):
    def hook(module, args, out):
        return change(out)

    return lambda model: model.get_submodule(name).register_forward_hook(hook)


def input_hook(name, change):
    def hook(module, args):
        return (change(args[0]),)

    return lambda model: model.get_submodule(name).register_forward_pre_hook(hook)


def gradient_hook(path, change):
    return lambda model: model.get_parameter(path).register_hook(change)


def backward_hook(name, change):
    def hook(module, into, out):
        return tuple(map(change, into))

    return lambda model: model.get_submodule(name).register_full_backward_hook(hook)


def outputs(change):
    return output_hook("", change)


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.01


class Counts(nn.Module):
    """Returns something else at every call."""

    calls = 0

    def forward(self, x):
        Counts.calls += 1
        return x * (1 + 0.1 * (Counts.calls % 7))


class StraightThrough(nn.Module):
    def forward(self, x):
        return x.relu().detach() + x - x.detach()


def drops_the_last_image(out):
    return {**out, "images": out["images"][:1]}


def one_pixel(value):
    def change(out):
        image = out["images"][0].clone()
        image[0, 0, 1, 1] = value
        return {**out, "images": [image, out["images"][1]]}

    return change


OTHERS = {
    "contiguous weight": lambda model: setattr(model.stem.weight, "data", model.stem.weight.data.contiguous()),
    "a bias in float64": lambda model: setattr(model.up.bias, "data", model.up.bias.data.double()),
    "a bias in bfloat16": lambda model: setattr(model.gn.bias, "data", model.gn.bias.data.bfloat16()),
    "norm in another mode": lambda model: model.bn.train(not model.bn.training),
    "dropout in another mode": lambda model: model.drop.train(not model.drop.training),
    "frozen bias": lambda model: model.head.bias.requires_grad_(False),
    "momentum": attribute("bn", "momentum", 0.2),
    "batch norm's eps": attribute("bn", "eps", 1e-3),
    "groups of the norm": attribute("gn", "num_groups", 4),
    "padding": attribute("stem", "padding_mode", "reflect"),
    "swish for gelu": replaced("gelu", nn.SiLU),
    "no relu": replaced("relu", nn.Identity),
    "straight through": replaced("relu", StraightThrough),
    "average pooling": replaced("pool", lambda: nn.AvgPool2d(2)),
    "other corners": replaced("grow", lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)),
    "no running statistics": replaced("bn", lambda: nn.BatchNorm2d(8, track_running_stats=False)),
    "counts its calls": replaced("gelu", Counts),
    "sign of one bias gradient": gradient_hook("head.bias", lambda g: -g),
    "a gradient a percent off": gradient_hook("mix.weight", lambda g: g * 1.01),
    "NaN in one gradient": gradient_hook("up.weight", lambda g: g.index_fill(0, torch.tensor(0), float("nan"))),
    "no gradient": gradient_hook("up.bias", torch.zeros_like),
    "a little more of one output": output_hook("up", lambda out: out + 1e-3),
    "an output in bfloat16": output_hook("mix", lambda out: out.bfloat16().float()),
    "a clamped output": output_hook("bn", lambda out: out.clamp(-1.5, 1.5)),
    "a scaled input": input_hook("gn", lambda x: x * x.new_tensor(1.001).pow(x.abs())),
    "half detached": output_hook("act", lambda out: 0.5 * out + 0.5 * out.detach()),
    "a detached input": input_hook("head", lambda x: x.detach()),
    "a wrong backward": output_hook("up", WrongBackward.apply),
    "a doubled gradient": backward_hook("mix", lambda g: g * 2),
    "noise": output_hook("mix", lambda out: out + 0.01 * torch.randn_like(out)),
    "mixed samples": output_hook("stem", lambda out: out.flip(0)),
    "mirrored": output_hook("stem", lambda out: out.flip(3)),
    "all detached": outputs(lambda out: {"logits": out["logits"].detach(), "images": [i.detach() for i in out["images"]]}),
    "an output less": outputs(drops_the_last_image),
    "an output more": outputs(lambda out: {**out, "more": out["logits"]}),
    "another shape": outputs(lambda out: {**out, "logits": out["logits"].unsqueeze(0)}),
    "NaN in one pixel": outputs(one_pixel(float("nan"))),
    "zero in one pixel": outputs(one_pixel(-1.0)),
    "it raises": output_hook("pool", lambda out: out.view(-1, 3)),
    "softmax over another dimension": outputs(lambda out: {**out, "images": [out["images"][0], F.softmax(out["images"][0], 2)]}),
}  # fmt: skip
FAULTS = {
    **{f"{name} of {path}": changed(path, change) for path in PARAMETERS for name, change in CHANGES.items()},
    **{f"another {path}": changed(path, change) for path, change in BUFFERS.items()},
    **OTHERS,
}  # fmt: skip
