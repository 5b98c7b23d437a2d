"""Run a Python program unchanged, with its networks prepared: `prepare run RECIPE PROGRAM`.

Python itself runs the program: under `runpy` its `__main__`, its traceback and the processes that it starts
would be others. torch calls `begin` at its import, as a backend: the folder `start`, which is put into
PYTHONPATH, declares it. So ranks that Lightning or `torch.multiprocessing` start are prepared alike.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NoReturn

from prepare.errors import ConfigError
from prepare.pipeline import Pipeline

USAGE = "run RECIPE [--report FOLDER] [--module PATTERN] PROGRAM [ARGS...]"
# What was asked for, as JSON: the recipe, the pattern, and for the program itself the report.
_ASKED = "PREPARE_OUTSIDE"


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
    paths = [str(Path(__file__).with_name("start")), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
    os.environ[_ASKED] = json.dumps(asked)
    # Those of Python itself, as in `python -W ignore -m prepare`.
    flags = [each for each in sys.orig_argv[1 : -len(sys.argv)] if each not in ("-m", "-c")]
    os.execv(sys.executable, [sys.orig_argv[0], *flags, *words])  # noqa: S606


def begin() -> None:
    """Begin what `run_program` has declared; torch calls it at the end of its import."""
    from prepare.frameworks.outside import outside

    recipe, module, *report = json.loads(os.environ[_ASKED])
    os.environ[_ASKED] = json.dumps([recipe, module])  # for what it starts, which tells nothing
    outside(recipe, module=module).report = report
