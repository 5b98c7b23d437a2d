"""Deal with other code: versions, what to install, late names, quiet remarks, the line of an error."""

from __future__ import annotations

import logging
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from prepare.core.utils.text import first_line

# Import names of packages, and the extra of ours that installs each.
_EXTRAS = {name: name for name in ("monai", "diffusers", "transformers", "torchvision", "timm")}
_EXTRAS |= {"dynamic_network_architectures": "nnunet"}
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
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
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


def install_remedy(module: str) -> str:
    """Return how to get the missing `module`; a name that may be misspelt is not given to pip."""
    if extra := _EXTRAS.get(module.partition(".")[0]):
        return f"install the extra: pip install 'torch-prepare[{extra}]'"
    return "install it, or start in the folder that holds it"


def remedy_of_missing(text: str) -> str:
    """Return how to get the module that an error message says is missing: `No module named 'einops'`."""
    match = _NO_MODULE.search(text)
    return install_remedy(match[1]) if match else ""


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


# ------------------------------------------------------------ the line of the user's code in an error
# Packages whose lines do not show what the user's code, or the network of another package, did.
_INNER = ("torch", "hydra", "omegaconf", "prepare")
# Folders of installed packages.
_INSTALLED = ("site-packages", "dist-packages")
# Letters of a message that is given whole.
_MOST = 300
_OURS = Path(__file__).resolve().parents[2]


def described(error: BaseException, message: str | None = None) -> str:
    """Return `my_nets.py:8, in forward: ValueError: message`; without the line if there is none to name.

    `message` replaces that of the error, of which a long one gives its first line. The error that caused it
    follows, the last of the chain.
    """
    if message is None:
        # The message of a SyntaxError repeats the line.
        message = str(error.msg) if isinstance(error, SyntaxError) else _short_text(error)
    kind, cause = type(error).__name__, causes(error)[-1]
    text = ": ".join(filter(None, (place_of(error), kind, message)))
    last = _short_text(cause)
    is_new = cause is not error and last and last not in message
    return f"{text}; caused by {type(cause).__name__}: {last}" if is_new else text


def causes(error: BaseException, *, contexts: bool = False) -> list[BaseException]:
    """Return an error and the chain of its causes, and of its `contexts` too; a circle ends."""
    chain = [error]
    while cause := chain[-1].__cause__ or (chain[-1].__context__ if contexts else None):
        if cause in chain:
            break
        chain.append(cause)
    return chain


def place_of(error: BaseException) -> str:
    """Return `my_nets.py:8, in forward`, the innermost line outside of libraries, or nothing.

    If every line is in a library, it is the innermost one outside of torch and of this package.
    """
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        return f"{_shown(error.filename)}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_file()]
    own = [frame for frame in frames if _library(frame.filename) is None]
    theirs = [f for f in frames if (name := _library(f.filename)) and name not in _INNER]
    for frame in (own or theirs)[-1:]:
        function = "" if frame.name == "<module>" else f", in {frame.name}"
        return f"{_shown(frame.filename)}:{frame.lineno}{function}"
    return ""


def _short_text(error: BaseException) -> str:
    """Return the message of an error in one line, or the first line of a long message."""
    whole = " ".join(str(error).split())
    return whole if len(whole) <= _MOST else first_line(error)


def _library(filename: str) -> str | None:
    """Return the package that holds the file, `` for the standard library, None for the user's code."""
    path = Path(filename)
    if path.is_relative_to(_OURS):
        return "prepare"
    for folder in path.parents:
        if folder.name in _INSTALLED:
            return path.relative_to(folder).parts[0]
    return "" if path.is_relative_to(sysconfig.get_path("stdlib")) else None


def _shown(filename: str) -> str:
    """Return the path from the current folder, else from the folder that it was imported from."""
    path = Path(filename)
    installed = [folder for folder in path.parents if folder.name in _INSTALLED]
    imported = map(Path, sorted(filter(None, sys.path), key=len, reverse=True))
    roots = (*installed, Path.cwd(), *imported)
    return next((str(path.relative_to(r)) for r in roots if path.is_relative_to(r)), filename)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, on the CPU or a device; torch has several messages for it."""
    if isinstance(error, MemoryError):
        return True
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
