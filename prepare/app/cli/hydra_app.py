"""Define the Hydra application: the task, and the checks before it."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode

from prepare.app.cli.answer import is_quiet, no_stage, print_problems, tell
from prepare.app.cli.compose_config import BASE, CONFIG_NAME, Composer, store_defaults
from prepare.app.cli.launcher_checks import group_problems, launcher_problems
from prepare.app.cli.resolve_config import (
    as_composed,
    as_mapping,
    choices_in,
    folder_problems,
    log_configuration,
    overrides_in,
    resolved,
    resume_problems,
    run_folder,
    shared_folder,
    shared_save,
)
from prepare.app.job.execute import JobSpec, run_job
from prepare.app.job.outcome import FAILED, INTERRUPTED, WRONG, Outcome
from prepare.app.job.record import Job, used_folder
from prepare.app.report.terminal.console import announce, stage
from prepare.app.report.terminal.run import RunOutput, shown_folder
from prepare.app.report.terminal.sweep_progress import SweepProgress
from prepare.app.sweep.leader import Leader
from prepare.app.sweep.manifest import (
    SweepManifest,
    identity_of,
    number_duplicates,
)
from prepare.app.sweep.worker import run_in_sweep, shares_cores
from prepare.core.utils.folders import conf_dir, hold_folder
from prepare.core.utils.packages import check_torch
from prepare.core.utils.process_state import Stopped
from prepare.core.utils.text import line, plural
from prepare.errors import ConfigError, PrepareError, Problem

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass
class CommandState:
    """The state of one command line: whether a task began, the folder it holds, the sweep it leads."""

    began: bool = False
    held: ExitStack | None = None
    leader: Leader | None = None
    progress: SweepProgress | None = None


_NAMED = re.compile(r"(?:_target_|class)\s*[:=]\s*([\w.]+)")
STATE: ContextVar[CommandState | None] = ContextVar("STATE", default=None)


def launch() -> None:
    """Run the task under Hydra, with the arguments in `sys.argv`."""
    store_defaults()
    # Callbacks and logging: ours, and those that the user's own words name.
    own = {name for word in sys.argv if "hydra" in word for name in _NAMED.findall(word)}
    rules = BASE or {"execution_whitelist": ("prepare.*", *sorted(own))}
    hydra.main(config_path=str(conf_dir()), config_name=CONFIG_NAME, **rules)(task)()


def task(config: DictConfig) -> None:
    """Execute one job; a single job exits with its code, a job of a sweep raises nothing but Ctrl-C."""
    if (state := STATE.get()) is not None:
        state.began = True
    about = cast("DictConfig", HydraConfig.get())
    if about.mode == RunMode.RUN:
        _run_single(config, about)
    else:
        _run_sweep_job(config, about)


def _run_single(config: DictConfig, about: DictConfig) -> None:
    spec = _spec(config, about, Job(None, None, overrides_in(about), choices_in(about)))
    state = STATE.get()
    overwrite = config.get("overwrite") is True
    held = state is not None and state.held is not None
    with nullcontext() if held else claimed(spec.folder, overwrite=overwrite, begun=True):
        output = RunOutput(spec.folder)
        shown = {"stage": no_stage} if is_quiet() else {"stage": stage, "announce": announce}
        outcome = run_job(spec, show=output.show, **shown)
        output.end(outcome)
        tell(**_told(outcome, spec.folder))
    raise SystemExit(outcome.code)


def _told(outcome: Outcome, folder: Path) -> dict[str, Any]:
    """Return what `--json` says of a single job."""
    result = asdict(outcome.result)
    result.pop("traceback")
    paths = sorted(path for path in folder.glob("*") if path.is_file())
    return result | {"folder": str(folder), "files": {path.name: str(path) for path in paths}}


@contextmanager
def claimed(folder: Path, *, overwrite: bool, begun: bool = False) -> Iterator[None]:
    """Claim the folder of a run within the block; exit if it is in use, or holds another record.

    `begun` says that Hydra has written its files there.
    """
    with hold_folder(folder) as held:
        if not held:
            remedy = "wait for it, or choose another folder"
            wrong = f"another run is writing to {shown_folder(folder)}"
            _exit_if_any([Problem("hydra.run.dir", wrong, remedy)])
        _exit_if_any([] if overwrite else used_folder(folder, begun=begun))
        yield


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
        shared=shares_cores(launcher, as_mapping(about, "launcher")),
    )
    try:
        spec = _spec(config, about, job)
        resume = config.get("resume") is True
        run_in_sweep(spec, folder=folder, manifest=manifest, resume=resume)
    except Stopped:
        if STATE.get() is not None:
            raise
        # In a worker: the process that would receive an exception has ended.
        os._exit(INTERRUPTED)


class Checks(Callback):
    """Check a configuration, and every row of a sweep, before Hydra makes a folder for it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Exit with code 2 if the configuration is wrong."""
        with _exit_on_errors():
            _exit_if_any(run_problems(config, Composer()))
            # Hydra writes its own files before the task begins.
            if (folder := run_folder(config)) is not None:
                claims = ExitStack()
                claims.enter_context(claimed(folder, overwrite=config.get("overwrite") is True))
                if (state := STATE.get()) is not None:
                    state.held = claims  # until the command ends
                else:
                    claims.close()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Exit with code 2 if any row of the sweep is wrong; then write the list of its rows."""
        with _exit_on_errors():
            check_torch()  # the processes of the rows import it
            composer = Composer(kwargs.get("config_name"))
            launcher = str(config.hydra.runtime.choices.get("hydra/launcher"))
            _exit_if_any([*launcher_problems(launcher, **_launching(config))])
            rows, empty = composer.rows(config)
            folders = [
                *folder_problems(config),
                *shared_folder(config, rows),
                *shared_save(rows),
            ]
            _exit_if_any([*folders, *empty, *composer.examine(rows)])
            _exit_if_any(resume_problems(config, sweep=True))
            identities = number_duplicates(_identity(composer.compose(row)) for row in rows)
            folder = Path(config.hydra.sweep.dir).resolve()
            resume = config.get("resume") is True
            leader = Leader(
                folder,
                rows=rows,
                identities=identities,
                command=shlex.join(["python", "run.py", *sys.argv[1:]]),
                resume=resume,
                overwrite=config.get("overwrite") is True,
            )
            if not is_quiet():
                line(f"{plural(len(rows), 'run')} in {shown_folder(folder)}", errors=True)
            if (state := STATE.get()) is not None:
                state.leader = leader
                if not is_quiet():
                    state.progress = SweepProgress(folder, leader.manifest)
                    state.progress.start()


def run_problems(config: DictConfig, composer: Composer) -> list[Problem]:
    """Return every problem of the composed configuration of a single run."""
    groups = group_problems(**_launching(config))
    problems = [*groups, *folder_problems(config), *composer.problems(config)]
    return [*problems, *resume_problems(config, sweep=False)]


def _launching(config: DictConfig) -> dict[str, Any]:
    """Return the unresolved configurations of the launcher and the sweeper."""
    words = {"launching": "launcher", "sweeping": "sweeper"}
    return {word: as_composed(config.hydra, key) for word, key in words.items()}


def _spec(config: DictConfig, about: DictConfig, job: Job) -> JobSpec:
    plain, problems = resolved(config)
    return JobSpec(
        config=plain,
        unresolved=tuple(problems),
        job=job,
        folder=Path(about.runtime.output_dir),
        logging=log_configuration(about),
        # Not that of this process: the workers of a launcher may start in any folder.
        current=os.getcwd() if about.job.chdir else about.runtime.cwd,  # noqa: PTH109
    )


def _identity(config: DictConfig) -> str:
    """Return what determines the result of a row; a new name if that is known only in the job."""
    values, problems = resolved(config)
    return secrets.token_hex(8) if problems else identity_of(values, choices_in(config.hydra))


@contextmanager
def _exit_on_errors() -> Iterator[None]:
    """Exit on an error: Hydra turns an exception of a callback into a warning and continues."""
    try:
        yield
    except PrepareError as error:
        print_problems(error.problems)
        raise SystemExit(WRONG if isinstance(error, ConfigError) else FAILED) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(FAILED) from None


def _exit_if_any(problems: list[Problem]) -> None:
    if problems:
        print_problems(problems)
        raise SystemExit(WRONG)
