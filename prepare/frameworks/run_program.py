"""Run a Python program unchanged, as `python train.py args...` would, with its networks prepared."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from prepare.errors import ConfigError
from prepare.frameworks.start import sitecustomize

if TYPE_CHECKING:
    from prepare.frameworks.outside import Outside

USAGE = "run RECIPE [--report FOLDER] [--module PATTERN] PROGRAM [ARGS...]"


def run_program(argv: list[str]) -> tuple[int, Outside, str]:
    """Run `RECIPE [--report FOLDER] [--module PATTERN] (PROGRAM | -m MODULE) [ARGS...]`.

    The recipe is read before the program starts. Returns the exit code of the program, what was prepared, and
    the folder of the report.

    Raises:
        ConfigError: the words are wrong, or the recipe or the program cannot be read.
    """
    given, words = {"--report": "", "--module": "*"}, list(argv)
    recipe = words.pop(0) if words and not words[0].startswith("-") else ""
    while words[:1] and words[0] in given and len(words) > 1:
        given[words[0]], words = words[1], words[2:]
    is_module = words[:1] == ["-m"]
    words = words[is_module:]
    if not recipe or not words or words[0].startswith("-"):
        raise ConfigError("run", "a recipe and a program are needed", f"prepare {USAGE}")
    is_there = importlib.util.find_spec(words[0].partition(".")[0]) if is_module else None
    if not is_there and not (Path(words[0]).is_file() and not is_module):
        remedy = "give a Python file, or -m and a module"
        raise ConfigError("run", f"there is no program {words[0]!r}", remedy)

    from prepare.frameworks.outside import Outside, tell

    session = Outside(recipe, module=given["--module"])
    starts = str(Path(sitecustomize.__file__).parent)
    paths = [starts, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ[sitecustomize.VARIABLE] = json.dumps(
        [str(Path(recipe).resolve()), given["--module"]]
    )
    session.start()
    sys.argv, code = words, 0
    try:
        if is_module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(str(Path(words[0]).absolute()), run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)  # noqa: T201
        code = int(stop.code or 0) if not isinstance(stop.code, str) else 1
    except (Exception, KeyboardInterrupt) as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        # The traceback begins in the program, as without us.
        trace = error.__traceback__
        ours = (__file__, "<frozen runpy>")
        while trace is not None and trace.tb_frame.f_code.co_filename in ours:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    finally:
        tell(session)
    return code, session, given["--report"]
