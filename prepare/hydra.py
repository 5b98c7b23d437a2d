"""Everything that knows Hydra and OmegaConf: composing, checking before a run, and the task itself."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
import secrets
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
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

from prepare import mistakes
from prepare.errors import ConfigError, Problem
from prepare.job import INTERRUPTED, WRONG, Outcome, run
from prepare.mistakes import Menu, Override
from prepare.record import Job, Record
from prepare.report.terminal import line, show_plan, show_prepared, show_problems, stage
from prepare.report.text import one_line, printable
from prepare.settings import Settings, read_settings
from prepare.sweep import sweep_of, write_planned

CONFIG_NAME = "config"
VERSION_BASE = "1.3"
ERRORS = (HydraException, OmegaConfBaseException)
_GROUPS = ("model", "memfmt", "precision", "device", "input")
_SLUG_LENGTH = 100


@dataclass
class Sweep:
    """The sweep that this process runs, so that its table can be made however it ends."""

    folder: Path | None = None
    rows: list[list[str]] = field(default_factory=list)


SWEEP: ContextVar[Sweep | None] = ContextVar("SWEEP", default=None)


def conf_dir() -> Path:
    """The folder of our configurations: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def register_resolvers() -> None:
    """The two resolvers that `conf/config.yaml` uses; registering them again is no error."""
    OmegaConf.register_new_resolver("prepare_unique", _unique, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("prepare_slug", _slug, replace=True)


def launch(task: Any) -> None:
    """Runs `task` under Hydra, with the arguments in `sys.argv`."""
    hydra.main(config_path=str(conf_dir()), config_name=CONFIG_NAME, version_base=VERSION_BASE)(
        task
    )()


def task(config: DictConfig) -> None:
    """One run. In a sweep it never raises, but for Ctrl-C; a single one ends with its exit code."""
    register_resolvers()
    about = HydraConfig.get()
    single = about.mode == RunMode.RUN
    folder = Path(about.runtime.output_dir)
    overrides = list(about.overrides.task)
    choices = _choices(about)
    job = Job(
        number=None if single else about.job.num,
        sweep=None if single else _sweep_name(folder),
        overrides=overrides,
        choices=choices,
    )
    outcome = run(
        lambda: _settings(config, choices),
        Record(folder),
        build=_instantiate,
        job=job,
        stage=stage if single else lambda _: nullcontext(),
    )
    if not single:
        _say_row(job, outcome)
        if outcome.code == INTERRUPTED:
            raise KeyboardInterrupt
        return
    _say(outcome, folder)
    raise SystemExit(outcome.code)


class Checks(Callback):
    """Checks a configuration, and every row of a sweep, before Hydra makes a folder for it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Ends the program with exit code 2 where the configuration is wrong."""
        with _ends_here():
            HydraConfig.instance().set_config(config)
            _stop_at(_problems(config))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """The same for every row of the sweep; then notes which rows there are to be."""
        with _ends_here():
            rows = _rows(config)
            if rows is not None:
                _stop_at(examine(rows))
            folder = Path(config.hydra.sweep.dir).resolve()
            write_planned(folder, secrets.token_hex(8), rows)
            if (sweep := SWEEP.get()) is not None:
                sweep.folder, sweep.rows = folder, rows or []
            line(f"{len(rows)} runs" if rows else "a sweep", errors=True)


@contextmanager
def composing() -> Iterator[None]:
    """Hydra ready to compose, where it is not running anyway; as it was before, afterwards."""
    if GlobalHydra.instance().is_initialized():
        yield
        return
    register_resolvers()
    with hydra.initialize_config_dir(config_dir=str(conf_dir()), version_base=VERSION_BASE):
        yield


def examine(rows: Iterable[Sequence[str]]) -> list[Problem]:
    """Every mistake in these lists of overrides, each named once."""
    found: dict[Problem, None] = {}
    with composing():
        for row in rows:
            found |= dict.fromkeys(_examine(tuple(row)))
    return list(found)


def diagnose(overrides: Sequence[str], *, multirun: bool) -> list[Problem]:
    """What is wrong with overrides that Hydra has refused; empty where it cannot be told."""
    with composing():
        readable, problems = _readable(overrides)
        if multirun:
            rows = _expand([text for text, _ in readable])
        else:
            rows = [[text for text, _ in readable]]
        return list(dict.fromkeys([*problems, *examine(rows)]))


def _settings(config: DictConfig, choices: Mapping[str, Any]) -> Settings:
    plain, problems = resolved(config)
    if problems:
        raise ConfigError.of(problems)
    return read_settings(plain, choices=choices)


def _problems(config: DictConfig) -> list[Problem]:
    """Every mistake in a composed configuration."""
    choices = _choices(config.hydra)
    plain, problems = resolved(config)
    models = [name for name in _options("model") if name != "custom"]
    if missing := [p for p in problems if p.where == "model._target_" and "???" in p.wrong]:
        problems = [problem for problem in problems if problem not in missing]
        plain.get("model", {}).pop("_target_", None)
    broken = {problem.where for problem in problems}
    try:
        read_settings(plain, choices=choices, models=models)
    except ConfigError as error:
        problems += [problem for problem in error.problems if problem.where not in broken]
    return problems


def resolved(config: DictConfig) -> tuple[dict[str, Any], list[Problem]]:
    """The configuration as plain data, every interpolation resolved, and what could not be.

    What could not be resolved is None in the plain data.
    """
    problems: list[Problem] = []
    keys = [key for key in config if key != "hydra"]
    plain = {str(key): _resolved(config, key, problems) for key in keys}
    return plain, problems


def _resolved(node: DictConfig | ListConfig, key: Any, problems: list[Problem]) -> Any:
    where = node._get_full_key(key)
    if OmegaConf.is_missing(node, key):
        problems.append(Problem(where, "is ???, a value that has to be given", f"set {where}=value"))
        return None
    try:
        value = node[key]
    except (OmegaConfBaseException, ValueError) as error:
        # Hydra's own values (the output folder, the number of the job) exist in the job only.
        raw = str(OmegaConf.to_container(node, resolve=False)[key])
        if "${hydra:" not in raw or HydraConfig.get().runtime.get("output_dir"):
            said = mistakes.first_sentence(str(error))
            problems.append(Problem(where, f"{raw} cannot be resolved: {said}"))
        return None
    if isinstance(value, DictConfig):
        return {str(inner): _resolved(value, inner, problems) for inner in value}
    if isinstance(value, ListConfig):
        return [_resolved(value, index, problems) for index in range(len(value))]
    return value


def _examine(overrides: tuple[str, ...]) -> list[Problem]:
    try:
        return _problems(_compose(overrides))
    except ERRORS:
        pass
    except ValueError:
        pass  # Hydra lets some escape: a group given null or a mapping
    accepted, problems, hidden = _salvage(overrides)
    rest = [p for p in _problems(_compose(accepted)) if p.where.split(".")[0] not in hidden]
    return [*problems, *rest]


def _salvage(overrides: tuple[str, ...]) -> tuple[tuple[str, ...], list[Problem], set[str]]:
    """Adds one override after the other: those that compose, and what is wrong with the others.

    Also gives the top-level keys that a failed choice would have filled. Choices come first, as in
    Hydra, where a key may be set before the choice that brings it.
    """
    readable, problems = _readable(overrides)
    groups = {name: _options(name) for name in _GROUPS}
    accepted: tuple[str, ...] = ()
    hidden: set[str] = set()
    for text, override in sorted(readable, key=lambda pair: pair[1].key not in groups):
        menu = Menu(groups, OmegaConf.to_container(_compose(accepted), resolve=False))
        try:
            _compose((*accepted, text))
        except (*ERRORS, ValueError) as error:
            if override.key in groups:
                hidden |= set(mistakes.filled_by(override.key))
            elif override.key.split(".")[0] in hidden:
                continue
            problems.append(mistakes.explain(override, menu, str(error)))
        else:
            accepted = (*accepted, text)
    return accepted, problems, hidden


@functools.lru_cache(maxsize=64)
def _compose(overrides: tuple[str, ...]) -> DictConfig:
    return hydra.compose(CONFIG_NAME, list(overrides), return_hydra_config=True)


def _readable(overrides: Sequence[str]) -> tuple[list[tuple[str, Override]], list[Problem]]:
    """The overrides that can be parsed, and what is wrong with the others."""
    parser = OverridesParser.create()
    readable, problems = [], []
    for text in overrides:
        try:
            parsed = parser.parse_override(text)
            value = None if parsed.is_sweep_override() else parsed.value()
        except HydraException:
            menu = Menu({name: _options(name) for name in _GROUPS}, {})
            problems.append(mistakes.unreadable(text, menu))
            continue
        kinds = {OverrideType.CHANGE: "set", OverrideType.DEL: "delete"}
        several = parsed.is_sweep_override()
        kind = kinds.get(parsed.type, "add")
        readable.append((text, Override(text, kind, parsed.key_or_group, value, several)))
    return readable, problems


def _rows(config: DictConfig) -> list[list[str]] | None:
    """The overrides of every row of a sweep; None where the sweeper decides as it goes."""
    sweeper = config.hydra.sweeper
    if not str(sweeper.get("_target_")).endswith(".BasicSweeper"):
        return None
    params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    return _expand([*params, *config.hydra.overrides.task])


def _expand(overrides: Sequence[str]) -> list[list[str]]:
    """Every combination of the values given with commas, in the order of Hydra's basic sweeper."""
    values: dict[str, list[str]] = {}
    loader = GlobalHydra.instance().config_loader()
    for parsed in OverridesParser.create(config_loader=loader).parse_overrides(list(overrides)):
        key = parsed.get_key_element()
        if parsed.is_discrete_sweep():
            values[key] = [f"{key}={value}" for value in parsed.sweep_string_iterator()]
        else:
            values[key] = [parsed.input_line]
    return [list(row) for row in itertools.product(*values.values())]


def _options(group: str) -> list[str]:
    return GlobalHydra.instance().config_loader().get_group_options(group)


def _choices(about: DictConfig) -> dict[str, Any]:
    """The option chosen in each of our groups; a group that was dropped is not there."""
    chosen = about.runtime.choices
    return {str(k): v for k, v in chosen.items() if not str(k).startswith(("hydra/", "/", "steps"))}


def _sweep_name(folder: Path) -> str:
    return next((name for parent in folder.parents[:3] if (name := sweep_of(parent))), "")


def _instantiate(model: Mapping[str, Any]) -> Any:
    return hydra.utils.instantiate(dict(model), _convert_="all")


def _unique() -> str:
    return f"{datetime.now():%f}-{os.getpid()}-{secrets.token_hex(2)}"


def _slug(overrides: Iterable[str]) -> str:
    """The overrides of a row as the name of a folder, never too long for one."""
    text = re.sub(r"[^\w.=,-]+", "-", ",".join(map(str, overrides))).strip("-.")
    if len(text) <= _SLUG_LENGTH and text.isascii():
        return text or "defaults"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{text.encode('ascii', 'ignore').decode()[: _SLUG_LENGTH - 9]}-{digest}"


@contextmanager
def _ends_here() -> Iterator[None]:
    """Hydra makes a warning of what a callback raises, and goes on: a bug of ours is not to pass so."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


def _stop_at(problems: list[Problem]) -> None:
    if problems:
        show_problems(problems)
        raise SystemExit(WRONG)


def _say(outcome: Outcome, folder: Path) -> None:
    shown = os.path.relpath(folder)
    shown = str(folder) if shown.startswith("..") else shown
    if outcome.facts is not None:
        (show_prepared if outcome.facts.audit else show_plan)(outcome.facts, shown)
        return
    show_problems((outcome.result.error or "").splitlines())
    if outcome.result.traceback:
        line(f"the traceback is in {printable(os.path.join(shown, 'result.json'))}", errors=True)  # noqa: PTH118


def _say_row(job: Job, outcome: Outcome) -> None:
    text = f"#{job.number} {' '.join(job.overrides)}: {outcome.result.status}"
    error = f": {one_line(outcome.result.error)}" if outcome.result.error else ""
    line(f"{printable(text)}, {outcome.result.seconds:.1f} s{error}", errors=True)
