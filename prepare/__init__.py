"""Declare how a PyTorch model is to be prepared, do it in one pass, and audit what came of it."""

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prepare.core.forward.calling import calling
    from prepare.core.forward.workload import Workload
    from prepare.pipeline import Pipeline
    from prepare.pipeline.shortcuts import prepare

__all__ = ["Pipeline", "Workload", "calling", "prepare", "report"]

# Imported when they are used: `import prepare` loads no torch.
_LAZY = {
    "Pipeline": "prepare.pipeline",
    "Workload": "prepare.core.forward.workload",
    "calling": "prepare.core.forward.calling",
    "prepare": "prepare.pipeline.shortcuts",
}

# Without a handler of the application, Python would print warnings of this logger to stderr.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name == "report":  # the package, which is also the function
        return importlib.import_module("prepare.app.report")
    if name == "__version__":
        from importlib import metadata

        return metadata.version("torch-prepare")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
