"""Hydra's launchers: which of them outlive the command line, and which make jobs share cores."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

_INTERVAL = 0.5  # seconds
# Launchers whose jobs go on after the command line that started them has ended.
OUTLIVE_COMMAND = ("submitit_slurm",)


def shares_cores(launcher: str | None, launching: Mapping[str, Any]) -> bool:
    """Return True if several jobs run at once on one machine, so that each disturbs the others' timings."""
    if launcher == "joblib":
        return launching.get("n_jobs") != 1
    # Slurm gives each job its own cores. For an unknown launcher, assume the worst.
    return launcher not in ("basic", "submitit_slurm")


def exit_with_parent(parent: int) -> None:
    """End this process soon after its parent: a joblib worker would wait for jobs that never come."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_INTERVAL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
