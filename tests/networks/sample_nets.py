"""Small networks, good and bad, that tests of the command line build by name."""

import ctypes
import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn


class Net(nn.Module):
    """A chain of 2-d convolutions."""

    def __init__(self, depth=1, width=4, dtype="float32"):
        super().__init__()
        channels = [3] + [width] * depth
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3) for a, b in pairwise(channels))
        self.to(getattr(torch, dtype))

    def forward(self, x, scale=None):
        for conv in self.convs:
            x = conv(x)
        return x if scale is None else x * scale


class Views(Net):
    def forward(self, x):
        return super().forward(x).view(x.shape[0], -1)


class MakesItsOwn(Net):
    def forward(self, x):
        return super().forward(torch.zeros(1, 3, 8, 8))


class TakesTwo(Net):
    def forward(self, x, ids, *, scale):
        return super().forward(x) * scale + ids.sum()


def exits(code=0):
    sys.exit(code)


def raises():
    raise ValueError("no such depth\nand more")


def runs_out_of_memory():
    raise MemoryError("2 TiB")


def interrupts():
    raise KeyboardInterrupt


def changes_the_process():
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.manual_seed(99)
    return Net()


def reports_the_process():
    state = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads())
    sys.stdout.write(f"process {state} {torch.rand(1).item()}\n")
    return Net()


def wrong_in_training():
    """At batch 1 in channels-last, a CPU computes wrong gradients for this one."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.SiLU(), nn.Conv2d(8, 4, 3))


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def segfaults():
    sys.stdout.write("about to fall\n")
    ctypes.string_at(0)


def leaves(code=0):
    os._exit(code)


def forks():
    """Leaves a process behind that would go on for a minute."""
    pid = os.fork()
    if not pid:
        time.sleep(60)
        os._exit(0)
    Path("left").write_text(str(pid))
    return Net()


def waits(name="go", seconds=60):
    """Waits for a file of that name, after it has said that it began."""
    with Path("began").open("a") as file:
        file.write(f"{os.getpid()}\n")
    deadline = time.monotonic() + seconds
    while not Path(name).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return Net()


def small():
    """Two convolutions with a norm between them, for 3 channels."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


def small_channels_last():
    """As `small`, and in channels-last already."""
    return small().to(memory_format=torch.channels_last)


class RefersToItself(Net):
    """Holds a function that refers to one of its own modules, and so cannot be copied."""

    def __init__(self, offset=0.0):
        super().__init__(depth=2)
        last = self.convs[-1]
        self.scaled = lambda x: x * (1 + last.bias.abs().mean())
        with torch.no_grad():
            last.bias.add_(offset)

    def forward(self, x):
        return self.scaled(super().forward(x))


def never_twice():
    """A network with other values at each call, which cannot be copied."""
    return RefersToItself(offset=time.monotonic())
