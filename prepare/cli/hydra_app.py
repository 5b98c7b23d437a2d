"""What Hydra runs: the task, and the checks before it."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode

from prepare.cli.compose_config import BASE, CONFIG_NAME, Composer, store_launchers
from prepare.cli.launcher_checks import launcher_problems
from prepare.cli.resolve_config import (
    as_mapping,
    choices_in,
    folder_problems,
    overrides_in,
    resolved,
    resume_problems,
    shared_folder,
    shared_save,
)
from prepare.core.utils.conf_folder import conf_dir
from prepare.core.utils.signals import Stopped
from prepare.core.utils.text import line, plural
from prepare.errors import ConfigError, PrepareError, Problem
from prepare.job.execute import run_job
from prepare.job.outcome import FAILED, INTERRUPTED, WRONG
from prepare.job.record import Job
from prepare.job.spec import JobSpec
from prepare.report.pages.write_pages import write_pages
from prepare.report.terminal.console import stage
from prepare.report.terminal.run import show_outcome, show_problems, shown_folder
from prepare.report.terminal.sweep_progress import SweepProgress
from prepare.sweep.coordinator import Coordinator
from prepare.sweep.identity import identity, number_duplicates
from prepare.sweep.launchers import OUTLIVE_COMMAND, shares_cores
from prepare.sweep.manifest import SweepManifest, read_sweep_manifest
from prepare.sweep.worker import run_in_sweep, stop_check

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass
class Session:
    """What has become of one command line: whether a task began, and its part in a sweep."""

    began: bool = False
    coordinator: Coordinator | None = None
    progress: SweepProgress | None = None


SESSION: ContextVar[Session | None] = ContextVar("SESSION", default=None)


def launch() -> None:
    """Runs the task under Hydra, with the arguments in `sys.argv`."""
    store_launchers()
    with _as_before():
        hydra.main(config_path=str(conf_dir()), config_name=CONFIG_NAME, **BASE)(task)()


def task(config: DictConfig) -> None:
    """One run. In a sweep it never raises, but for Ctrl-C; a single one ends with its exit code."""
    if (session := SESSION.get()) is not None:
        session.began = True
    about = HydraConfig.get()
    if about.mode == RunMode.RUN:
        _alone(config, about)
    else:
        _in_sweep(config, about)


def _alone(config: DictConfig, about: DictConfig) -> None:
    spec = _spec(config, about, Job(None, None, overrides_in(about), choices_in(about)))
    outcome = run_job(spec, stage=stage)
    show_outcome(outcome, spec.folder)
    raise SystemExit(outcome.code)


def _in_sweep(config: DictConfig, about: DictConfig) -> None:
    folder = Path(about.runtime.cwd, about.sweep.dir).resolve()
    manifest = read_sweep_manifest(folder) or SweepManifest("", None, host="")
    launcher = about.runtime.choices.get("hydra/launcher")
    job = Job(
        number=about.job.num,
        sweep=manifest.sweep,
        overrides=overrides_in(about),
        choices=choices_in(about),
        identity=manifest.identity(about.job.num),
        launcher=launcher,
        shared=shares_cores(launcher, as_mapping(about, "launcher")),
    )
    try:
        check = stop_check(folder, manifest, outlives_command=launcher in OUTLIVE_COMMAND)
        check()
        spec = _spec(config, about, job)
        resume = config.get("resume") is True
        outcome = run_in_sweep(spec, folder=folder, resume=resume, check=check)
        if outcome is not None and outcome.code == INTERRUPTED:
            check()
            raise KeyboardInterrupt
    except Stopped:
        if SESSION.get() is not None:
            raise
        # A worker: nobody is there any more to whom an exception would say anything.
        os._exit(INTERRUPTED)


class Checks(Callback):
    """Checks a configuration, and every row of a sweep, before Hydra makes a folder for it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Ends the program with exit code 2 where the configuration is wrong."""
        with _ends_here():
            problems = [*folder_problems(config), *Composer().problems(config)]
            _stop_at([*problems, *resume_problems(config, [], sweep=False)])

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """The same for every row of the sweep; then notes which rows there are to be."""
        with _ends_here():
            composer = Composer(kwargs.get("config_name"))
            launching, sweeping = (as_mapping(config.hydra, key) for key in ("launcher", "sweeper"))
            choices = config.hydra.runtime.choices
            _stop_at([*launcher_problems(choices, launching=launching, sweeping=sweeping)])
            rows, empty = composer.rows(config)
            folders = [
                *folder_problems(config),
                *shared_folder(config, rows or []),
                *shared_save(rows or []),
            ]
            _stop_at([*folders, *empty, *composer.examine(rows or [])])
            _stop_at(resume_problems(config, rows, sweep=True))
            identities = number_duplicates(_identity(composer.compose(row)) for row in rows or [])
            folder = Path(config.hydra.sweep.dir).resolve()
            resume = config.get("resume") is True
            coordinator = Coordinator(folder, rows=rows, identities=identities, resume=resume)
            what = plural(len(rows), "run") if rows else "a sweep"
            line(f"{what} in {shown_folder(folder)}", errors=True)
            if (session := SESSION.get()) is not None:
                session.progress = SweepProgress(folder, coordinator.manifest)
                session.coordinator = coordinator
                session.progress.start()


def _spec(config: DictConfig, about: DictConfig, job: Job) -> JobSpec:
    plain, problems = resolved(config)
    return JobSpec(
        config=plain,
        unresolved=tuple(problems),
        job=job,
        folder=Path(about.runtime.output_dir),
        build=_instantiate,
        pages=write_pages,
        # Not that of this process: the workers of a launcher may start in any folder.
        current=os.getcwd() if about.job.chdir else about.runtime.cwd,  # noqa: PTH109
    )


def _identity(config: DictConfig) -> str | None:
    """What determines the result of a row; None where it depends on what is known in the job only."""
    values, problems = resolved(config)
    return None if problems else identity(values, choices_in(config.hydra))


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
