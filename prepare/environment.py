"""Where a run took place: versions, the machine, its devices, and the commit of the current folder."""

import os
import platform
import subprocess
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch-prepare", "hydra-core", "omegaconf", "numpy")


def environment() -> dict[str, Any]:
    """All of it as plain data; what cannot be found out is None."""
    import torch

    return {
        "format": "prepare.environment",
        "version": 1,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "devices": _devices(),
        "git_commit": _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, None) or platform.processor() or None


def _devices() -> list[str]:
    import torch

    if torch.cuda.is_available():
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ["mps"] if torch.backends.mps.is_available() else []


def _commit() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
