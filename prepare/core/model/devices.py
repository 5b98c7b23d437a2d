"""Ask devices for their free memory, and wait until they have done what was requested of them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

_MEMINFO = Path("/proc/meminfo")


def free_memory(device: torch.device) -> int | None:
    """Return the bytes of free memory, or None where the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = _MEMINFO.read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        return 1024 * int(available.split()[1])
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return None


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait for all work on every accelerator among `devices`; a CPU has none that is waiting."""
    for device in {device for device in devices if device.type not in ("cpu", "meta")}:
        synchronize = getattr(torch, device.type).synchronize
        # There is one MPS, and its function takes no argument.
        synchronize() if device.type == "mps" else synchronize(device)
