"""Define the Hydra application: the task, the checks before it, and what Hydra composes."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import configure_log
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from prepare import recipe
from prepare.app.cli.words import first_sentence, is_quiet, options_of, refused, remedy_of, tell
from prepare.app.job.execute import JobSpec, run_job
from prepare.app.job.record import Job, used_folder
from prepare.app.job.settings import GROUPS, group_names, key_names, read_settings
from prepare.app.report.sweep_progress import SweepProgress
from prepare.app.report.terminal import RunOutput, shown_folder, stage
from prepare.app.sweep.leader import Leader
from prepare.app.sweep.manifest import SweepManifest, identity_of, number_duplicates
from prepare.app.sweep.worker import run_in_sweep, shares_cores
from prepare.core.utils.files import conf_dir, new_folder, own_name, run_name
from prepare.core.utils.machine import command_line
from prepare.core.utils.process_state import Stopped
from prepare.core.utils.suggest import choose_option
from prepare.core.utils.text import line, plural
from prepare.errors import ConfigError, Problem, raise_problems
from prepare.registry import STEPS
from prepare.stages.stage import INTERRUPTED, ordered_stages
from prepare.steps import GROUP_OF


@dataclass
class CommandState:
    """The state of one command line: whether a task began, the sweep it leads, what ended it."""

    began: bool = False
    leader: Leader | None = None
    progress: SweepProgress | None = None
    error: Exception | None = None


# None in the worker of a launcher.
STATE: ContextVar[CommandState | None] = ContextVar("STATE", default=None)


def launch() -> None:
    """Run the task under Hydra, with the arguments in `sys.argv`."""
    hydra.main(config_path=str(conf_dir()), config_name=CONFIG_NAME, version_base="1.3")(task)()


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
    paths = sorted(path for path in spec.folder.glob("*") if path.is_file())
    written = {path.name: str(path) for path in paths}
    tell(**outcome.result.content(), folder=str(spec.folder), files=written)
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
        shared=shares_cores(launcher, as_composed(about, "launcher")),
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
    logs: Any = OmegaConf.create(OmegaConf.to_container(about.job_logging, resolve=True))
    return JobSpec(
        config=plain,
        unresolved=tuple(problems),
        job=job,
        folder=Path(about.runtime.output_dir),
        logging=partial(configure_log, logs, about.verbose),
        # Not that of this process: the workers of a launcher may start in any folder.
        current=os.getcwd() if about.job.chdir else about.runtime.cwd,  # noqa: PTH109
    )


class Checks(Callback):
    """Check a configuration, and every row of a sweep, before Hydra makes a folder for it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Exit with code 2 if the configuration or the folder is wrong."""
        with _ending_on_errors():
            HydraConfig.instance().set_config(config)  # for ${hydra:...}
            raise_problems(ConfigError, problems_of(config))
            if config.resume:
                wrong = "resumes a sweep, and this is a single run"
                raise ConfigError("resume", wrong, "add --multirun and hydra.sweep.dir=FOLDER")
            folder = Path(config.hydra.run.dir)
            if "${prepare_name" in str(as_composed(config.hydra.run, "dir")):
                folder = new_folder(folder)
                with read_write(config.hydra):
                    config.hydra.run.dir = str(folder)
            raise_problems(ConfigError, [] if config.overwrite else used_folder(folder))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Exit with code 2 if any row of the sweep is wrong; then write the list of its rows."""
        with _ending_on_errors() as state:
            raise_problems(ConfigError, launcher_problems(config.hydra))
            rows = rows_of(config)
            found = composed(rows, kwargs.get("config_name"))
            folder = str(as_composed(config.hydra.sweep, "dir"))
            if config.resume and "${prepare_unique" in folder:
                remedy = "give the folder of the sweep as hydra.sweep.dir=FOLDER"
                raise ConfigError("resume", "a new folder has nothing to resume", remedy)
            state.leader = leader = Leader(
                Path(config.hydra.sweep.dir).resolve(),
                rows=rows,
                identities=number_duplicates(map(_identity, found)),
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
    except Exception as error:
        unresolved = isinstance(error, HydraException | OmegaConfBaseException)  # as its folder
        state.error = ConfigError.of([refused(error, [])]) if unresolved else error
        raise SystemExit from None


# ------------------------------------------------------------ what Hydra composes
CONFIG_NAME = "config"
# What Hydra raises for a wrong word. The built-in ones: for a group given null, a mapping or an empty
# list, and for a key set below null.
_BUILT_IN = (ValueError, TypeError, AssertionError, AttributeError)
ERRORS = (HydraException, OmegaConfBaseException, *_BUILT_IN)
# Overrides that change how a sweep runs and not its results: they are not part of a name.
_NOT_NAMED = ("isolate=", "resume=", "overwrite=")
_RECIPE = "recipe="


def slug(overrides: Iterable[str]) -> str:
    """Return the overrides of a row as the name of a folder: ASCII, without slashes, 100 letters at most."""
    text = ",".join(word for word in map(str, overrides) if not word.startswith(_NOT_NAMED))
    return re.sub(r"[^\w.=,-]+", "-", text, flags=re.ASCII)[:100].strip("-.") or "defaults"


def unique() -> str:
    """Return a name that no two runs share, on any machine: microseconds, process and two random bytes."""
    return f"{datetime.now().astimezone():%f}-{os.getpid()}-{secrets.token_hex(2)}"


# Registered on import: the worker of a launcher names the folder of a row before it runs the task.
_register = OmegaConf.register_new_resolver
_register("prepare_unique", unique, use_cache=True, replace=True)
_register("prepare_slug", slug, replace=True)
_register("prepare_name", run_name, replace=True)
_register("prepare_pid", os.getpid, replace=True)


def store_defaults(words: Sequence[str]) -> list[str]:
    """Store our values for launchers and stages, and the steps of `recipe=FILE`; return the words for Hydra.

    Raises:
        ConfigError: the file is not a recipe, holds what a recipe may not set, or contradicts a word.
    """
    Plugins.instance()  # it stores the launchers' own values, which ours replace
    store = ConfigStore.instance()
    for name in options_of("launcher"):
        node = OmegaConf.to_container(OmegaConf.load(conf_dir() / "launcher" / f"{name}.yaml"))
        store.store(name, node, group="hydra/launcher", provider="prepare")
    stages = {cls.name: cls.defaults() for cls in ordered_stages() if not cls.groups}
    store.store("stages", stages, provider="prepare")
    given = next((word for word in words if word.startswith(_RECIPE)), f"{_RECIPE}null")
    path = given.removeprefix(_RECIPE).strip("'\"")
    steps = {} if path == "null" else _steps_of(path, words)
    store.store("recipe_steps", {"steps": steps}, provider="prepare")
    # The folder of a row holds commas and equal signs, which Hydra reads as more than a path.
    quoted = path if re.fullmatch(r"[\w./-]*", path) else "'{}'".format(path.replace("'", "\\'"))
    return [f"{_RECIPE}{quoted}" if word == given else word for word in words]


def _steps_of(path: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the steps of a recipe, which set only what is known to be harmless, for these words."""
    chosen = {word.partition("=")[0]: word for word in words}
    steps: dict[str, Any] = {}
    problems: list[Problem] = []
    if "plugins" in chosen:  # they register steps
        from prepare.app.job.build_model import import_plugins

        import_plugins(tuple(re.findall(r"[\w.]+", chosen["plugins"].partition("=")[2])))
    for name, options in recipe.load(path).items():
        if options is None:
            continue
        step = STEPS[name].from_options(options)
        problems += recipe.refused(step)
        if name == "device" and name in chosen:
            continue  # as in `Pipeline.load(path, device=...)`
        steps[name] = step.to_options()
        if word := chosen.get(GROUP_OF.get(name, "")):
            remedy = f"drop {word}, or change the step with steps.{name}.OPTION=VALUE"
            problems.append(Problem(word, f"the recipe has the step {name}", remedy))
    raise_problems(ConfigError, problems)
    return steps


def resolved(config: DictConfig) -> tuple[dict[str, Any], list[Problem]]:
    """Return the configuration as plain data, without keys that cannot be resolved, and their problems."""
    plain: dict[str, Any] = {}
    problems: list[Problem] = []
    for key in (str(key) for key in config if key != "hydra"):
        try:
            value = config[key]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
            plain[key] = value
        except OmegaConfBaseException as error:
            where, wrong = error.full_key or key, first_sentence(str(error))
            problems.append(Problem(where, wrong, remedy_of(wrong) or f"set {where}=VALUE"))
    return plain, problems


def problems_of(config: DictConfig) -> list[Problem]:
    """Return every problem of a composed configuration."""
    plain, problems = resolved(config)
    for word in overrides_in(config.hydra):
        group, _, value = word.partition("=")
        if group in GROUPS and value.startswith("["):
            remedy = choose_option("", group, options_of(group))
            problems.append(Problem(group, f"takes one option, not {value}", remedy))
    if problems:
        # What only the job knows (its number, its folder) has no value before it, and is checked there.
        return [p for p in problems if not re.search(r"HydraConfig|value: hydra\.", p.wrong)]
    choices = choices_in(config.hydra)
    if misplaced := [*_misplaced(plain, choices)]:
        return misplaced
    models = [name for name in options_of("model") if name != "custom"]
    try:
        read_settings(plain, choices=choices, models=models)
    except ConfigError as error:
        return [*error.problems]
    return []


def _misplaced(config: Mapping[str, Any], choices: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each option file whose keys are not where its group has them."""
    for group, choice in choices.items():
        # The options of the other groups set keys that are not theirs, as `steps`.
        inside = {group} if group in ("model", "input") else {*key_names()}
        below = config.get(group)
        if isinstance(below, Mapping) and inside & {*below} and "_target_" not in below:
            wrong = f"its keys are one level too deep, below {group}"
            remedy = "let it begin with the line '# @package _global_'"
            yield Problem(f"{group}/{choice}.yaml", wrong, remedy)
        elif {"model": "_target_", "input": "shape"}.get(group) in config:
            remedy = f"leave out '# @package _global_', or put them below {group}:"
            yield Problem(f"{group}/{choice}.yaml", "its keys are at the top", remedy)


def launcher_problems(about: DictConfig) -> Iterator[Problem]:
    """Yield the problems of what starts the runs of a sweep, where Hydra would end in a traceback."""
    launcher, sweeper = (str(as_composed(about, key)) for key in ("launcher", "sweeper"))
    if "_target_" not in launcher:
        yield Problem("hydra.launcher", "is a group", f"did you mean hydra/launcher={launcher}?")
    plugin = re.search(r"hydra_plugins\.hydra_(\w+)_launcher", launcher)
    if plugin and find_spec(plugin[0]) is None:
        remedy = f"install the extra: pip install 'torch-prepare[{plugin[1]}]'"
        yield Problem("hydra/launcher", f"needs {plugin[0]}, which is not installed", remedy)
    if "BasicSweeper" not in sweeper:
        remedy = "give values with commas; for the fastest recipe choose task=tune"
        yield Problem("hydra/sweeper", "only the basic sweeper is supported", remedy)


def rows_of(config: DictConfig) -> list[list[str]]:
    """Return the overrides of every row of a sweep, in the order of Hydra's basic sweeper.

    Raises:
        ConfigError: there are no rows, or several of them would write one file.
    """
    about = config.hydra
    params = [f"{key}={value}" for key, value in (about.sweeper.get("params") or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    parsed = parser.parse_overrides([*params, *overrides_in(about)])
    (batch,) = BasicSweeper.split_arguments(parsed, None)
    rows = [list(map(as_written, row)) for row in batch]
    if not rows:
        raise ConfigError("", "there is nothing to run", "write values with commas, as in seed=1,2")
    saved = [word for row in rows for word in row if word.startswith("save=")]
    if len({*saved}) < len(saved) and saved[0] != "save=null" and "${" not in saved[0]:
        wrong = f"{saved[0]} is one file for {len(saved)} runs"
        raise ConfigError("save", wrong, "save from single runs, without --multirun")
    return rows


def composed(rows: list[list[str]], config_name: str | None) -> list[DictConfig]:
    """Return the configuration of each row of a sweep.

    Raises:
        ConfigError: with every problem of the rows, each once.
    """
    found: list[DictConfig] = []
    problems: dict[Problem, None] = {}
    for row in rows:
        try:
            found.append(hydra.compose(config_name or CONFIG_NAME, row, return_hydra_config=True))
        except ERRORS as error:
            problems[refused(error, row)] = None
        else:
            problems |= dict.fromkeys(problems_of(found[-1]))
    raise_problems(ConfigError, problems)
    return found


def choices_in(about: DictConfig) -> dict[str, Any]:
    """Return the own name of the option chosen in each of our groups, without those that were dropped."""
    chosen = {name: value for name, value in about.runtime.choices.items() if name in group_names()}
    # Hydra takes a file's name for that of its option.
    names = {name: value and value.removesuffix(".yaml") for name, value in chosen.items()}
    return {group: own_name(group, name) for group, name in names.items()}


def overrides_in(about: DictConfig) -> list[str]:
    """Return the overrides of a run as they were written; an interpolation belongs to its own key."""
    return list(map(as_written, as_composed(about.overrides, "task")))


def as_written(override: Any) -> str:
    r"""Return an override without the escapes that Hydra's sweeper adds to an interpolation, `$\{seed\}`."""
    return re.sub(r"\$\\{.*?\\}", lambda match: match[0].replace("\\", ""), str(override))


def as_composed(node: DictConfig, key: str) -> Any:
    """Return the unresolved value of a key as plain data."""
    plain: Any = OmegaConf.to_container(node, resolve=False)
    return plain[key]
