"""Reads a composed configuration: plain data out of it, and what in it cannot be resolved."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from prepare.cli import override_errors
from prepare.errors import Problem
from prepare.job.settings import GROUPS

NO_VALUE = "has no value yet (???)"
# Where Hydra is to make folders.
_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")


def resolved(config: DictConfig) -> tuple[dict[str, Any], list[Problem]]:
    """The configuration as plain data, every interpolation resolved, and what could not be.

    What could not be resolved is None in the plain data.
    """
    problems: list[Problem] = []

    def read(node: DictConfig | ListConfig, key: Any) -> Any:
        where = node._get_full_key(key)
        if OmegaConf.is_missing(node, key):
            problems.append(Problem(where, NO_VALUE, f"set {where}=value"))
            return None
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            problems.append(_unresolved(node, key, error))
            return None
        if value is None and "${hydra:" in (written := str(_written(node, key))):
            problems.append(Problem(where, f"{written} cannot be resolved: it has no value here"))
        if isinstance(value, DictConfig):
            return {str(inner): read(value, inner) for inner in value}
        if isinstance(value, ListConfig):
            return [read(value, index) for index in range(len(value))]
        return value

    return {str(key): read(config, key) for key in config if key != "hydra"}, problems


def folder_problems(config: DictConfig) -> list[Problem]:
    """What is wrong with the folders that Hydra is to make; it would call one None, or stop."""
    problems = []
    for where in _FOLDERS:
        node = OmegaConf.select(config, where.rpartition(".")[0])
        name = where.rpartition(".")[2]
        if OmegaConf.is_missing(node, name):
            problems.append(Problem(where, NO_VALUE, f"set {where}=FOLDER"))
            continue
        try:
            node[name]
        except OmegaConfBaseException as error:
            # The number of a job is known in the job only, and so is what is asked of Hydra itself.
            later = isinstance(error, InterpolationToMissingValueError) and name == "subdir"
            problem = _unresolved(node, name, error)
            later = later or ("${hydra:" in problem.wrong and where != "hydra.sweep.dir")
            if not later:
                problems.append(problem)
    return problems


def shared_folder(config: DictConfig, rows: Sequence[Any]) -> list[Problem]:
    """The problem of a sweep whose rows would all write into one folder."""
    where = "hydra.sweep.subdir"
    subdir = str(_written(config.hydra.sweep, "subdir"))
    if len(rows) < 2 or "${" in subdir or subdir == "???":
        return []
    return [
        Problem(
            where, f"{subdir!r} is one folder for {len(rows)} runs", "put ${hydra.job.num} in it"
        )
    ]


def shared_save(rows: Sequence[Sequence[str]]) -> list[Problem]:
    """The problem of a sweep of which several rows would write the same file of weights."""
    named = [word.partition("=")[2] for row in rows for word in row if word.startswith("save=")]
    shared = [
        name for name in named if named.count(name) > 1 and name != "null" and "${" not in name
    ]
    if not shared:
        return []
    wrong = f"{shared[0]!r} is one file for {len(shared)} runs"
    return [Problem("save", wrong, "save from single runs, without --multirun")]


def resume_problems(
    config: DictConfig, rows: Sequence[Any] | None, *, sweep: bool
) -> list[Problem]:
    """What is wrong with `resume=true`: there has to be a sweep that can be taken up again."""
    if config.get("resume") is not True:
        return []
    if not sweep:
        remedy = "add --multirun and hydra.sweep.dir=FOLDER"
        return [Problem("resume", "is for sweeps, and this is a single run", remedy)]
    if rows is None:
        wrong = "this sweeper chooses its runs as it goes, so that none can be found again"
        return [Problem("resume", wrong, "sweep with hydra/sweeper=basic")]
    if "${prepare_unique" in str(_written(config.hydra.sweep, "dir")):
        wrong = "a new folder has nothing to resume"
        return [Problem("resume", wrong, "give that of the sweep as hydra.sweep.dir=FOLDER")]
    return []


def as_mapping(config: DictConfig, key: str) -> dict[str, Any]:
    """What stands under a key, as it is written; empty where that is no mapping."""
    found = _written(config, key)
    return found if isinstance(found, dict) else {}


def overrides_in(about: DictConfig) -> list[str]:
    """The overrides of a run as they were written; an interpolation in one is for its own key."""
    return list(map(as_written, OmegaConf.to_container(about.overrides, resolve=False)["task"]))


def choices_in(about: DictConfig) -> dict[str, Any]:
    """The option chosen in each of our groups; a group whose choice was dropped is not there."""
    chosen = about.runtime.choices
    return {group: chosen[group] for group in GROUPS if group in chosen}


def with_a_decoder(problem: Problem, config: DictConfig) -> Problem:
    """The problem, with a word more where a number was wanted and the environment gave a text."""
    above, _, key = problem.where.rpartition(".")
    node = OmegaConf.select(config, above) if above else config
    if not isinstance(node, DictConfig) or key not in node:
        return problem
    written = str(_written(node, key))
    if "${oc.env:" in written and problem.remedy.startswith("give "):
        remedy = f"""{problem.remedy}, and not a text, as in '{problem.where}="${{oc.decode:{written}}}"'"""
        return replace(problem, remedy=remedy)
    return problem


def as_written(override: Any) -> str:
    r"""Hydra's sweeper escapes an interpolation, `$\{seed\}`, which means the same."""
    return re.sub(r"\$\\{.*?\\}", lambda found: found[0].replace("\\", ""), str(override))


def _unresolved(node: DictConfig | ListConfig, key: Any, error: Exception) -> Problem:
    said = override_errors.first_sentence(str(error))
    wrong = f"{_written(node, key)} cannot be resolved: {said}"
    return Problem(node._get_full_key(key), wrong)


def _written(node: DictConfig | ListConfig, key: Any) -> Any:
    """The value of a key before it is resolved."""
    return OmegaConf.to_container(node, resolve=False)[key]
