"""Ask devices for their free memory, wait for them, and compute in fewer threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")


def free_memory(device: torch.device) -> int | None:
    """Return the bytes of free memory, or None where the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = _MEMINFO.read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        return 1024 * int(available.split()[1])
    return None


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait for all work on every accelerator among `devices`; a CPU has none that is waiting."""
    for device in {device for device in devices if device.type not in ("cpu", "meta")}:
        synchronize = getattr(torch, device.type).synchronize
        # There is one MPS, and its function takes no argument.
        synchronize() if device.type == "mps" else synchronize(device)


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Run torch's operators in `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
