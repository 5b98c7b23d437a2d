"""Declare how a PyTorch model is to be prepared, do it in one pass, and audit what came of it."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prepare.app.model_report import report
    from prepare.audit import audit
    from prepare.core.forward.calling import calling
    from prepare.pipeline import Pipeline
    from prepare.pipeline.shortcut import prepare
    from prepare.registry import register
    from prepare.stages.bench import compare
    from prepare.stages.flow import observe, predict
    from prepare.stages.tune import tune
    from prepare.stages.verify import verify
    from prepare.step import InputStep, ModelStep, ModuleStep, TensorStep, Want

# The public names and their homes, imported when they are used: `import prepare` loads no torch.
_HOMES = {
    "InputStep": "step",
    "ModelStep": "step",
    "ModuleStep": "step",
    "Pipeline": "pipeline",
    "TensorStep": "step",
    "Want": "step",
    "audit": "audit",
    "calling": "core.forward.calling",
    "compare": "stages.bench",
    "observe": "stages.flow",
    "predict": "stages.flow",
    "prepare": "pipeline.shortcut",
    "register": "registry",
    "report": "app.model_report",
    "tune": "stages.tune",
    "verify": "stages.verify",
}
__all__ = [
    "InputStep",
    "ModelStep",
    "ModuleStep",
    "Pipeline",
    "TensorStep",
    "Want",
    "audit",
    "calling",
    "compare",
    "observe",
    "predict",
    "prepare",
    "register",
    "report",
    "tune",
    "verify",
]

# Without a handler of the application, Python would print warnings of this logger to stderr.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name == "audit":  # a package of this name exists: it can be called as its function can
        return import_module("prepare.audit")
    if name in _HOMES:
        return getattr(import_module(f"prepare.{_HOMES[name]}"), name)
    if name == "__version__":
        from importlib import metadata

        return metadata.version("torch-prepare")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
