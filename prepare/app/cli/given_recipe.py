"""Take the steps of a recipe into the configuration: `recipe=FILE`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prepare import recipe
from prepare.app.cli.compose_config import ERRORS, Composer, composing, read_override, store_recipe
from prepare.app.cli.resolve_config import plain_mapping
from prepare.app.job.settings import RECIPE
from prepare.core.utils.folders import STEP_GROUPS, own_name
from prepare.errors import ConfigError, PrepareError, Problem, raise_problems
from prepare.registry import STEPS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

# Its word on the command line replaces what the recipe says, as in `Pipeline.load(path, device=...)`.
_REPLACES = "device"


def take_recipe(overrides: Iterable[str], config_dir: str | None) -> None:
    """Store the steps of the recipe that `overrides` name, or none, for every composition that follows.

    Raises:
        ConfigError: the file is not a recipe, holds what a recipe may not set, or contradicts an override.
    """
    store_recipe({})
    words = dict(_read(overrides))
    path = words.get(RECIPE)
    if not isinstance(path, str):
        return
    steps = steps_of(path)
    given = {group: own_name(group, word) for group, word in words.items() if group in STEP_GROUPS}
    if given:
        problems: list[Problem] = []
        with composing(config_dir) as composer:
            for group, word in given.items():
                adds = _steps_by_option(composer, group)
                names = {name for added in adds.values() for name in added}
                if group == _REPLACES:
                    steps = {name: steps[name] for name in steps if name not in names}
                elif isinstance(word, str) and word in adds:
                    held = {name: steps[name] for name in steps if name in names}
                    problems += _contradictions(
                        held, f"{group}={word}", adds[word], [*adds.values()]
                    )
        raise_problems(ConfigError, problems)
    store_recipe(steps)


def _read(overrides: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the key and the value of each override that can be read and has one value."""
    for override in filter(None, map(read_override, overrides)):
        if override.several and override.key == RECIPE:
            remedy = "write recipe=FILE, and sweep over other keys"
            raise ConfigError(RECIPE, "takes one file for all runs of a sweep", remedy)
        yield override.key, override.value


def steps_of(path: str) -> dict[str, Any]:
    """Return the steps of a recipe, which set only what is known to be harmless."""
    try:
        steps = recipe.load(path)
    except PrepareError as error:
        raise ConfigError.of(error.problems) from error
    problems: list[Problem] = []
    for name, options in steps.items():
        if name not in STEPS:
            problem = STEPS.problem(name)
            problems.append(replace(problem, where=f"{path}: {problem.where}"))
            continue
        try:
            if options is not None:
                problems += recipe.refused(STEPS[name].from_options(options))
        except ConfigError as error:
            problems += error.problems
    raise_problems(ConfigError, problems)
    return {
        name: STEPS[name].from_options(options).to_options()
        for name, options in steps.items()
        if options is not None
    }


def _steps_by_option(composer: Composer, group: str) -> dict[str, Mapping[str, Any]]:
    """Return the steps that each option of a group adds."""
    others = [f"~{other}" for other in STEP_GROUPS if other not in (group, "memfmt")]
    steps_of: dict[str, Mapping[str, Any]] = {}
    for option in composer.groups[group]:
        with suppress(*ERRORS):
            composed = composer.compose([*others, f"{group}={option}"])
            steps_of[option] = plain_mapping(composed)["steps"]
    return steps_of


def _contradictions(
    held: Mapping[str, Any], word: str, asked: Mapping[str, Any], adds: Iterable[Mapping[str, Any]]
) -> Iterator[Problem]:
    """Yield a problem for each step of the recipe that `word` asks for with other options, or not at all.

    Of a step's options, those count in which the options of the group differ: `adds` are their steps.
    """
    for name, options in held.items():
        if name in asked:
            every = [steps[name] for steps in adds if name in steps]
            decided = [key for key in asked[name] if any(o[key] != every[0][key] for o in every)]
            other = {
                key: options.get(key) for key in decided if options.get(key) != asked[name][key]
            }
            shown = ", ".join(f"{key}: {value}" for key, value in other.items())
            wrong = f"contradicts the recipe, which has steps.{name}={{{shown}}}" if other else ""
            remedy = f"drop {word}, or set that option as steps.{name}.OPTION=value"
        else:
            # A format for 2-d convolutions says nothing of 3-d ones.
            wrong = "" if asked else f"contradicts the recipe, which has the step {name}"
            remedy = f"drop {word}, or drop the step with steps.{name}=null"
        if wrong:
            yield Problem(word, wrong, remedy)
