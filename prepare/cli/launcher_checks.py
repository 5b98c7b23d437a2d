"""Check the launcher and the sweeper that a sweep asks for, before Hydra starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from prepare.cli.override_errors import HYDRAS, several_options
from prepare.errors import Problem

# What each needs, and the extra that brings it; `basic` needs nothing.
_NEEDS = {
    "joblib": ("joblib", "hydra_plugins.hydra_joblib_launcher"),
    "submitit_local": ("submitit", "hydra_plugins.hydra_submitit_launcher"),
    "submitit_slurm": ("submitit", "hydra_plugins.hydra_submitit_launcher"),
    "ray": ("ray", "hydra_plugins.hydra_ray_launcher"),
}


def launcher_problems(
    choices: Mapping[str, Any], *, launching: Mapping[str, Any], sweeping: Mapping[str, Any]
) -> Iterator[Problem]:
    """What would stop Hydra before the first job; given its choices, and its two configurations."""
    # One that is given a list is no choice to Hydra.
    yield from (several_options(group) for group in HYDRAS if choices.get(group) is None)
    launcher = choices.get("hydra/launcher")
    extra, *modules = _NEEDS.get(launcher, ("", ""))
    missing = [name for name in (extra, *modules) if name and not _is_there(name)]
    if missing:
        remedy = f"install the extra: pip install 'torch-prepare[{extra}]'"
        yield Problem("hydra/launcher", f"{launcher} needs {missing[0]}, which is not here", remedy)
    elif not _names_a_class(launching):
        yield _no_class("hydra.launcher", launching)
    if not _names_a_class(sweeping):
        yield _no_class("hydra.sweeper", sweeping)
    size = sweeping.get("max_batch_size")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        remedy = "give a whole number from 1, or null for all at once"
        yield Problem("hydra.sweeper.max_batch_size", f"{size!r} is no size of a batch", remedy)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _names_a_class(config: Mapping[str, Any]) -> bool:
    module, _, name = str(config.get("_target_")).rpartition(".")
    return bool(module and name.isidentifier() and _is_there(module))


def _no_class(where: str, config: Mapping[str, Any]) -> Problem:
    group = where.replace(".", "/")
    wrong = f"{config.get('_target_')!r} is no class that can be imported"
    return Problem(f"{where}._target_", wrong, f"choose one that is installed with {group}=NAME")
