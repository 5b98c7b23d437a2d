"""Check the launcher and the sweeper that a sweep asks for, before Hydra starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from prepare.app.cli.override_errors import HYDRAS, SWEEPS, several_options
from prepare.errors import Problem

# The extra and the modules that each launcher needs; `basic` needs none.
_NEEDS = {
    "joblib": ("joblib", "hydra_plugins.hydra_joblib_launcher"),
    "submitit_local": ("submitit", "hydra_plugins.hydra_submitit_launcher"),
    "submitit_slurm": ("submitit", "hydra_plugins.hydra_submitit_launcher"),
    "ray": ("ray", "hydra_plugins.hydra_ray_launcher"),
}


def launcher_problems(
    choices: Mapping[str, Any], *, launching: Any, sweeping: Any
) -> Iterator[Problem]:
    """Return what would stop Hydra before the first job, from its choices and its two configurations."""
    # Hydra records no choice for a group that is given a list.
    yield from (several_options(group) for group in HYDRAS if choices.get(group) is None)
    if groups := [*group_problems(launching=launching, sweeping=sweeping)]:
        yield from groups
        return
    launcher = str(choices.get("hydra/launcher"))
    extra, *modules = _NEEDS.get(launcher, ("", ""))
    missing = [name for name in (extra, *modules) if name and not _is_installed(name)]
    if missing:
        remedy = f"install the extra: pip install 'torch-prepare[{extra}]'"
        yield Problem(
            "hydra/launcher", f"{launcher} needs {missing[0]}, which is not installed", remedy
        )
    elif not _names_a_class(launching):
        wrong = f"{launching.get('_target_')!r} is not a class that can be imported"
        remedy = "choose one that is installed with hydra/launcher=NAME"
        yield Problem("hydra.launcher._target_", wrong, remedy)
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


def _names_a_class(config: Mapping[str, Any]) -> bool:
    module, _, name = str(config.get("_target_")).rpartition(".")
    return bool(module and name.isidentifier() and _is_installed(module))
