"""Composes a configuration as Hydra would for a run, and says what is wrong with it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from prepare.cli import folder_names
from prepare.cli import override_errors as mistakes
from prepare.cli.override_errors import Menu, Override
from prepare.cli.resolve_config import (
    NO_VALUE,
    as_written,
    choices_in,
    overrides_in,
    resolved,
    with_a_decoder,
)
from prepare.core.utils.conf_folder import conf_dir
from prepare.errors import ConfigError, Problem
from prepare.job.settings import GROUPS, NONE_CHOSEN, read_settings

CONFIG_NAME = "config"
# Hydra 1.4 has no choice of its past ways any more, and warns of the question.
BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
# Hydra 1.3 replaces what is stored under a name without a word; 1.4 wants to be told to.
REPLACE = {} if BASE else {"replace": True}
# What Hydra raises at what a user wrote. The built-in ones: at a group given null, a mapping or a list
# of no names, and at a key set where null is.
BUILT_IN = (ValueError, TypeError, AssertionError, AttributeError)
ERRORS = (HydraException, OmegaConfBaseException, *BUILT_IN)

# Registered when this file is imported: a launcher's worker names a row's folder before its task.
# OmegaConf 2.4 changes the name; 2.3 has the new name too, for something older.
_register = OmegaConf.register_resolver if not BASE else OmegaConf.register_new_resolver
_register("prepare_unique", folder_names.unique, use_cache=True, replace=True)
_register("prepare_slug", folder_names.slug, replace=True)
_register("prepare_pid", os.getpid, replace=True)


def store_launchers() -> None:
    """Store our values for the launchers of sweeps (`hydra/launcher`), installed or not."""
    # Plugins store theirs when they are found, which is once. A file in hydra/launcher of our own would
    # do, but for a warning that it has the name of what a plugin stores.
    Plugins.instance()
    for path in sorted((conf_dir() / "launcher").glob("*.yaml")):
        node = OmegaConf.to_container(OmegaConf.load(path))
        store = ConfigStore.instance()
        store.store(path.stem, node, group="hydra/launcher", provider="prepare", **REPLACE)


@contextmanager
def composing(config_dir: str | None = None) -> Iterator[Composer]:
    """A composer where Hydra is not running; `config_dir` is searched before our own."""
    always = []
    if config_dir and Path(config_dir).is_dir():
        always = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"]
    store_launchers()
    with hydra.initialize_config_dir(config_dir=str(conf_dir()), **BASE):
        yield Composer(always=always)


class Composer:
    """Composes overrides, as Hydra would for a run, and says what is wrong with them.

    Hydra has to be initialized: by `hydra.main`, or by `composing()`.
    """

    def __init__(self, config_name: str | None = None, always: Sequence[str] = ()) -> None:
        self._name = config_name or CONFIG_NAME
        self._always = list(always)
        self._loader = GlobalHydra.instance().config_loader()
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """The options of each of our groups."""
        # The loader's own method copies every source of configurations before it answers.
        repository = self._loader.repository
        return {group: repository.get_group_options(group) for group in GROUPS}

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration of a run with these overrides; raises one of ERRORS."""
        key = tuple(overrides)
        if key not in self._composed:
            every = [*self._always, *overrides]
            self._composed[key] = hydra.compose(self._name, every, return_hydra_config=True)
        return self._composed[key]

    def problems(self, config: DictConfig) -> list[Problem]:
        """Every mistake in a composed configuration."""
        plain, problems = resolved(config)
        # The word that no model is chosen says more.
        missing = ("model._target_", NO_VALUE)
        problems = [problem for problem in problems if (problem.where, problem.wrong) != missing]
        broken = [problem.where for problem in problems]
        # Hydra's own values (the output folder, the number of the job) are there in the job only.
        problems = [problem for problem in problems if "${hydra:" not in problem.wrong]
        models: list[str] = []
        model = plain.get("model", {})
        if isinstance(model, dict) and model.get("_target_") is None:
            # To list them takes as long as to compose, so only where they are shown.
            models = [name for name in self.groups["model"] if name != "custom"]
        try:
            read_settings(plain, choices=choices_in(config.hydra), models=models)
        except ConfigError as error:
            for problem in error.problems:
                if not _follows(problem, broken):
                    problems.append(with_a_decoder(problem, config))
        return _without_echo([*self._lists(overrides_in(config.hydra)), *problems])

    def rows(self, config: DictConfig) -> tuple[list[list[str]] | None, list[Problem]]:
        """The overrides of every row of a sweep, and the words that would leave it without rows.

        None stands for the rows where the sweeper decides as it goes.
        """
        sweeper = config.hydra.sweeper
        if not str(sweeper.get("_target_")).endswith(".BasicSweeper"):
            return None, []
        params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
        return self.expand([*params, *overrides_in(config.hydra)])

    def expand(self, overrides: Sequence[str]) -> tuple[list[list[str]], list[Problem]]:
        """Every combination of the values given with commas, in the order of Hydra's basic sweeper.

        A key whose values are none is left out, and is among the problems.
        """
        values: dict[str, list[str]] = {}
        empty = []
        parser = OverridesParser.create(config_loader=self._loader)
        for parsed in parser.parse_overrides(list(overrides)):
            key = parsed.get_key_element()
            values[key] = [parsed.input_line]
            if parsed.is_sweep_override() and parsed.is_discrete_sweep():
                values[key] = [f"{key}={value}" for value in _swept(parsed)]
            if not values[key]:
                del values[key]
                empty.append(mistakes.no_values(key, parsed.get_value_string(), self.groups))
        return [list(row) for row in itertools.product(*values.values())], empty

    def diagnose(self, overrides: Sequence[str], *, multirun: bool) -> list[Problem]:
        """What is wrong with overrides that Hydra has refused; empty where that cannot be told."""
        readable, problems = self._readable(overrides)
        texts = [override.text for override in readable]
        rows, empty = self.expand(texts) if multirun else ([texts], [])
        return _without_echo(dict.fromkeys([*problems, *empty, *self.examine(rows)]))

    def examine(self, rows: Iterable[Sequence[str]]) -> list[Problem]:
        """Every mistake in these lists of overrides, each named once."""
        found: dict[Problem, None] = {}
        for row in rows:
            try:
                config = self.compose(row)
            except ERRORS:
                found |= dict.fromkeys(self._salvaged(row))
            else:
                found |= dict.fromkeys(self.problems(config))
        return list(found)

    def _salvaged(self, row: Sequence[str]) -> list[Problem]:
        """The mistakes in overrides that do not compose: adds one after the other, as far as they do.

        Choices come first, as in Hydra, where a key may be set before the choice that brings it.
        What a failed choice would have filled is not complained of.
        """
        readable, problems = self._readable(row)
        accepted: list[str] = []
        unfilled: set[str] = set()
        for override in sorted(readable, key=lambda one: one.key not in self.groups):
            try:
                self.compose([*accepted, override.text])
                accepted.append(override.text)
            except ERRORS as error:
                known = OmegaConf.to_container(self.compose(accepted), resolve=False)
                if override.key in self.groups:
                    unfilled |= set(mistakes.filled_by(override.key))
                elif not mistakes.is_certain(override.key, unfilled, known):
                    continue
                said = str(error.__cause__ or error)
                problems.append(mistakes.explain(override, Menu(self.groups, known), said))
        given = [override.key for override in readable if override.key not in self.groups]
        for problem in self.problems(self.compose(accepted)):
            filled = problem.where.split(".")[0] not in unfilled
            if filled or any(mistakes.within(problem.where, key) for key in given):
                problems.append(problem)
        return problems

    def _lists(self, overrides: Sequence[str]) -> list[Problem]:
        """The groups that are given a list: Hydra would merge all in it, and the last would win."""
        readable, _ = self._readable(text for text in overrides if "[" in text)
        menu = Menu(self.groups, {})
        return [
            mistakes.explain(override, menu, "")
            for override in readable
            if override.key in self.groups and isinstance(override.value, list)
        ]

    def _readable(self, overrides: Iterable[str]) -> tuple[list[Override], list[Problem]]:
        """The overrides that can be parsed, and what is wrong with the others."""
        parser = OverridesParser.create()
        kinds = {OverrideType.CHANGE: "set", OverrideType.DEL: "delete"}
        readable, problems = [], []
        for text in overrides:
            try:
                parsed = parser.parse_override(text)
                several = parsed.is_sweep_override()
                value = None if several else parsed.value()
            except HydraException:
                parsed = None
            # Hydra 1.4 reads brackets in a key.
            if parsed is None or "[" in parsed.key_or_group:
                problems.append(mistakes.unreadable(text, self.groups))
                continue
            kind = kinds.get(parsed.type, "add")
            readable.append(Override(text, kind, parsed.key_or_group, value, several))
        return readable, problems


def _swept(parsed: Any) -> list[str]:
    try:
        return [as_written(value) for value in parsed.sweep_string_iterator()]
    except ValueError:  # a range in steps of 0
        return []


def _follows(problem: Problem, broken: Collection[str]) -> bool:
    """Whether a problem only comes of a value that could not be resolved."""
    if problem.wrong == NONE_CHOSEN:
        return "model._target_" in broken
    return any(mistakes.within(at, problem.where) for at in broken)


def _without_echo(problems: Iterable[Problem]) -> list[Problem]:
    """The problems, without that of no model being chosen where another of them explains it."""
    found = list(problems)
    others = [problem for problem in found if problem.wrong != NONE_CHOSEN]
    return others if any(map(mistakes.hides_the_model, others)) else found
