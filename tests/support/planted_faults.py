"""Faults to plant into kernels of torch: numbers that are wrong under a condition, and time that is lost."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch
from torch.nn import functional as F


class _Gradient(torch.autograd.Function):
    """The identity, whose backward changes the gradient."""

    @staticmethod
    def forward(ctx, given, change):
        ctx.change = change
        return given.view_as(given)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None


def is_flat(x):
    return (
        x.dim() == 4
        and x.is_contiguous(memory_format=torch.channels_last)
        and not x.is_contiguous()
    )


def always(x):
    return True


def batch_1(x):
    return len(x) == 1


def size_7(x):
    return x.shape[-1] == 7


def size_16(x):
    return x.shape[-1] == 16


def bfloat16(x):
    return x.dtype == torch.bfloat16


@dataclass(frozen=True)
class Fault:
    """A fault in `function` of torch.nn.functional, which the probe `probe` shall find.

    `change` gets the output, or the gradient of the output if `backward`, where `where` holds.
    """

    probe: str
    function: str
    change: Callable
    where: Callable = always
    backward: bool = False

    def plant(self, monkeypatch):
        kernel = getattr(F, self.function)

        def faulty(x, *args, **options):
            out = kernel(x, *args, **options)
            if x.dtype == torch.float64 or not self.where(x):  # float64 is the judge
                return out
            return _Gradient.apply(out, self.change) if self.backward else self.change(out)

        monkeypatch.setattr(F, self.function, faulty)

    def __str__(self):
        part = "backward" if self.backward else "forward"
        return f"{self.probe}-{self.change.__name__}-{self.where.__name__}-{part}"


def off_by_1e_3(x):
    return x * 1.001


def doubled(x):
    return x * 2


def one_value(x):
    changed = x.clone(memory_format=torch.preserve_format)
    changed.view(-1)[0] = 9 if x.is_contiguous() else 0
    return changed


def last_channel_zero(x):
    mask = torch.ones(x.shape[1], dtype=x.dtype)
    mask[-1] = 0
    return x * mask.view(-1, *[1] * (x.dim() - 2))


def not_a_number(x):
    return x * float("nan")


def shifted(x):
    return x.roll(1, -1)


def noisy(x):
    return x + 0.01 * torch.randn_like(x)


CALLS = count()


def sometimes(x):
    return x * 1.5 if next(CALLS) % 3 == 2 else x


# Probes of other devices, which find the same faults on a CPU.
WRONG = [
    Fault("hardswish_backward_mps", "hardswish", doubled, is_flat, backward=True),
    Fault("hardswish_backward_mps", "hardswish", not_a_number, is_flat),
    Fault("batch_norm_backward_mps", "batch_norm", sometimes),
    Fault("batch_norm_backward_mps", "batch_norm", one_value, is_flat),
    Fault("avg_pool2d_backward_mps", "avg_pool2d", shifted, backward=True),
    Fault("conv3d_contiguous_mps", "conv3d", off_by_1e_3, batch_1, backward=True),
    Fault("conv3d_contiguous_mps", "conv3d", last_channel_zero),
]


def slept(x):
    time.sleep(0.15)
    return x


SLOW = [
    Fault("upsample_nearest_channels_last", "interpolate", slept, is_flat),
    Fault("conv2d_grouped_channels_last", "conv2d", slept, is_flat, backward=True),
]


def crash():
    import faulthandler
    import os
    import signal

    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)


def end_silently():
    import os

    os._exit(7)


def _sleeping(device):
    time.sleep(60)


def hang():
    from dataclasses import replace

    from prepare.stages.doctor.probes import KNOWN

    name = "hardswish_backward_mps"
    KNOWN[name] = replace(KNOWN[name], run=_sleeping)


def ask_for_memory():
    from dataclasses import replace

    from prepare.stages.doctor.probes import KNOWN

    KNOWN["hardswish_backward_mps"] = replace(
        KNOWN["hardswish_backward_mps"], run=lambda device: iter([torch.ones(1 << 34)])
    )


def raise_an_error():
    def broken(*_, **__):
        raise RuntimeError("view size is not compatible")

    F.hardswish = broken


def wait():
    time.sleep(60)
