"""What Hydra runs: the task, and the checks before it."""

from __future__ import annotations

import secrets
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode

from prepare.composed import (
    choices_in,
    folder_problems,
    overrides_in,
    resolved,
    shared_folder,
)
from prepare.composing import BASE, CONFIG_NAME, Composer
from prepare.errors import ConfigError, PrepareError, Problem
from prepare.help import conf_dir
from prepare.job import run
from prepare.outcome import FAILED, INTERRUPTED, WRONG
from prepare.record import Job, Record
from prepare.report.console import stage
from prepare.report.pages import write_pages
from prepare.report.terminal import show_outcome, show_problems, show_row, shown_folder
from prepare.settings import Settings, read_settings
from prepare.sweep import sweep_of, write_planned
from prepare.text import line, plural

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass
class Session:
    """What has become of one command line: whether a task began, and the folder of its sweep."""

    began: bool = False
    sweep: Path | None = None


SESSION: ContextVar[Session | None] = ContextVar("SESSION", default=None)


def launch() -> None:
    """Runs the task under Hydra, with the arguments in `sys.argv`."""
    with _as_before():
        hydra.main(config_path=str(conf_dir()), config_name=CONFIG_NAME, **BASE)(task)()


def task(config: DictConfig) -> None:
    """One run. In a sweep it never raises, but for Ctrl-C; a single one ends with its exit code."""
    if (session := SESSION.get()) is not None:
        session.began = True
    about = HydraConfig.get()
    single = about.mode == RunMode.RUN
    folder = Path(about.runtime.output_dir)
    choices = choices_in(about)
    job = Job(
        number=None if single else about.job.num,
        sweep=None if single else _sweep_name(folder),
        overrides=overrides_in(about),
        choices=choices,
    )
    outcome = run(
        lambda: _settings(config, choices),
        Record(folder),
        build=_instantiate,
        job=job,
        stage=stage if single else lambda _: nullcontext(),
        pages=write_pages,
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
            _stop_at([*folder_problems(config), *Composer().problems(config)])

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """The same for every row of the sweep; then notes which rows there are to be."""
        with _ends_here():
            composer = Composer(kwargs.get("config_name"))
            rows, empty = composer.rows(config)
            folders = [*folder_problems(config), *shared_folder(config, rows or [])]
            _stop_at([*folders, *empty, *composer.examine(rows or [])])
            folder = Path(config.hydra.sweep.dir).resolve()
            write_planned(folder, secrets.token_hex(8), rows)
            if (session := SESSION.get()) is not None:
                session.sweep = folder
            what = plural(len(rows), "run") if rows else "a sweep"
            line(f"{what} in {shown_folder(folder)}", errors=True)


def _settings(config: DictConfig, choices: Mapping[str, Any]) -> Settings:
    plain, problems = resolved(config)
    if problems:
        raise ConfigError.of(problems)
    return read_settings(plain, choices=choices)


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
        raise SystemExit(WRONG if isinstance(error, ConfigError) else FAILED) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(FAILED) from None


def _stop_at(problems: list[Problem]) -> None:
    if problems:
        show_problems(problems)
        raise SystemExit(WRONG)
