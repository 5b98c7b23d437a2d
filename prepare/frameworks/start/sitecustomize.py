"""Begin in a Python process what `prepare run` has declared, once the process imports torch.

Python imports a file of this name when it starts; `prepare run` puts this folder into PYTHONPATH. So ranks
that Lightning or `torch.multiprocessing` start are prepared alike.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What `prepare run` was asked for, as JSON; and whether this is the program, and no process that it started.
ASKED, FIRST = "PREPARE_OUTSIDE", "PREPARE_OUTSIDE_FIRST"


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
    from prepare.frameworks.outside import outside

    recipe, module, folder, report = json.loads(os.environ[ASKED])
    is_first = os.environ.pop(FIRST, "")
    outside(recipe, module=module, report=(report, folder), is_told=bool(is_first))


if __name__ == "sitecustomize":
    sys.path[:] = [each for each in sys.path if each != str(Path(__file__).parent)]
    del sys.modules[__name__]
    try:
        import sitecustomize  # noqa: F401  the one that this file stands before
    except ImportError:
        sys.modules[__name__] = sys
    if ASKED in os.environ:
        when_imported("torch", _begin)
