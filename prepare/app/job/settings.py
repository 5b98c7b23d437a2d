"""The settings of a job: a configuration as plain data, checked as a whole, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, get_type_hints

from prepare.checkpoint.paths import check_readable, check_writable
from prepare.core.forward.example_input import read_example
from prepare.core.utils.files import STEP_GROUPS
from prepare.core.utils.options import as_written, convert, no_options
from prepare.core.utils.suggest import choose, choose_option, nearest
from prepare.errors import ConfigError, PrepareError, Problem
from prepare.patterns import expressions
from prepare.registry import STEPS
from prepare.stages.stage import STAGES, Stage, ordered_stages, tasks

# The members of the settings that are no keys of one value each.
_OTHERS = ("model", "steps", "input", "task", "stages", "choices")
# Words of other programs, and what they are called here.
_OTHER_KEYS = {"memory_format": "memfmt", "dtype": "precision"}
# The groups that a configuration is composed of, beside those of stages.
GROUPS = ("model", *STEP_GROUPS, "input")
# The group whose option is added to the others and chooses among them: +experiment=NAME.
ADDED_GROUP = "experiment"


def group_names() -> tuple[str, ...]:
    """Return the groups of a configuration, without those whose option is a level."""
    return (*GROUPS, ADDED_GROUP)


def level_names() -> tuple[str, ...]:
    """Return the groups whose option is a level, and which may set limits as well."""
    return tuple(cls.name for cls in ordered_stages() if cls.groups and cls.has_level())


def key_names() -> tuple[str, ...]:
    """Return every key at the top of a configuration."""
    return tuple(dict.fromkeys((*GROUPS, *STAGES, "steps", "task", *_values(), "hydra")))


def _values() -> list[str]:
    return [each.name for each in fields(Settings) if each.name not in _OTHERS]


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise ValueError(f"{seed} is out of range", "give one from 0 to 9223372036854775807")


def _check_plugins(plugins: tuple[str, ...]) -> None:
    for name in plugins:
        if not _is_dotted(name):
            remedy = "give the dotted name of a module, as in my_package.steps"
            raise ValueError(f"{name!r} is not a dotted name", remedy)


def _check_fail_on(given: tuple[str, ...]) -> None:
    words = [word for cls in ordered_stages() for word in cls.fails]
    for name in given:
        if name not in words:
            raise ValueError(f"{name!r} is not allowed", choose(name, words))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a job; `choices` maps each group to the chosen option, or None.

    `stages` are all installed stages by name, with their options.
    """

    model: dict[str, Any]
    steps: dict[str, Any]
    input: dict[str, Any]
    task: str = "prepare"
    mode: Literal["eval", "train"] = "eval"
    amp: Literal["none", "bfloat16", "float16"] = "none"
    strict: bool = True
    known_issues: Literal["error", "warn", "ignore"] = "error"
    fail_on: Annotated[tuple[str, ...], "a list of words", _check_fail_on] = ()
    stages: dict[str, Stage] = field(default_factory=dict)
    plugins: Annotated[tuple[str, ...], "a list of modules", _check_plugins] = ()
    seed: Annotated[int, _check_seed] = 0
    isolate: bool = True
    resume: bool = False
    overwrite: bool = False
    weights: Annotated[str, "the path of a file", check_readable] | None = None
    strip: Annotated[str, "a prefix of names, as in module."] | None = None
    save: Annotated[str, "the path of a file", check_writable] | None = None
    recipe: Annotated[str, "the path of a file"] | None = None
    choices: dict[str, Any]


def read_settings(
    config: Mapping[str, Any], *, choices: Mapping[str, Any], models: Iterable[str] = ()
) -> Settings:
    """Check a resolved configuration and return its settings.

    `models` are the options of the group `model`, for the message if no model is chosen.

    Raises:
        ConfigError: with one problem for every error in it.
    """
    read: dict[str, Any] = {"choices": dict(choices), "stages": {}}
    hints = get_type_hints(Settings, include_extras=True)
    problems = [*_unknown_keys(config)]
    task = read["task"] = config.get("task", "prepare")
    if task not in tasks():
        remedy = choose(str(task), tasks())
        problems.append(Problem("task", f"{as_written(task)} is not allowed", remedy))
    for key in _values():
        if key in config:
            try:
                read[key] = convert(config[key], hints[key])
            except ValueError as error:
                problems.append(Problem(key, *error.args))
    for cls in ordered_stages():
        with _collected(problems):
            read["stages"][cls.name] = cls.from_options(config.get(cls.name, {}), config)
    checks: dict[str, Callable[[dict[str, Any]], Iterable[Problem]]] = {
        "model": lambda model: _check_model(model, list(models)),
        "input": _check_input,
        "steps": lambda steps: _check_steps(steps, plugins=bool(config.get("plugins"))),
    }
    for key, check in checks.items():
        read[key] = {} if key == "steps" and config.get(key) is None else config.get(key, {})
        if isinstance(read[key], dict):
            problems += check(read[key])
        else:
            wrong = f"{as_written(read[key])} is not a mapping"
            remedy = f"choose an option of the group, or set its keys as {key}.KEY=value"
            problems.append(Problem(key, wrong, remedy))
    if not problems and read.get("save") and not tasks()[task].prepares:
        not_written = f"task={task} does not prepare weights to save"
        problems.append(Problem("save", not_written, "drop save, or choose task=prepare"))
    if not problems and read.get("strip") and not read.get("weights"):
        problems.append(Problem("strip", "there is no file of weights", "add weights=FILE"))
    if not problems and read.get("mode") == "train":
        problems += _check_training(read["steps"])
    if problems:
        raise ConfigError.of(problems)
    return Settings(**read)


@contextmanager
def _collected(problems: list[Problem]) -> Iterator[None]:
    """Add the problems of a ConfigError in the block to `problems`, and go on."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


def _unknown_keys(config: Mapping[str, Any]) -> Iterable[Problem]:
    known = {*(field.name for field in fields(Settings)), *STAGES} - {"choices", "stages"}
    for key in map(str, config.keys() - known):
        if key in group_names():
            remedy = "let the file of the option begin with '# @package _global_'"
        else:
            remedy = key_remedy(key, config[key])
        wrong = "is a step, not a key" if key in STEPS else "no such key"
        yield Problem(key, wrong, remedy)


def key_remedy(key: str, value: Any = "") -> str:
    """Return what to write in place of a key at the top that does not exist, which was given `value`."""
    if key in STEPS:
        if value is None or value is False:
            return f"write steps.{key}=null to drop it"
        options = "" if value in ("", True, {}) else f"; --help {key} shows its options"
        return f"write +steps.{key}={{}}{options}"
    meant = {name: f"+steps.{name}={{}}" for name in STEPS} | {name: name for name in key_names()}
    meant |= _OTHER_KEYS
    if close := nearest(key, meant):
        near = meant[close[0]]
        return f"did you mean {near if '=' in near else repr(near)}?"
    return f"keys: {', '.join(key_names())}"


def _check_model(model: dict[str, Any], models: list[str]) -> Iterable[Problem]:
    target = model.get("_target_")
    if target is None:
        remedy = "choose model=NAME, or give your own as model._target_=package.module.name"
        listed = f"; {choose_option('', 'model', models)}" if models else ""
        yield Problem("model", "no model is chosen", remedy + listed)
    elif not isinstance(target, str) or not _is_dotted(target):
        remedy = "give the dotted name of a class or function, as in my_package.nets.build"
        yield Problem("model._target_", f"{as_written(target)} is not a dotted name", remedy)


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _check_training(steps: dict[str, Any]) -> Iterable[Problem]:
    for name, options in steps.items():
        if options is not None and name in STEPS:  # a step of a plugin is registered later
            with suppress(PrepareError):  # of a plugin that cannot be imported
                yield from STEPS[name].from_options(options).in_training()


def _check_input(config: dict[str, Any]) -> list[Problem]:
    problems: list[Problem] = []
    with _collected(problems):
        read_example(config)
    return problems


def _check_steps(steps: dict[str, Any], *, plugins: bool) -> list[Problem]:
    problems: list[Problem] = []
    for name, options in steps.items():
        if options is None or (plugins and isinstance(options, dict) and name not in STEPS):
            continue  # A plugin may register it; plugins are imported only in the job.
        if not isinstance(options, dict):
            problems.append(no_options(name, options))
            continue
        # An installed plugin that cannot be imported fails the job, with its traceback.
        with suppress(PrepareError), _collected(problems):
            step = STEPS[name].from_options(options)
            problems += expressions(f"steps.{name}", step.to_options())
    return problems
