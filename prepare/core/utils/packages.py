"""Deal with other packages: which to install, and how to keep their reports and remarks quiet."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

# Import names of packages, and the extra of ours that installs each.
EXTRAS = {
    "monai": "monai",
    "dynamic_network_architectures": "nnunet",
    "diffusers": "diffusers",
    "transformers": "transformers",
    "torchvision": "torchvision",
    "timm": "timm",
}
# Packages that pip knows by another name than the module.
_PACKAGES = {
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "git": "gitpython",
    "hydra": "hydra-core",
    "pywt": "PyWavelets",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "umap": "umap-learn",
    "yaml": "pyyaml",
}
_LOCAL = "start in the folder that holds it"
_NO_MODULE = re.compile(r"No module named '(\w+)")
# Ray reports usage where a cluster starts; huggingface_hub names its callers in each request.
_SWITCHES = {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
# torchao logs each kernel that it has for other devices, torch logs a deprecation in it, and diffusers that a
# class of an older torchao is missing.
_LOGGERS = ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer")


@contextmanager
def naming_extra(extra: str) -> Iterator[None]:
    """Name the extra that brings a package, if importing it in this block shows that it is not there.

    Raises:
        ModuleNotFoundError: with the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        remedy = f"install the extra: pip install 'torch-prepare[{extra}]'"
        raise ModuleNotFoundError(f"{error}; {remedy}", name=error.name) from error


def install_remedy(module: str, *, imported: bool = False) -> str:
    """Return how to get the missing `module`; an `imported` one was named by other code, not by the user."""
    name = module.partition(".")[0]
    if name in EXTRAS:
        return f"install the extra: pip install 'torch-prepare[{EXTRAS[name]}]'"
    if name in _PACKAGES:
        return f"install it: pip install {_PACKAGES[name]}"
    # A name that the user wrote may be misspelt: it is not advised to install any package of that name.
    return (
        f"install it: pip install {name}, or {_LOCAL}" if imported else f"install it, or {_LOCAL}"
    )


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None; the package is not imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def missing_module(text: str) -> str | None:
    """Return the module that an error message says is missing, as in `No module named 'einops'`."""
    match = _NO_MODULE.search(text)
    return match[1] if match else None


def switch_off_telemetry() -> None:
    """Switch off the reports of Ray and huggingface_hub, here and in child processes.

    Call it before these are imported. A value that the user has set in the environment stays. What
    the user's own code imported before stays as well.
    """
    for name, value in _SWITCHES.items():
        os.environ.setdefault(name, value)


def quiet_torchao() -> None:
    """Let these loggers report errors only, unless the user has set their level."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)
