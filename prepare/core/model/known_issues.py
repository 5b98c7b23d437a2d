"""Known issues of torch: wrong or slow operations by backend, versions, memory format, dtype and sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from prepare.core.model.module_kinds import is_rewritten
from prepare.core.utils import plain_yaml

# Sums of fewer numbers than this lose few digits, and below so many elements a few microseconds count.
_MANY_ROWS, _LARGE_BATCH = 1 << 12, 1 << 17
# Weights with fewer elements than this are cheap to reorder.
_MIN_WEIGHT_ELEMENTS = 1 << 18
# With fewer output channels per output pixel than this, oneDNN's kernels gain more than the reordering costs.
_MIN_CHANNELS_PER_PIXEL = 8
# oneDNN's blocks of input channels, with the widest registers.
CHANNEL_BLOCK = 16


def has_large_weight(module: Any) -> bool:
    """Return whether the weight is so large that a product may be faster, and padding is zeros."""
    size = module.in_channels * module.out_channels * prod(module.kernel_size)
    plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return plain and module.groups == 1 and size >= _MIN_WEIGHT_ELEMENTS


def is_narrow_strided(module: Any) -> bool:
    """Return whether a convolution has kernel 1, a stride, no padding, and few input channels."""
    return (
        all(size == 1 for size in module.kernel_size)
        and any(step > 1 for step in module.stride)
        and module.padding in (0, (0, 0), "valid")
        and module.padding_mode == "zeros"
        and module.groups == 1
        and module.in_channels < CHANNEL_BLOCK
    )


def is_partly_grouped(module: Any) -> bool:
    """Return whether a convolution has groups of several input channels."""
    return 1 < module.groups < module.in_channels


def is_grouped_dilated(module: Any) -> bool:
    """Return whether a convolution in a plane has groups of no whole block, and a dilation of its rows."""
    channels = module.out_channels if module.transposed else module.in_channels
    return (
        module.groups > 1
        and channels // module.groups % CHANNEL_BLOCK > 0
        and module.dilation[-2] > 1
        and prod(module.kernel_size[:-2]) == 1
    )


def is_kernel_stride(module: Any) -> bool:
    """Return whether a convolution runs as such with a kernel that is its stride, as a product can."""
    return (
        module.kernel_size == module.stride
        and prod(module.kernel_size) > 1
        and module.padding in (0, (0, 0), (0, 0, 0), "valid")
        and module.groups == 1
        and not is_rewritten(module)
    )


def has_few_pixels(module: Any, shape: Sequence[int]) -> bool:
    """Return whether a large weight meets few output pixels, for an input (N, C, *spatial)."""
    if not has_large_weight(module):
        return False
    sizes = zip(
        *(shape[2:], module.padding, module.dilation, module.kernel_size, module.stride),
        strict=True,
    )
    pixels = shape[0] * prod(
        max(0, (size + 2 * cut - step * (kernel - 1) - 1) // stride + 1)
        for size, cut, step, kernel, stride in sizes
    )
    return 0 < _MIN_CHANNELS_PER_PIXEL * pixels <= module.out_channels


def has_many_rows(module: Any, shape: Sequence[int]) -> bool:  # noqa: ARG001
    """Return whether a sum over all but the channels of (N, C, *spatial) adds up many numbers."""
    size = prod(shape)
    return size >= max(_LARGE_BATCH, _MANY_ROWS * shape[1])


def is_smaller_than_kernel(module: Any, sizes: Sequence[int]) -> bool:
    """Return whether the kernel is larger than the `sizes` over which it moves.

    These are the spatial sizes of the input, or for a transposed convolution of the output.
    """
    extents = zip(sizes, module.kernel_size, module.dilation, strict=True)
    return any(0 < size <= (kernel - 1) * step for size, kernel, step in extents)


# The names of calls, in `sizes`, of which a plan warns where they are wrong; it knows no shapes.
IN_PLAN = {"batch_of_one", "few_pixels", "smaller_than_kernel", "large_conv3d", "unknown"}
FILE = Path(__file__).with_suffix(".yaml")
# The step that makes the repairs which entries name.
REPAIR_STEP = "repair_layout"
# The modules of a class that an entry is about.
ONLY: dict[str, Callable[[Any], bool]] = {
    "": lambda _: True,
    "depthwise": lambda module: module.groups == module.in_channels > 1,
    "large_depthwise": lambda module: (
        module.groups == module.in_channels > 1 and max(module.kernel_size) >= 7
    ),
    "grouped": lambda module: module.groups > 1,
    "partly_grouped": is_partly_grouped,
    "grouped_dilated": is_grouped_dilated,
    "large_kernel": lambda module: any(size != 1 for size in module.weight.shape),
    "dilated_bias": lambda module: module.bias is not None and any(n != 1 for n in module.dilation),
    "padded": lambda module: module.padding not in (0, (0, 0)),
    "narrow_strided": is_narrow_strided,
    "kernel_is_stride": is_kernel_stride,
}


@dataclass(frozen=True)
class Issue:
    """One entry of the file; the comment at the top of the file explains each field."""

    name: str
    effect: str
    part: str
    backend: tuple[str, ...]
    operations: tuple[str, ...]
    only: str
    sizes: str
    formats: tuple[str, ...]
    dtypes: tuple[str, ...]
    since: str
    until: str | None
    cudnn: tuple[str | None, ...]
    rocm: tuple[str | None, ...]
    arch: tuple[str, ...]
    os: tuple[str | None, ...]
    cure: tuple[tuple[str, str], ...]
    what: str
    evidence: str
    checked: str

    @property
    def repair(self) -> str:
        """The part of the step REPAIR_STEP that mends it; empty if none does."""
        return dict(self.cure).get("repair", "")

    @property
    def is_risk(self) -> bool:
        """Return whether numbers are wrong at some sizes only."""
        return self.effect == "wrong" and bool(self.sizes)

    @property
    def in_plan(self) -> bool:
        """Return whether a plan may report it, without knowing the sizes of a call."""
        return not self.sizes or (self.effect == "wrong" and self.sizes in IN_PLAN)

    def stands(self, backend: str, torch_version: str, machine: dict[str, Any]) -> bool:
        """Return whether this version of torch has the issue on this backend (`cpu`, `cuda`).

        `machine` is the identity of `prepare.core.utils.machine`.
        """
        system, *span = self.os or ("",)
        return (
            backend in self.backend
            and _within(torch_version.partition("+")[0], (self.since, self.until), digits=2)
            and (not self.cudnn or _within(machine.get("cudnn"), self.cudnn))
            and (not self.rocm or _within(machine.get("hip"), self.rocm))
            and (not self.arch or not set(self.arch).isdisjoint(machine.get("architectures") or ()))
            and (not system or _within(machine.get(system), span))
        )

    def concerns(self, operation: str, formats: Iterable[str], dtypes: Iterable[str]) -> bool:
        """Return whether a module of the class `operation` has the issue, given the convolutions' formats."""
        same_rank = {name for name in formats if _agree(_rank(name), _rank(operation))}
        return (
            operation in self.operations
            and not same_rank.isdisjoint(self.formats)
            and (not self.dtypes or not set(dtypes).isdisjoint(self.dtypes))
        )


def make_issue(name: str, entry: dict[str, Any]) -> Issue:
    """Return the issue of one entry; raise TypeError if a field is missing or unknown."""
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
    }
    return Issue(name, **{**values, "cure": tuple(entry["cure"].items())})


@cache
def issues() -> tuple[Issue, ...]:
    """Return every entry of the file, in its order."""
    entries: Any = plain_yaml.read(FILE.read_bytes(), FILE.name, remedy="").value
    return tuple(make_issue(name, entry) for name, entry in entries.items())


def standing(
    device: str, torch_version: str | None = None, machine: dict[str, Any] | None = None
) -> list[Issue]:
    """Return the issues on this type of device in this version of torch.

    The default is the installed torch and the present machine. An entry for some versions
    of cuDNN or ROCm, or for some architectures, stands only where these are known.
    """
    import torch

    from prepare.core.utils.machine import accelerator

    machine = accelerator() if machine is None else machine
    kind = device.partition(":")[0]
    if kind == "cpu":
        name = torch.backends.cpu.get_cpu_capability().lower()
        supported = (
            torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        names = [name] if supported else [name, f"{name}_without_bfloat16"]
        machine = {**machine, "architectures": names}
    backend = "rocm" if kind == "cuda" and machine.get("hip") else kind
    version = torch_version or torch.__version__
    return [issue for issue in issues() if issue.stands(backend, version, machine)]


def _within(version: str | None, span: Sequence[str | None], *, digits: int = 3) -> bool:
    """Return whether a version is in [since, until); False for an unknown one."""
    if version is None:
        return False
    since, until = span
    now = _numbers(version, digits)
    return (since is None or _numbers(since, digits) <= now) and (
        until is None or now < _numbers(until, digits)
    )


def _numbers(version: str, digits: int) -> tuple[int, ...]:
    parts = [int(number) for number in re.findall(r"\d+", version)[:digits]]
    return (*parts, *[0] * (digits - len(parts)))


def _rank(name: str) -> int | None:
    """Return the number of dimensions of a format or a class; None for any number."""
    if name.endswith(("3d", "3D")):
        return 5
    return 4 if name.endswith("2d") or name == "channels_last" else None


def _agree(one: int | None, other: int | None) -> bool:
    return None in (one, other) or one == other
