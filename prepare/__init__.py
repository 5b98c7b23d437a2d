"""Declare how a PyTorch model is to be prepared, do it in one pass, and audit what came of it."""

import logging
import re
from importlib import import_module
from pathlib import Path
from typing import Any

# The stub beside this file lists the public names, for type checkers and editors too. Each is imported when
# it is used: `import prepare` loads no torch.
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOMES = {
    name: home for home, name in re.findall(r"^from (\S+) import (\w+) as", _STUB, re.MULTILINE)
}
__all__ = sorted(_HOMES)  # noqa: PLE0605

# Without a handler of the application, Python would print warnings of this logger to stderr.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name == "audit":  # a package of this name exists: it can be called as its function can
        return import_module("prepare.audit")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "__version__":
        from importlib import metadata

        return metadata.version("torch-prepare")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
