"""Everything that knows Hydra and OmegaConf: composing, checking before a run, and the task itself."""

from __future__ import annotations

import itertools
import secrets
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from prepare import mistakes, names
from prepare.errors import ConfigError, PrepareError, Problem
from prepare.help import conf_dir
from prepare.job import run
from prepare.mistakes import Menu, Override
from prepare.outcome import FAILED, INTERRUPTED, WRONG
from prepare.record import Job, Record
from prepare.report.terminal import (
    show_outcome,
    show_problems,
    show_row,
    shown_folder,
    stage,
)
from prepare.settings import GROUPS, NONE_CHOSEN, Settings, read_settings
from prepare.sweep import sweep_of, write_planned
from prepare.text import line

CONFIG_NAME = "config"
# Hydra 1.4 has no choice of its past ways any more, and warns of the question.
_BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
# What Hydra raises at what a user wrote. ValueError: a group given null, or a mapping.
ERRORS = (HydraException, OmegaConfBaseException, ValueError)

# Registered when this file is imported: a launcher's worker names a row's folder before its task.
# OmegaConf 2.4 changes the name; 2.3 has the new name too, for something older.
_register = OmegaConf.register_resolver if not _BASE else OmegaConf.register_new_resolver
_register("prepare_unique", names.unique, use_cache=True, replace=True)
_register("prepare_slug", names.slug, replace=True)


@dataclass
class Session:
    """What has become of one command line: whether a task began, and the folder of its sweep."""

    began: bool = False
    sweep: Path | None = None


SESSION: ContextVar[Session | None] = ContextVar("SESSION", default=None)


def launch() -> None:
    """Runs the task under Hydra, with the arguments in `sys.argv`."""
    with _as_before():
        hydra.main(config_path=str(conf_dir()), config_name=CONFIG_NAME, **_BASE)(task)()


def task(config: DictConfig) -> None:
    """One run. In a sweep it never raises, but for Ctrl-C; a single one ends with its exit code."""
    if (session := SESSION.get()) is not None:
        session.began = True
    about = HydraConfig.get()
    single = about.mode == RunMode.RUN
    folder = Path(about.runtime.output_dir)
    choices = _choices(about)
    job = Job(
        number=None if single else about.job.num,
        sweep=None if single else _sweep_name(folder),
        overrides=list(about.overrides.task),
        choices=choices,
    )
    outcome = run(
        lambda: _settings(config, choices),
        Record(folder),
        build=_instantiate,
        job=job,
        stage=stage if single else lambda _: nullcontext(),
    )
    if single:
        show_outcome(outcome, folder)
        raise SystemExit(outcome.code)
    show_row(job, outcome.result)
    if outcome.code == INTERRUPTED:
        raise KeyboardInterrupt


class Checks(Callback):
    """Checks a configuration, and every row of a sweep, before Hydra makes a folder for it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Ends the program with exit code 2 where the configuration is wrong."""
        with _ends_here():
            _stop_at(Composer().problems(config))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """The same for every row of the sweep; then notes which rows there are to be."""
        with _ends_here():
            composer = Composer(kwargs.get("config_name"))
            rows = composer.rows(config)
            _stop_at(composer.examine(rows or []))
            folder = Path(config.hydra.sweep.dir).resolve()
            write_planned(folder, secrets.token_hex(8), rows)
            if (session := SESSION.get()) is not None:
                session.sweep = folder
            line(
                f"{f'{len(rows)} runs' if rows else 'a sweep'} in {shown_folder(folder)}",
                errors=True,
            )


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
        models: list[str] = []
        if OmegaConf.select(config, "model._target_", default=None) is None:
            problems = [problem for problem in problems if problem.where != "model._target_"]
            # To list them takes as long as to compose, so only where they are shown.
            models = [name for name in self.groups["model"] if name != "custom"]
        broken = {problem.where for problem in problems}
        try:
            read_settings(plain, choices=_choices(config.hydra), models=models)
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem.where not in broken]
        return problems

    def rows(self, config: DictConfig) -> list[list[str]] | None:
        """The overrides of every row of a sweep; None where the sweeper decides as it goes."""
        sweeper = config.hydra.sweeper
        if not str(sweeper.get("_target_")).endswith(".BasicSweeper"):
            return None
        params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
        return self.expand([*params, *config.hydra.overrides.task])

    def expand(self, overrides: Sequence[str]) -> list[list[str]]:
        """Every combination of the values given with commas, in the order of Hydra's basic sweeper."""
        values: dict[str, list[str]] = {}
        parser = OverridesParser.create(config_loader=self._loader)
        for parsed in parser.parse_overrides(list(overrides)):
            key = parsed.get_key_element()
            values[key] = [parsed.input_line]
            if parsed.is_sweep_override() and parsed.is_discrete_sweep():
                values[key] = [f"{key}={value}" for value in parsed.sweep_string_iterator()]
        return [list(row) for row in itertools.product(*values.values())]

    def diagnose(self, overrides: Sequence[str], *, multirun: bool) -> list[Problem]:
        """What is wrong with overrides that Hydra has refused; empty where that cannot be told."""
        readable, problems = self._readable(overrides)
        texts = [override.text for override in readable]
        rows = self.expand(texts) if multirun else [texts]
        found = list(dict.fromkeys([*problems, *self.examine(rows)]))
        others = [problem for problem in found if problem.wrong != NONE_CHOSEN]
        return others if any(map(mistakes.hides_the_model, others)) else found

    def examine(self, rows: Iterable[Sequence[str]]) -> list[Problem]:
        """Every mistake in these lists of overrides, each named once."""
        found: dict[Problem, None] = {}
        for row in rows:
            try:
                problems = self.problems(self.compose(row))
            except ERRORS:
                problems = self._salvaged(row)
            found |= dict.fromkeys(problems)
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
                if override.key in self.groups:
                    unfilled |= set(mistakes.filled_by(override.key))
                elif override.key.split(".")[0] in unfilled:
                    continue
                known = OmegaConf.to_container(self.compose(accepted), resolve=False)
                menu = Menu(self.groups, known)
                said = str(error.__cause__ or error)
                problems.append(mistakes.explain(override, menu, said))
        rest = self.problems(self.compose(accepted))
        return [*problems, *(p for p in rest if p.where.split(".")[0] not in unfilled)]

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
                problems.append(mistakes.unreadable(text, self.groups))
                continue
            kind = kinds.get(parsed.type, "add")
            readable.append(Override(text, kind, parsed.key_or_group, value, several))
        return readable, problems


@contextmanager
def composing(config_dir: str | None = None) -> Iterator[Composer]:
    """A composer where Hydra is not running; `config_dir` is searched before our own."""
    always = []
    if config_dir and Path(config_dir).is_dir():
        always = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"]
    with hydra.initialize_config_dir(config_dir=str(conf_dir()), **_BASE):
        yield Composer(always=always)


def resolved(config: DictConfig, *, in_job: bool = False) -> tuple[dict[str, Any], list[Problem]]:
    """The configuration as plain data, every interpolation resolved, and what could not be.

    What could not be resolved is None in the plain data. Hydra's own values (the output folder, the
    number of the job) exist only `in_job`.
    """
    problems: list[Problem] = []

    def read(node: DictConfig | ListConfig, key: Any) -> Any:
        where = node._get_full_key(key)
        if OmegaConf.is_missing(node, key):
            problems.append(Problem(where, "has no value yet (???)", f"set {where}=value"))
            return None
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            raw = str(OmegaConf.to_container(node, resolve=False)[key])
            if in_job or "${hydra:" not in raw:
                said = mistakes.first_sentence(str(error))
                problems.append(Problem(where, f"{raw} cannot be resolved: {said}"))
            return None
        if isinstance(value, DictConfig):
            return {str(inner): read(value, inner) for inner in value}
        if isinstance(value, ListConfig):
            return [read(value, index) for index in range(len(value))]
        return value

    return {str(key): read(config, key) for key in config if key != "hydra"}, problems


def _settings(config: DictConfig, choices: Mapping[str, Any]) -> Settings:
    plain, problems = resolved(config, in_job=True)
    if problems:
        raise ConfigError.of(problems)
    return read_settings(plain, choices=choices)


def _choices(about: DictConfig) -> dict[str, Any]:
    """The option chosen in each of our groups; a group whose choice was dropped is not there."""
    chosen = about.runtime.choices
    return {group: chosen[group] for group in GROUPS if group in chosen}


def _sweep_name(folder: Path) -> str:
    """The sweep that a row's folder belongs to; a subdir may be nested."""
    return next((name for parent in folder.parents[:3] if (name := sweep_of(parent))), "")


def _instantiate(model: Mapping[str, Any]) -> Any:
    with _as_before():
        return hydra.utils.instantiate(dict(model), _convert_="all")


@contextmanager
def _as_before() -> Iterator[None]:
    """What may be instantiated is what Hydra 1.3 lets through; 1.4 asks for a list, and until then warns.

    The user's own words name the model: a list made of them would allow even what is refused now.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"hydra\.utils\.instantiate\(\) resolved _target_=")
        yield


@contextmanager
def _ends_here() -> Iterator[None]:
    """Hydra makes a warning of what a callback raises and goes on; a bug of ours is not to pass so."""
    try:
        yield
    except PrepareError as error:
        show_problems(error.problems)
        raise SystemExit(FAILED) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(FAILED) from None


def _stop_at(problems: list[Problem]) -> None:
    if problems:
        show_problems(problems)
        raise SystemExit(WRONG)
