"""Begin in a Python process that a prepared program starts what `prepare run` has begun in the program.

Python imports a file of this name when it starts; `prepare run` puts this folder into PYTHONPATH. Ranks that
Lightning or `torch.multiprocessing` start are so prepared alike. Nothing happens until torch is imported.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The recipe and the patterns of `prepare run`, as JSON, for the processes that the program starts.
VARIABLE = "PREPARE_OUTSIDE"


def when_imported(name: str, then: Callable[[Any], None]) -> None:
    """Call `then` with the module of this name: now if it was imported, else once it is."""
    if name in sys.modules:
        then(sys.modules[name])
        return

    class Finder(importlib.machinery.PathFinder):
        @classmethod
        def find_spec(cls, fullname: str, *args: Any) -> Any:
            if fullname != name:
                return None
            sys.meta_path.remove(cls)
            spec = importlib.machinery.PathFinder.find_spec(fullname, *args)
            if spec is not None and spec.loader is not None:
                run = spec.loader.exec_module

                def exec_module(module: Any) -> None:
                    run(module)
                    then(module)

                vars(spec.loader)["exec_module"] = exec_module
            return spec

    sys.meta_path.insert(0, Finder)


def _begin(_: Any) -> None:
    import json

    from prepare.frameworks.outside import Outside

    recipe, module = json.loads(os.environ[VARIABLE])
    Outside(recipe, module=module).start()


if __name__ == "sitecustomize":
    sys.path[:] = [each for each in sys.path if each != str(Path(__file__).parent)]
    del sys.modules[__name__]
    try:
        import sitecustomize  # noqa: F401  the one that this file stands before
    except ImportError:
        sys.modules[__name__] = sys.modules.get(__name__, sys)
    if VARIABLE in os.environ:
        when_imported("torch", _begin)
