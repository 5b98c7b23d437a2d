"""Describe where a job runs: versions, the machine, its devices, the commit of the current folder."""

import os
import platform
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

from prepare.core.utils import json_records
from prepare.core.utils.accelerator import accelerator
from prepare.core.utils.machine import how_threads_wait
from prepare.core.utils.packages import version_of

_PACKAGES = ("torch-prepare", "hydra-core", "omegaconf", "numpy")
# The fields of /proc/cpuinfo with the instruction sets that torch's kernels use, on x86 and on ARM.
_INSTRUCTIONS = {
    "flags": ("avx", "amx", "f16c", "fma"),
    "Features": ("asimd", "bf16", "i8mm", "sve", "sme"),
}


# What readers of an environment rely on; older records have less.
_TYPES = {
    **dict.fromkeys(
        ("date", "python", "torch", "platform", "cpu", "git_commit", "waiting"), str | None
    ),
    **dict.fromkeys(("cores", "threads"), int | None),
    "packages": dict[str, str | None] | None,
    "devices": list[str] | None,
    "accelerator": dict[str, Any] | None,
}


def check_environment(data: dict[str, Any]) -> dict[str, Any]:
    """Return the environment of a record; raise TypeError or ValueError for wrong types."""
    json_records.check_values(data, _TYPES)
    return data


def environment() -> dict[str, Any]:
    """Return the environment as plain data; None for anything unknown."""
    import torch

    cpuinfo = _cpuinfo()
    return {
        "format": "prepare.environment",
        "version": 1,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cpu": cpuinfo.get("model name") or platform.processor() or None,
        # CPUs of the same name may differ in these, and so in the speed of 16-bit types.
        "instructions": _instructions(cpuinfo),
        # A change of any of these may change the fastest kernel, or make it wrong.
        "accelerator": accelerator(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "waiting": how_threads_wait(),
        "devices": _devices(),
        "git_commit": _commit(),
    }


def _cpuinfo() -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo; an empty dict outside Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def _instructions(cpuinfo: dict[str, str]) -> list[str]:
    return sorted(
        name
        for field, prefixes in _INSTRUCTIONS.items()
        for name in cpuinfo.get(field, "").split()
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
