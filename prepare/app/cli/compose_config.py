"""Compose a configuration as Hydra does for a run, and list everything that is wrong with it."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import secrets
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from prepare.app.cli.override_errors import (
    Menu,
    Override,
    explain,
    filled_by,
    hides_the_model,
    is_certain,
    no_values,
    unreadable,
    within,
)
from prepare.app.cli.resolve_config import (
    NO_VALUE,
    as_written,
    choices_in,
    overrides_in,
    plain_mapping,
    resolved,
    with_a_decoder,
)
from prepare.app.job.settings import NO_MODEL, group_names, level_names, read_settings
from prepare.core.utils.folders import conf_dir
from prepare.errors import ConfigError, Problem
from prepare.stages.registry import ordered_stages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

CONFIG_NAME = "config"
# The name under which the steps of `recipe=FILE` are stored.
_RECIPE = "recipe_steps"
# Hydra 1.4 emulates no older version, and warns if it is asked to.
BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
# Hydra 1.3 silently replaces what is stored under a name; 1.4 has an argument for it.
REPLACE: dict[str, Any] = {} if BASE else {"replace": True}
# The errors that Hydra raises for a wrong override. The built-in ones: for a group given null, a mapping
# or an empty list, and for a key set below null.
BUILT_IN = (ValueError, TypeError, AssertionError, AttributeError)
ERRORS = (HydraException, OmegaConfBaseException, *BUILT_IN)

_SLUG_LENGTH = 100
# Overrides that change how a sweep runs and not its results: they are not part of a name.
_NOT_NAMED = ("isolate=", "resume=", "overwrite=")


def unique() -> str:
    """Return a name that no two runs share, on any machine: microseconds, process and two random bytes."""
    return f"{datetime.now().astimezone():%f}-{os.getpid()}-{secrets.token_hex(2)}"


def slug(overrides: Iterable[str]) -> str:
    """Return the overrides of a row as the name of a folder: ASCII, without slashes, 100 letters at most."""
    text = ",".join(word for word in map(str, overrides) if not word.startswith(_NOT_NAMED))
    name = re.sub(r"[^\w.=,-]+", "-", text, flags=re.ASCII).strip("-.")
    if len(name) > _SLUG_LENGTH:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        name = f"{name[: _SLUG_LENGTH - 9]}-{digest}"
    return name or "defaults"


# Registered on import: the worker of a launcher names the folder of a row before it runs the task.
# OmegaConf 2.4 renames the function; 2.3 has the new name too, for an older function.
_register: Callable[..., None] = (
    OmegaConf.register_new_resolver if BASE else OmegaConf.register_resolver
)
_register("prepare_unique", unique, use_cache=True, replace=True)
_register("prepare_slug", slug, replace=True)
_register("prepare_pid", os.getpid, replace=True)


def store_defaults() -> None:
    """Store our values for the launchers of sweeps (`hydra/launcher`), installed or not, and of stages."""
    # Plugins store theirs once, when they are discovered. A file in a folder hydra/launcher would do as
    # well, but Hydra warns that it has the name of what a plugin stores.
    Plugins.instance()
    for path in sorted((conf_dir() / "launcher").glob("*.yaml")):
        node = OmegaConf.to_container(OmegaConf.load(path))
        store = ConfigStore.instance()
        store.store(path.stem, node, group="hydra/launcher", provider="prepare", **REPLACE)
    stages = {cls.name: cls.defaults() for cls in ordered_stages() if not cls.groups}
    ConfigStore.instance().store("stages", stages, provider="prepare", **REPLACE)
    if f"{_RECIPE}.yaml" not in ConfigStore.instance().repo:
        store_recipe({})


def store_recipe(steps: Mapping[str, Any]) -> None:
    """Store the steps of a recipe, to which those of groups and overrides are added."""
    ConfigStore.instance().store(_RECIPE, {"steps": dict(steps)}, provider="prepare", **REPLACE)


@contextmanager
def composing(config_dir: str | None = None, config_name: str | None = None) -> Iterator[Composer]:
    """Initialize Hydra and return a composer; `config_dir` is searched before our own folder."""
    always, folders = [], []
    if config_dir and Path(config_dir).is_dir():
        folders = [Path(config_dir).resolve()]
        always = [f"hydra.searchpath=[file://{folders[0]}]"]
    store_defaults()
    with hydra.initialize_config_dir(config_dir=str(conf_dir()), **BASE):
        yield Composer(config_name, always=always, folders=folders)


class Composer:
    """Compose overrides as Hydra does for a run, and list what is wrong with them.

    Hydra must be initialized: by `hydra.main`, or by `composing()`.
    """

    def __init__(
        self,
        config_name: str | None = None,
        always: Sequence[str] = (),
        folders: Sequence[Path] = (),
    ) -> None:
        """`always` are overrides of every composition, `folders` those that they add to the search."""
        self._folders = folders
        self._name = config_name or CONFIG_NAME
        self.always = list(always)
        self.loader = GlobalHydra.instance().config_loader()
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """Return the options of each of our groups."""
        # The loader's own method first copies every source of configurations.
        repository = cast("Any", self.loader).repository
        groups = {
            group: repository.get_group_options(group) for group in (*group_names(), *level_names())
        }
        for group, options in groups.items():
            own = {path.stem for folder in self._folders for path in folder.glob(f"{group}/*.yaml")}
            groups[group] = sorted({*options, *own})
        return groups

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Return the configuration of a run with these overrides. Raises one of ERRORS."""
        key = tuple(overrides)
        if key not in self._composed:
            every = [*self.always, *overrides]
            self._composed[key] = hydra.compose(self._name, every, return_hydra_config=True)
        return self._composed[key]

    def problems(self, config: DictConfig) -> list[Problem]:
        """Return every problem of a composed configuration."""
        plain, problems = resolved(config)
        # The message that no model is chosen says more.
        missing = ("model._target_", NO_VALUE)
        problems = [problem for problem in problems if (problem.where, problem.wrong) != missing]
        unresolved = [problem.where for problem in problems]
        # Hydra's own values (the output folder, the number of the job) exist only in the job.
        problems = [problem for problem in problems if "${hydra:" not in problem.wrong]
        models: list[str] = []
        model = plain.get("model", {})
        if isinstance(model, dict) and model.get("_target_") is None:
            # Listing them takes as long as composing, so only if they are shown.
            models = [name for name in self.groups["model"] if name != "custom"]
        try:
            read_settings(plain, choices=choices_in(config.hydra), models=models)
        except ConfigError as error:
            for problem in error.problems:
                if not _follows(problem, unresolved):
                    problems.append(with_a_decoder(problem, config))
        return _without_echo([*self._lists(overrides_in(config.hydra)), *problems])

    def rows(self, config: DictConfig) -> tuple[list[list[str]], list[Problem]]:
        """Return the overrides of every row of a sweep, and the problems of keys without values."""
        params = config.hydra.sweeper.get("params") or {}
        params = [f"{key}={value}" for key, value in params.items()]
        return self.expand([*params, *overrides_in(config.hydra)])

    def expand(self, overrides: Sequence[str]) -> tuple[list[list[str]], list[Problem]]:
        """Return every combination of the values given with commas, in the order of Hydra's basic sweeper.

        A key without values is left out, and is among the problems.
        """
        values: dict[str, list[str]] = {}
        empty = []
        parser = OverridesParser.create(config_loader=self.loader)
        for parsed in parser.parse_overrides(list(overrides)):
            key = parsed.get_key_element()
            values[key] = [parsed.input_line or ""]
            if parsed.is_sweep_override() and parsed.is_discrete_sweep():
                values[key] = [f"{key}={value}" for value in _swept(parsed)]
            if not values[key]:
                del values[key]
                empty.append(no_values(key, parsed.get_value_string(), self.groups))
        return [list(row) for row in itertools.product(*values.values())], empty

    def diagnose(self, overrides: Sequence[str], *, multirun: bool) -> list[Problem]:
        """Return the problems of overrides that Hydra refused; empty if the cause is unknown."""
        readable, problems = self._readable(overrides)
        texts = [override.text for override in readable]
        rows, empty = self.expand(texts) if multirun else ([texts], [])
        return _without_echo(dict.fromkeys([*problems, *empty, *self.examine(rows)]))

    def examine(self, rows: Iterable[Sequence[str]]) -> list[Problem]:
        """Return every problem of these lists of overrides, each once."""
        problems: dict[Problem, None] = {}
        for row in rows:
            try:
                config = self.compose(row)
            except ERRORS:
                problems |= dict.fromkeys(self._refused_problems(row))
            else:
                problems |= dict.fromkeys(self.problems(config))
        return list(problems)

    def _refused_problems(self, row: Sequence[str]) -> list[Problem]:
        """Return the problems of overrides that do not compose: add one at a time, and skip the refused.

        Options of groups come first, as in Hydra, where a key may be set before the option that adds it.
        Keys that a wrong option would have filled are not reported.
        """
        readable, problems = self._readable(row)
        accepted: list[str] = []
        unfilled: set[str] = set()
        for override in sorted(readable, key=lambda override: override.key not in self.groups):
            try:
                self.compose([*accepted, override.text])
                accepted.append(override.text)
            except ERRORS as error:
                known = plain_mapping(self.compose(accepted))
                if override.key in self.groups:
                    unfilled |= set(filled_by(override.key))
                elif not is_certain(override.key, unfilled, known):
                    continue
                message = str(error.__cause__ or error)
                problems.append(explain(override, Menu(self.groups, known), message))
        given = [override.key for override in readable if override.key not in self.groups]
        for problem in self.problems(self.compose(accepted)):
            filled = problem.where.split(".")[0] not in unfilled
            if filled or any(within(problem.where, key) for key in given):
                problems.append(problem)
        return problems

    def _lists(self, overrides: Sequence[str]) -> list[Problem]:
        """Return the problems of groups given a list, of which Hydra would use the last item."""
        readable, _ = self._readable(text for text in overrides if "[" in text)
        menu = Menu(self.groups, {})
        return [
            explain(override, menu, "")
            for override in readable
            if override.key in self.groups and isinstance(override.value, list)
        ]

    def _readable(self, overrides: Iterable[str]) -> tuple[list[Override], list[Problem]]:
        """Return the overrides that can be parsed, and the problems of the others."""
        readable, problems = [], []
        for text in overrides:
            if override := read_override(text):
                readable.append(override)
            else:
                problems.append(unreadable(text, self.groups))
        return readable, problems


def read_override(text: str) -> Override | None:
    """Return an override as Hydra parses it, without a value if it has several; None if it cannot."""
    try:
        parsed = OverridesParser.create().parse_override(text)
        several = parsed.is_sweep_override()
        value = None if several else parsed.value()
    except HydraException:
        return None
    if "[" in parsed.key_or_group:  # accepted by Hydra 1.4
        return None
    kind = {OverrideType.CHANGE: "set", OverrideType.DEL: "delete"}.get(parsed.type, "add")
    return Override(text, kind, parsed.key_or_group, value, several)


def _swept(parsed: Any) -> list[str]:
    try:
        return [as_written(value) for value in parsed.sweep_string_iterator()]
    except ValueError:  # a range with a step of 0
        return []


def _follows(problem: Problem, unresolved: Collection[str]) -> bool:
    """Return whether a problem only follows from a value that could not be resolved."""
    if problem.wrong == NO_MODEL:
        return "model._target_" in unresolved
    return any(within(key, problem.where) for key in unresolved)


def _without_echo(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems, without that of a missing model if another problem explains it."""
    reported = list(problems)
    others = [problem for problem in reported if problem.wrong != NO_MODEL]
    return others if any(map(hides_the_model, others)) else reported
