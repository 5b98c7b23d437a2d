"""Build the steps that a mapping of names to options declares."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from prepare import recipe
from prepare.core.utils.options import no_options, plain
from prepare.core.utils.text import first_line
from prepare.errors import ConfigError, Problem, raise_problems
from prepare.registry import STEPS

if TYPE_CHECKING:
    from prepare.step import Step


def build_steps(steps: Mapping[str, Any], of_recipe: Collection[str] = ()) -> list[Step]:
    """Return the steps; those named in `of_recipe` may set only what is known to be harmless.

    Raises:
        ConfigError: with one problem for every mistake.
    """
    check_mapping(steps)
    built: list[Step] = []
    problems: list[Problem] = []
    for name in steps:
        try:
            if (options := _options(name, steps)) is not None:
                built.append(step := STEPS[name].from_options(options))
                if name in of_recipe:
                    problems += recipe.refused(step)
        except ConfigError as error:
            problems += error.problems
    raise_problems(ConfigError, problems)
    return built


def check_mapping(steps: object) -> None:
    """Refuse what is not a mapping.

    Raises:
        ConfigError: with what to give.
    """
    if not isinstance(steps, Mapping):
        wrong = f"{type(steps).__name__} is not a mapping"
        raise ConfigError("steps", wrong, "give {name: options}")


def _options(name: str, steps: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        options = plain(steps[name])
    except Exception as error:  # OmegaConf resolves interpolations here, and names what is wrong
        raise ConfigError(f"steps.{name}", first_line(error)) from error
    if options is not None and not isinstance(options, dict):
        raise ConfigError.of([no_options(name, options)])
    return options
