"""Begin in a Python process what `prepare run` has declared, once the process imports torch.

Python imports a file of this name when it starts; `prepare run` puts this folder into PYTHONPATH. So ranks
that Lightning or `torch.multiprocessing` start are prepared alike.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# What `prepare run` was asked for, as JSON: the recipe, the pattern, and for the program itself the report.
ASKED = "PREPARE_OUTSIDE"


class _Finder(NamedTuple):
    """Finds a module as Python does, and calls a function with it once it has been imported."""

    name: str
    then: Callable[[Any], None]

    def find_spec(self, name: str, *_: Any) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                self.then(module)

            spec.loader.exec_module = exec_module
        return spec


def when_imported(name: str, then: Callable[[Any], None]) -> None:
    """Call `then` with the module of this name: now if it was imported, else once it is."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))


def _begin(_: Any) -> None:
    from prepare.frameworks.outside import outside

    recipe, module, *report = json.loads(os.environ[ASKED])
    os.environ[ASKED] = json.dumps([recipe, module])  # for what it starts, which tells nothing
    outside(recipe, module=module).report = report


if __name__ == "sitecustomize":
    sys.path[:] = [each for each in sys.path if each != str(Path(__file__).parent)]
    del sys.modules[__name__]
    try:
        import sitecustomize  # noqa: F401  the one that this file stands before
    except ImportError:
        sys.modules[__name__] = sys
    if ASKED in os.environ:
        when_imported("torch", _begin)
