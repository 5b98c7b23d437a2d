"""Resolve a composed configuration to plain data, and list what in it cannot be resolved."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from prepare.app.cli.override_errors import first_sentence
from prepare.app.job.settings import group_names
from prepare.core.utils import files
from prepare.core.utils.folders import own_name
from prepare.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_VALUE = "has no value yet (???)"
# The keys that name the folders that Hydra makes.
_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")


def resolved(config: DictConfig) -> tuple[dict[str, Any], list[Problem]]:
    """Return the configuration as plain data with every interpolation resolved, and the problems.

    A value that cannot be resolved is None in the plain data.
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
        if value is None and "${hydra:" in (written := str(as_composed(node, key))):
            problems.append(Problem(where, f"{written} cannot be resolved: it has no value here"))
        if isinstance(value, DictConfig):
            return {str(inner): read(value, inner) for inner in value}
        if isinstance(value, ListConfig):
            return [read(value, index) for index in range(len(value))]
        return value

    return {str(key): read(config, key) for key in config if key != "hydra"}, problems


def folder_problems(config: DictConfig) -> list[Problem]:
    """Return the problems of the folders that Hydra makes; Hydra would name one None, or stop."""
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
            # The number of a job, and Hydra's own values, are known only in the job.
            later = isinstance(error, InterpolationToMissingValueError) and name == "subdir"
            problem = _unresolved(node, name, error)
            later = later or ("${hydra:" in problem.wrong and where != "hydra.sweep.dir")
            if not later:
                problems.append(problem)
    return problems


def run_folder(config: DictConfig) -> Path | None:
    """Return the folder of a single run, made if it has a fixed name; None if it is not a folder yet."""
    try:
        folder = str(config.hydra.run.dir)
    except OmegaConfBaseException:
        return None
    if not OmegaConf.is_interpolation(config.hydra.run, "dir"):
        with suppress(OSError):  # Hydra meets the same error and reports it
            Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder) if files.is_folder(folder) else None


def log_configuration(about: DictConfig) -> dict[str, Any] | None:
    """Return Hydra's configuration of the logs for another process, as for `logging.config`."""
    plain = cast("dict[str, Any] | None", OmegaConf.to_container(about.job_logging, resolve=True))
    if plain is None or plain.get("root") is None:
        return None
    verbose = about.verbose
    if verbose is True:
        plain["root"]["level"] = "DEBUG"
    elif verbose:
        for name in [verbose] if isinstance(verbose, str) else verbose:
            plain.setdefault("loggers", {}).setdefault(name, {})["level"] = "DEBUG"
    return plain


def shared_folder(config: DictConfig, rows: Sequence[Any]) -> list[Problem]:
    """Return the problem of a sweep whose rows would all write into one folder."""
    where = "hydra.sweep.subdir"
    subdir = str(as_composed(config.hydra.sweep, "subdir"))
    if len(rows) < 2 or "${" in subdir or subdir == "???":
        return []
    return [
        Problem(
            where, f"{subdir!r} is one folder for {len(rows)} runs", "add ${hydra.job.num} to it"
        )
    ]


def shared_save(rows: Sequence[Sequence[str]]) -> list[Problem]:
    """Return the problem of a sweep of which several rows would write the same file of weights."""
    paths = [word.partition("=")[2] for row in rows for word in row if word.startswith("save=")]
    shared = [p for p in paths if paths.count(p) > 1 and p != "null" and "${" not in p]
    if not shared:
        return []
    wrong = f"{shared[0]!r} is one file for {len(shared)} runs"
    return [Problem("save", wrong, "save from single runs, without --multirun")]


def resume_problems(config: DictConfig, *, sweep: bool) -> list[Problem]:
    """Return the problems of `resume=true`, which needs a sweep that can be resumed."""
    if config.get("resume") is not True:
        return []
    if not sweep:
        remedy = "add --multirun and hydra.sweep.dir=FOLDER"
        return [Problem("resume", "resumes a sweep, and this is a single run", remedy)]
    if "${prepare_unique" in str(as_composed(config.hydra.sweep, "dir")):
        wrong = "a new folder has nothing to resume"
        return [Problem("resume", wrong, "give the folder of the sweep as hydra.sweep.dir=FOLDER")]
    return []


def as_mapping(config: DictConfig, key: str) -> dict[str, Any]:
    """Return the unresolved value of a key; an empty mapping if it is not a mapping."""
    value = as_composed(config, key)
    return value if isinstance(value, dict) else {}


def plain_mapping(config: DictConfig) -> dict[str, Any]:
    """Return a configuration as plain data, with its interpolations as they are written."""
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))


def overrides_in(about: DictConfig) -> list[str]:
    """Return the overrides of a run as they were written; an interpolation belongs to its own key."""
    return list(map(as_written, plain_mapping(about.overrides)["task"]))


def choices_in(about: DictConfig) -> dict[str, Any]:
    """Return the own name of the option chosen in each of our groups, without those that were dropped."""
    chosen = about.runtime.choices
    return {group: own_name(group, chosen[group]) for group in group_names() if group in chosen}


def with_a_decoder(problem: Problem, config: DictConfig) -> Problem:
    """Add to the remedy if a number was expected and an environment variable gave a text."""
    above, _, key = problem.where.rpartition(".")
    node = OmegaConf.select(config, above) if above else config
    if not isinstance(node, DictConfig) or key not in node:
        return problem
    written = str(as_composed(node, key))
    if "${oc.env:" in written and problem.remedy.startswith("give "):
        remedy = f"""{problem.remedy}, and not a text, as in '{problem.where}="${{oc.decode:{written}}}"'"""
        return replace(problem, remedy=remedy)
    return problem


def as_written(override: Any) -> str:
    r"""Return an override without the escapes that Hydra's sweeper adds to an interpolation, `$\{seed\}`."""
    return re.sub(r"\$\\{.*?\\}", lambda match: match[0].replace("\\", ""), str(override))


def _unresolved(node: DictConfig | ListConfig, key: Any, error: Exception) -> Problem:
    wrong = f"{as_composed(node, key)} cannot be resolved: {first_sentence(str(error))}"
    return Problem(node._get_full_key(key), wrong)


def as_composed(node: DictConfig | ListConfig, key: Any) -> Any:
    """Return the unresolved value of a key as plain data."""
    return cast("Any", OmegaConf.to_container(node, resolve=False))[key]
