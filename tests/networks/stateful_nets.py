"""Modules whose forward changes something that lasts, each in another way, and random models of them."""

import random
from collections import OrderedDict, deque
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

STATEFUL = {}


def kind(cls):
    STATEFUL[cls.__name__] = cls
    return cls


class Cache:
    """An object of the user's, as a key-value cache is."""

    def __init__(self):
        self.keys, self.length = torch.zeros(1), 0


class Base(nn.Module):
    """Adds what `change` returns to its input."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.make()

    def make(self):
        pass

    def forward(self, x):
        added = self.change(x)
        return self.conv(x) + (0 if added is None else added)


@kind
class BufferRebound(Base):
    def make(self):
        self.register_buffer("seen", torch.full((2,), torch.nan))

    def change(self, x):
        self.seen = torch.stack([x.detach().mean(), self.seen[0].nan_to_num() + 1])
        return self.seen[1]


@kind
class BufferMade(Base):
    def change(self, x):
        if not hasattr(self, "made"):
            self.register_buffer("made", x.detach().mean())
            return None
        return self.made


@kind
class Statistics(Base):
    def make(self):
        self.norm = nn.BatchNorm2d(4, momentum=0.5)

    def change(self, x):
        return self.norm(x) + self.norm.running_mean.mean()


@kind
class ParameterData(Base):
    def make(self):
        self.loc, self.done = nn.Parameter(torch.zeros(4, 1, 1)), False

    def change(self, x):
        if not self.done:
            self.loc.data.copy_(x.detach().mean((0, 2, 3))[:, None, None])
            self.done = True
        return self.loc


@kind
class TensorAttribute(Base):
    def make(self):
        self.hidden = torch.zeros(1)

    def change(self, x):
        self.hidden.add_(1)
        return self.hidden.to(x.dtype).clone()


@kind
class Containers(Base):
    def make(self):
        self.frames, self.table, self.seen = deque(maxlen=2), OrderedDict(a=0), {1}

    def change(self, x):
        self.frames.append(x.detach().mean())
        self.table["a"] += 1
        self.seen.add(self.table["a"])
        self.table.setdefault("b", [])
        self.table.move_to_end("a")
        return sum(frame.to(x.dtype) for frame in self.frames) + len(self.seen)


@kind
class KeyValues(Base):
    def make(self):
        self.cache, self.options = Cache(), SimpleNamespace(step=0)

    def change(self, x):
        held = self.cache
        held.keys = torch.cat([held.keys, x.detach().float().mean()[None]])[-3:]
        held.length += 1
        self.options.step += 1
        return held.keys.sum().to(x.dtype) + self.options.step


@kind
class HiddenModule(Base):
    def make(self):
        self.others = [nn.BatchNorm2d(4)]

    def change(self, x):
        self.others[0].bias.data.add_(1)
        return self.others[0].bias.detach().mean().to(x.dtype)


@kind
class Modes(Base):
    def make(self):
        self.drop, self.frozen = nn.Dropout(0.5), nn.Parameter(torch.ones(()))

    def change(self, x):
        self.drop.train(not self.drop.training)
        self.frozen.requires_grad_(False)
        return self.frozen + float(self.drop.training)


@kind
class Hooked(Base):
    def make(self):
        features = []

        def keep(module, args, output):
            features.append(output.detach().mean())

        self.conv.register_forward_hook(keep)
        self.keep = keep

    def change(self, x):
        self.conv.register_forward_hook(lambda *_: None)
        return float(len(self.conv._forward_hooks))


@kind
class Draws(Base):
    def change(self, x):
        return torch.rand(()).item() + random.random() + float(np.random.rand())  # noqa: NPY002


@kind
class Generators(Base):
    def make(self):
        self.own = torch.Generator().manual_seed(1)
        self.python, self.numbers = random.Random(1), [np.random.default_rng(1)]

    def change(self, x):
        drawn = torch.rand((), generator=self.own).item() + self.python.random()
        return drawn + self.numbers[0].random()


@kind
class Flags(Base):
    def change(self, x):
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.benchmark = True


@kind
class InPlaceInput(Base):
    def forward(self, x):
        return self.conv(x).clone() + x.mul_(0.5)


class Random(nn.Module):
    """A few of these kinds in a row, some twice, in the containers of torch and of Python."""

    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        parts = [STATEFUL[name]() for name in draw.choices(sorted(STATEFUL), k=draw.randint(1, 4))]
        if len(parts) > 2:
            parts.append(parts[0])  # shared
        self.parts = nn.Sequential(*parts) if draw.random() < 0.5 else nn.ModuleList(parts)
        self.again = {"parts": parts} if draw.random() < 0.3 else None
        self.stem = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        return x
