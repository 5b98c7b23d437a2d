"""The engines that run a sweep: which there are, what each needs, and which share a machine's cores."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

_TICK = 0.5
# A sweep on one of these goes on when the command line that started it has ended.
GOES_ON = ("submitit_slurm",)


def shares_cores(launcher: str | None, launching: Mapping[str, Any]) -> bool:
    """Whether jobs run beside each other on one machine, so that what one measures the others disturb."""
    if launcher == "joblib":
        return launching.get("n_jobs") != 1
    # Slurm gives each job cores of its own. Of an engine that is not known the worst is assumed.
    return launcher not in ("basic", "submitit_slurm")


def end_with(parent: int) -> None:
    """Ends this process soon after its parent: a worker of joblib would wait for jobs that never come."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_TICK)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
