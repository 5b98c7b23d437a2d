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
    """A fault in `function` of torch.nn.functional, which the general probe `probe` shall find.

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


WRONG = [
    Fault("conv2d", "conv2d", doubled),
    Fault("conv2d", "conv2d", off_by_1e_3),
    Fault("conv2d", "conv2d", off_by_1e_3, is_flat, backward=True),
    Fault("conv2d", "conv2d", last_channel_zero, size_7),
    Fault("conv2d", "conv2d", noisy),
    Fault("conv2d_kernel_1", "conv2d", doubled, batch_1, backward=True),
    Fault("conv2d_strided", "conv2d", shifted, is_flat),
    Fault("conv2d_depthwise", "conv2d", last_channel_zero, bfloat16, backward=True),
    Fault("conv_transpose2d", "conv_transpose2d", off_by_1e_3, batch_1),
    Fault("conv3d", "conv3d", doubled, backward=True),
    Fault("conv3d", "conv3d", not_a_number, batch_1),
    Fault("batch_norm2d", "batch_norm", off_by_1e_3, size_16),
    Fault("batch_norm2d", "batch_norm", sometimes),
    Fault("group_norm", "group_norm", off_by_1e_3, size_7, backward=True),
    Fault("max_pool2d", "max_pool2d", shifted, batch_1),
    Fault("avg_pool2d", "avg_pool2d", doubled, is_flat, backward=True),
    Fault("adaptive_avg_pool2d", "adaptive_avg_pool2d", off_by_1e_3, is_flat),
    Fault("upsample_nearest", "interpolate", sometimes, backward=True),
    Fault("upsample_bilinear", "interpolate", last_channel_zero, size_16, backward=True),
    Fault("silu", "silu", noisy, is_flat),
]


def slept(x):
    time.sleep(0.15)
    return x


def recomputed(x):
    for _ in range(400):
        x.abs().sum()
    time.sleep(0.1)
    return x


SLOW = [
    Fault("conv2d", "conv2d", slept, is_flat),
    Fault("conv2d_kernel_1", "conv2d", slept, is_flat, backward=True),
    Fault("conv2d_depthwise", "conv2d", recomputed, is_flat),
    Fault("conv_transpose2d", "conv_transpose2d", slept, is_flat, backward=True),
    Fault("batch_norm2d", "batch_norm", recomputed, is_flat, backward=True),
    Fault("group_norm", "group_norm", slept, is_flat),
    Fault("max_pool2d", "max_pool2d", slept, is_flat),
    Fault("avg_pool2d", "avg_pool2d", recomputed, is_flat, backward=True),
    Fault("upsample_nearest", "interpolate", slept, is_flat),
    Fault("silu", "silu", recomputed, is_flat),
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

    from prepare.stages.doctor.probes import PROBES

    name = "silu"
    PROBES[name] = replace(PROBES[name], run=_sleeping)


def ask_for_memory():
    from dataclasses import replace

    from prepare.stages.doctor.probes import PROBES

    PROBES["silu"] = replace(PROBES["silu"], run=lambda device: iter([torch.ones(1 << 34)]))


def raise_an_error():
    def silu(*_, **__):
        raise RuntimeError("view size is not compatible")

    F.silu = silu


def wait():
    time.sleep(60)
