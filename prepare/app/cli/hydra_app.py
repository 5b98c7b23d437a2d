"""Define the Hydra application: the task, and the checks before it."""

from __future__ import annotations

import logging
import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from prepare.app.cli import configuration
from prepare.app.cli.configuration import choices_in, overrides_in, resolved
from prepare.app.cli.words import is_quiet, refused, tell
from prepare.app.job.execute import JobSpec, run_job
from prepare.app.job.record import Job, used_folder
from prepare.app.report.sweep_progress import SweepProgress
from prepare.app.report.terminal import RunOutput, shown_folder, stage
from prepare.app.sweep.leader import Leader
from prepare.app.sweep.manifest import SweepManifest, identity_of, number_duplicates
from prepare.app.sweep.worker import run_in_sweep, shares_cores
from prepare.core.utils.files import conf_dir, hold_folder, new_folder
from prepare.core.utils.machine import command_line
from prepare.core.utils.process_state import Stopped
from prepare.core.utils.text import line, plural
from prepare.errors import ConfigError, raise_problems
from prepare.stages.stage import INTERRUPTED


@dataclass
class CommandState:
    """The state of one command line: whether a task began, its folder, the sweep it leads, what ended it."""

    began: bool = False
    held: ExitStack = field(default_factory=ExitStack)
    leader: Leader | None = None
    progress: SweepProgress | None = None
    error: Exception | None = None


# None in the worker of a launcher.
STATE: ContextVar[CommandState | None] = ContextVar("STATE", default=None)


def launch() -> None:
    """Run the task under Hydra, with the arguments in `sys.argv`."""
    name = configuration.CONFIG_NAME
    hydra.main(config_path=str(conf_dir()), config_name=name, version_base="1.3")(task)()


def task(config: DictConfig) -> None:
    """Execute one job; a single job exits with its code, a job of a sweep raises nothing but Ctrl-C."""
    if (state := STATE.get()) is not None:
        state.began = True
    about: Any = HydraConfig.get()
    if about.mode == RunMode.RUN:
        _run_single(_spec(config, about, Job(None, None, overrides_in(about), choices_in(about))))
    _run_sweep_job(config, about)


def _run_single(spec: JobSpec) -> NoReturn:
    output = RunOutput(spec.folder)
    shown: Any = {} if is_quiet() else {"stage": stage}
    outcome = run_job(spec, show=output.show, **shown)
    output.end(outcome)
    result = asdict(outcome.result)
    result.pop("traceback")
    paths = sorted(path for path in spec.folder.glob("*") if path.is_file())
    tell(**result, folder=str(spec.folder), files={path.name: str(path) for path in paths})
    raise SystemExit(outcome.code)


def _run_sweep_job(config: DictConfig, about: DictConfig) -> None:
    folder = Path(about.runtime.cwd, about.sweep.dir).resolve()
    manifest = SweepManifest.load(folder / "sweep.json")
    launcher = about.runtime.choices.get("hydra/launcher")
    job = Job(
        number=about.job.num,
        sweep=manifest.sweep,
        overrides=overrides_in(about),
        choices=choices_in(about),
        identity=manifest.identities[about.job.num],
        launcher=launcher,
        shared=shares_cores(launcher, configuration.as_composed(about, "launcher")),
    )
    try:
        spec, resume = _spec(config, about, job), config.get("resume") is True
        run_in_sweep(spec, folder=folder, manifest=manifest, resume=resume)
    except Stopped:
        if STATE.get() is not None:
            raise
        # In a worker: the process that would receive an exception has ended.
        os._exit(INTERRUPTED)


def _spec(config: DictConfig, about: DictConfig, job: Job) -> JobSpec:
    plain, problems = resolved(config)
    return JobSpec(
        config=plain,
        unresolved=tuple(problems),
        job=job,
        folder=Path(about.runtime.output_dir),
        logging=_logging(about),
        # Not that of this process: the workers of a launcher may start in any folder.
        current=os.getcwd() if about.job.chdir else about.runtime.cwd,  # noqa: PTH109
    )


def _logging(about: DictConfig) -> dict[str, Any] | None:
    """Return Hydra's configuration of the logs for another process, with the levels of this one."""
    plain: Any = OmegaConf.to_container(about.job_logging, resolve=True)
    if not plain or not plain.get("root"):
        return None
    # Those of hydra.verbose.
    for name in re.findall(r"[\w.]+", str(about.verbose)):
        level = logging.getLogger(name).level
        plain.setdefault("loggers", {}).setdefault(name, {})["level"] = level
    plain["root"]["level"] = logging.getLogger().level
    return plain


class Checks(Callback):
    """Check a configuration, and every row of a sweep, before Hydra makes a folder for it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Exit with code 2 if the configuration or the folder is wrong; hold the folder until the end."""
        with _ending_on_errors() as state:
            HydraConfig.instance().set_config(config)  # for ${hydra:...}
            raise_problems(ConfigError, configuration.problems_of(config))
            if config.resume:
                wrong = "resumes a sweep, and this is a single run"
                raise ConfigError("resume", wrong, "add --multirun and hydra.sweep.dir=FOLDER")
            folder = Path(config.hydra.run.dir)
            if "${prepare_name" in str(configuration.as_composed(config.hydra.run, "dir")):
                folder = new_folder(folder)
                with read_write(config.hydra):
                    config.hydra.run.dir = str(folder)
            if not state.held.enter_context(hold_folder(folder)):
                wrong = f"another run is writing to {shown_folder(folder)}"
                remedy = "wait for it, or choose another folder"
                raise ConfigError("hydra.run.dir", wrong, remedy)
            raise_problems(ConfigError, [] if config.overwrite else used_folder(folder))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Exit with code 2 if any row of the sweep is wrong; then write the list of its rows."""
        with _ending_on_errors() as state:
            raise_problems(ConfigError, configuration.launcher_problems(config.hydra))
            rows = configuration.rows_of(config)
            composed = configuration.composed(rows, kwargs.get("config_name"))
            folder = str(configuration.as_composed(config.hydra.sweep, "dir"))
            if config.resume and "${prepare_unique" in folder:
                remedy = "give the folder of the sweep as hydra.sweep.dir=FOLDER"
                raise ConfigError("resume", "a new folder has nothing to resume", remedy)
            state.leader = leader = Leader(
                Path(config.hydra.sweep.dir).resolve(),
                rows=rows,
                identities=number_duplicates(map(_identity, composed)),
                command=command_line(sys.argv[1:]),
                resume=config.resume,
                overwrite=config.overwrite,
            )
            if not is_quiet():
                line(f"{plural(len(rows), 'run')} in {shown_folder(leader.folder)}", errors=True)
                state.progress = SweepProgress(leader.folder, leader.manifest)
                state.progress.start()


def _identity(config: DictConfig) -> str:
    """Return what determines the result of a row; a new name if that is known only in the job."""
    values, problems = resolved(config)
    return secrets.token_hex(8) if problems else identity_of(values, choices_in(config.hydra))


@contextmanager
def _ending_on_errors() -> Iterator[CommandState]:
    """Give the state, and end the command on an error: Hydra turns one of a callback into a warning."""
    state = STATE.get() or CommandState()
    try:
        yield state
    except (HydraException, OmegaConfBaseException) as error:  # as a folder that cannot be resolved
        state.error = ConfigError.of([refused(error, [])])
    except Exception as error:
        state.error = error
    if state.error is not None:
        raise SystemExit
