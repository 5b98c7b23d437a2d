"""Identify the accelerator: its backend, the versions of its libraries and driver, its architectures."""

import importlib.util
import platform
import re
import runpy
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from prepare.core.utils.packages import version_of

# Every key of an identity, as sentences name it.
NAMES = {
    "backend": "backend",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "driver": "driver",
    "architectures": "architecture",
    "hip": "HIP",
    "miopen": "MIOpen",
    "macos": "macOS",
}
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
_CUDNN_WHEELS = ("nvidia-cudnn-cu11", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


def accelerator() -> dict[str, Any]:
    """Return the identity of what torch computes with; None for anything that does not exist or is unknown.

    `backend` is cuda, rocm, mps, xpu or cpu; `architectures` are those of all visible devices (`sm_90`,
    `gfx942`).
    """
    import torch

    backend = _backend()
    library = torch.backends.cudnn.version() if backend in ("cuda", "rocm") else None
    return _identity(
        backend=backend,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        cudnn=dotted_cudnn(library) if backend == "cuda" else None,
        miopen=str(library) if backend == "rocm" and library else None,
        driver=_driver() if backend in ("cuda", "rocm") else None,
        architectures=_architectures(backend),
    )


@cache
def installed_accelerator() -> dict[str, Any]:
    """Return what of `accelerator` can be known without torch, which takes seconds to import.

    The version of cuDNN is that of its wheel, and the architectures are those that `nvidia-smi` lists.
    """
    built = _torch_version_file()
    driver = _driver()
    architectures = (
        {f"sm_{line.replace('.', '')}" for line in _smi("compute_cap")} if driver else ()
    )
    return _identity(
        cuda=built.get("cuda"),
        hip=built.get("hip"),
        cudnn=next(filter(None, map(version_of, _CUDNN_WHEELS)), None),
        driver=driver,
        architectures=sorted(architectures),
    )


def dotted_cudnn(number: int | None) -> str | None:
    """Return torch's number of a cuDNN version with dots.

    >>> dotted_cudnn(91002), dotted_cudnn(8905)
    ('9.10.2', '8.9.5')
    """
    if not number:
        return None
    major = 10000 if number >= 90000 else 1000
    return f"{number // major}.{number % major // 100}.{number % 100}"


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return what differs between two identities, one phrase each: `cuDNN was 9.10.2, now 9.15.0`."""
    return [
        f"{NAMES.get(key, key)} was {_text(before.get(key))}, now {_text(now.get(key))}"
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key)
    ]


def _identity(**known: Any) -> dict[str, Any]:
    known["macos"] = platform.mac_ver()[0] or None
    return {key: known.get(key) for key in NAMES}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _backend() -> str:
    import torch

    if torch.cuda.is_available():
        return "rocm" if torch.version.hip else "cuda"
    if torch.backends.mps.is_available():
        return "mps"
    return "xpu" if torch.xpu.is_available() else "cpu"


def _architectures(backend: str) -> list[str]:
    import torch

    if backend not in ("cuda", "rocm"):
        return []
    properties = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    if backend == "rocm":
        return sorted({each.gcnArchName.partition(":")[0] for each in properties})
    return sorted({f"sm_{each.major}{each.minor}" for each in properties})


@cache
def _driver() -> str | None:
    """Return the version of the driver, from the kernel or from `nvidia-smi`."""
    for path in _DRIVERS:
        try:
            text = path.read_text()
        except OSError:
            continue
        if match := re.search(r"\d+\.\d+(\.\d+)*", text):
            return match[0]
    return next(iter(_smi("driver_version")), None)


@cache
def _smi(query: str) -> tuple[str, ...]:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())


def _torch_version_file() -> dict[str, Any]:
    """Return the constants of `torch/version.py`, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))
