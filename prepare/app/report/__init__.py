"""The report from the records of a job, and as a function: `prepare.report(model, batch)`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Report(ModuleType):
    """This package; calling it is `prepare.pipeline.shortcuts.report`, whose name it would hide."""

    def __call__(self, model: Any, batch: Any, **options: Any) -> Any:
        """Report on `model`; the arguments are those of `prepare.pipeline.shortcuts.report`."""
        from prepare.pipeline.shortcuts import report

        return report(model, batch, **options)


sys.modules[__name__].__class__ = _Report
