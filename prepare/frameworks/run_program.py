"""Run a Python program unchanged, with its networks prepared: `prepare run RECIPE PROGRAM`.

Python itself runs the program: under `runpy` its `__main__`, its traceback and the processes that it starts
would be others. `sitecustomize` begins the preparation when torch is imported.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NoReturn

from prepare.errors import ConfigError
from prepare.frameworks.start import sitecustomize
from prepare.pipeline import Pipeline

USAGE = "run RECIPE [--report FOLDER] [--module PATTERN] PROGRAM [ARGS...]"


def run_program(argv: list[str], report: str) -> NoReturn:
    """Become `python PROGRAM ARGS...`, or `python -m MODULE ARGS...`, with the words after the recipe.

    `report` is the dotted name of what writes the pages into the folder of `--report`.

    Raises:
        ConfigError: the words are wrong.
        RecipeError: the recipe cannot be read.
    """
    given, words = {"--report": "", "--module": "*"}, argv[1:]
    while len(words) > 1 and words[0] in given:
        given[words[0]], words = words[1], words[2:]
    if not words or argv[0].startswith("-") or (words[0].startswith("-") and words[0] != "-m"):
        raise ConfigError("run", "a recipe and a program are needed", f"prepare {USAGE}")
    Pipeline.load(argv[0])
    asked = [str(Path(argv[0]).resolve()), given["--module"], given["--report"], report]
    paths = [str(Path(sitecustomize.__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ[sitecustomize.ASKED] = json.dumps(asked)
    os.execv(sys.executable, [*sys.orig_argv[:1], *_flags(), *words])  # noqa: S606


def _flags() -> list[str]:
    """Return the flags of Python itself, as in `python -W ignore -m prepare`."""
    words = sys.orig_argv
    ends = (at for at in range(len(words)) if words[at : at + 2] == ["-m", "prepare"])
    return words[1 : next(ends, 1)]
