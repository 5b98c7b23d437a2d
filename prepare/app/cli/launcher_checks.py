"""Check the launcher and the sweeper of a sweep, where Hydra itself would end in a traceback."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from prepare.app.cli.override_errors import SWEEPS
from prepare.errors import Problem

# The launchers that need an extra, which has the name of their package.
_NEEDS = {
    "joblib": "joblib",
    "submitit_local": "submitit",
    "submitit_slurm": "submitit",
    "ray": "ray",
}


def launcher_problems(launcher: str, *, launching: Any, sweeping: Any) -> Iterator[Problem]:
    """Return the problems of a launcher, by its name, and of the configurations of launcher and sweeper."""
    if groups := [*group_problems(launching=launching, sweeping=sweeping)]:
        yield from groups
        return
    extra = _NEEDS.get(launcher)
    needed = (extra, f"hydra_plugins.hydra_{extra}_launcher") if extra else ()
    if missing := [name for name in needed if not _is_installed(name)]:
        remedy = f"install the extra: pip install 'torch-prepare[{extra}]'"
        wrong = f"{launcher} needs {missing[0]}, which is not installed"
        yield Problem("hydra/launcher", wrong, remedy)
    if not str(sweeping.get("_target_")).endswith(".BasicSweeper"):
        yield Problem("hydra/sweeper", "only the basic sweeper is supported", SWEEPS)
    size = sweeping.get("max_batch_size")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        remedy = "give a whole number of at least 1, or null for all at once"
        yield Problem("hydra.sweeper.max_batch_size", f"{size!r} is not a batch size", remedy)


def group_problems(*, launching: Any, sweeping: Any) -> Iterator[Problem]:
    """Return the problem of each group that is given a word as a key, `hydra.launcher=joblib`."""
    for key, value in (("launcher", launching), ("sweeper", sweeping)):
        if not isinstance(value, Mapping):
            yield Problem(f"hydra.{key}", "is a group", f"did you mean hydra/{key}={value}?")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
