"""Where a run took place: versions, the machine, its devices, and the commit of the current folder."""

import os
import platform
import subprocess
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch-prepare", "hydra-core", "omegaconf", "numpy")
# Where Linux names the sets of instructions that torch's kernels choose between, on x86 and on ARM.
_INSTRUCTIONS = {
    "flags": ("avx", "amx", "f16c", "fma"),
    "Features": ("asimd", "bf16", "i8mm", "sve", "sme"),
}


def environment() -> dict[str, Any]:
    """All of it as plain data; what cannot be found out is None."""
    import torch

    described = _cpuinfo()
    return {
        "format": "prepare.environment",
        "version": 1,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "cpu": described.get("model name") or platform.processor() or None,
        # Machines of one name may differ in these, and so in how fast 16 bits are.
        "instructions": _instructions(described),
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


def _cpuinfo() -> dict[str, str]:
    """What Linux says of the first processor; nothing where there is no Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def _instructions(described: dict[str, str]) -> list[str]:
    return sorted(
        name
        for field, prefixes in _INSTRUCTIONS.items()
        for name in described.get(field, "").split()
        if name.startswith(prefixes)
    )


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
