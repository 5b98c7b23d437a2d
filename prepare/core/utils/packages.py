"""Deal with other packages: versions, which to install, how to load names late and keep remarks quiet."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from typing import Any

# Import names of packages, and the extra of ours that installs each.
_EXTRAS = {name: name for name in ("monai", "diffusers", "transformers", "torchvision", "timm")}
_EXTRAS |= {"dynamic_network_architectures": "nnunet"}
# Packages that pip knows by another name than the module.
_PACKAGES = {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
_LOCAL = "start in the folder that holds it"
_NO_MODULE = re.compile(r"No module named '(\w+)")
# Ray reports usage where a cluster starts; huggingface_hub names its callers in each request.
_SWITCHES = {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
# torchao logs each kernel that it has for other devices, torch logs a deprecation in it, and diffusers that a
# class of an older torchao is missing.
_LOGGERS = ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer")


def lazy_names(package: str, **modules: tuple[str, ...]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package, whose `import` stays cheap: its modules, with their names."""
    homes = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return load


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None; the package is not imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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
    if name in _EXTRAS:
        return f"install the extra: pip install 'torch-prepare[{_EXTRAS[name]}]'"
    if name in _PACKAGES:
        return f"install it: pip install {_PACKAGES[name]}"
    # A name that the user wrote may be misspelt: it is not advised to install any package of that name.
    return f"install it{f': pip install {name}' if imported else ''}, or {_LOCAL}"


def missing_module(text: str) -> str | None:
    """Return the module that an error message says is missing, as in `No module named 'einops'`."""
    match = _NO_MODULE.search(text)
    return match and match[1]


def switch_off_telemetry() -> None:
    """Switch off the reports of Ray and huggingface_hub, here and in child processes, before their import.

    A value that the user has set in the environment stays.
    """
    for name, value in _SWITCHES.items():
        os.environ.setdefault(name, value)


def quiet_torchao() -> None:
    """Let these loggers report errors only, unless the user has set their level."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)
