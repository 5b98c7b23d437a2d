"""Wait until accelerators have done what was requested of them."""

from collections.abc import Iterable

import torch


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait for all work on every accelerator among `devices`; a CPU has none that is waiting."""
    for device in {device for device in devices if device.type not in ("cpu", "meta")}:
        synchronize = getattr(torch, device.type).synchronize
        # There is one MPS, and its function takes no argument.
        synchronize() if device.type == "mps" else synchronize(device)
