"""Recipes: the steps of a pipeline as one plain YAML file, read as data and never as code.

A recipe is `{format: prepare.recipe, version: 1, steps: {name: {option: value}}}` and nothing else;
`plain_yaml` defines the YAML that is allowed. The Pipeline checks the names of steps and options.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, get_type_hints

from prepare.core.utils import files, plain_yaml
from prepare.core.utils.options import is_for_recipes, plain
from prepare.core.utils.plain_yaml import dotted, kind_of, short_repr
from prepare.core.utils.suggest import choose
from prepare.errors import FileError, Problem, RecipeError, raise_problems

if TYPE_CHECKING:
    from prepare.step import Step

FORMAT = "prepare.recipe"
VERSION = 1
MAX_PROBLEMS = 20
_KEYS = {"format": FORMAT, "version": VERSION, "steps": "{name: {option: value}}"}
_BEGINNING = f"a recipe begins with 'format: {FORMAT}'"

_Steps = dict[str, Any]
_At = Callable[[tuple[str | int, ...]], str]


def load(path: str | os.PathLike[str]) -> _Steps:
    """Return the steps of the recipe at `path`: `{name: {option: value} or None}`; raise RecipeError."""
    try:
        data = files.read_bytes(path, limit=plain_yaml.MAX_BYTES)
    except FileError as error:
        raise RecipeError.of(error.problems) from error
    return loads(data, where=files.printable_path(path))


def loads(text: str | bytes, *, where: str = "recipe") -> _Steps:
    """Return the steps of the recipe `text`; raise RecipeError with places in the file `where`."""
    document = plain_yaml.read(text, where, remedy=_BEGINNING)
    return _steps(document.value, document.at)


def save(path: str | os.PathLike[str], steps: _Steps) -> None:
    """Write `steps` as a recipe, whole or not at all; raise RecipeError or FileError."""
    files.write_text(path, dumps(steps))


def dumps(steps: _Steps) -> str:
    """Return the canonical text of a recipe with these steps; `loads` returns exactly `steps`.

    Raises RecipeError with the path of a value that is not plain data: `steps.half.keep[1]`.
    """
    raise_problems(RecipeError, _step_problems(steps, dotted)[:MAX_PROBLEMS])
    content = {"format": FORMAT, "version": VERSION, "steps": steps}
    return plain_yaml.write(content, "steps")


def options_of(step: "Step") -> dict[str, Any]:
    """Return the options of `step` that a recipe may hold: it may be a stranger's.

    These are defaults, numbers, the words of a `Literal`, patterns, and what the mark `ForRecipes` on the
    type of an option allows.
    """
    hints = get_type_hints(type(step), include_extras=True)
    held = {}
    for name, default in _defaults(step).items():
        value = getattr(step, name)
        if value == default or is_for_recipes(value, hints[name]):
            held[name] = plain(value)
        elif default == {}:  # only its keys are left out
            held[name] = {}
    return held


def can_hold(step: "Step") -> bool:
    """Return whether every option of `step` without a default may stand in a recipe."""
    needed = {name for name, default in _defaults(step).items() if default is MISSING}
    return needed <= options_of(step).keys()


def refused(step: "Step") -> list[Problem]:
    """Return a problem for each option of `step`, which a recipe declares, that a recipe may not set."""
    wrong = "a recipe may set only what is known to be harmless, and this is not"
    remedy = "remove it there; Python and the command line may set it"
    return [Problem(where, wrong, remedy) for where in _not_allowed(step)]


def left_out(step: "Step") -> list[Problem]:
    """Return a problem for each option of `step` that is left out of a recipe, or one for the step."""
    wrong = "is left out of recipes, which hold only what is known to be harmless"
    remedy = "give it beside the recipe, in Python as Pipeline.load(path, steps=...)"
    places = _not_allowed(step) if can_hold(step) else (f"steps.{step.name}",)
    return [Problem(where, wrong, remedy) for where in places]


def _not_allowed(step: "Step") -> Iterator[str]:
    """Yield the options that a recipe may not set: `steps.compile.options.cpp.cxx`."""
    allowed = options_of(step)
    for name, value in step.to_options().items():
        if name not in allowed:
            yield dotted(("steps", step.name, name))
        elif isinstance(value, dict):
            rest = (key for key in value if key not in allowed[name])
            yield from (dotted(("steps", step.name, name, key)) for key in rest)


def _defaults(step: "Step") -> dict[str, Any]:
    """Return the default of each option; MISSING, which equals no value, for one without."""
    makers = {field: field.default_factory for field in fields(step)}
    return {f.name: f.default if make is MISSING else make() for f, make in makers.items()}


def _steps(tree: object, at: _At) -> _Steps:
    """Return the steps in the content of a recipe; raise one RecipeError with all its mistakes."""
    if not isinstance(tree, dict):
        raise RecipeError(at(()), f"is {kind_of(tree)}, not a mapping", _BEGINNING)
    version = tree.get("version")
    if tree.get("format") == FORMAT and type(version) is int and version > VERSION:
        wrong = f"has version {version}, and this prepare reads version {VERSION}"
        raise RecipeError(at(("version",)), wrong, "upgrade prepare")
    problems = [*_header_problems(tree, at)]
    if "steps" in tree:
        problems += _step_problems(tree["steps"], at)
    raise_problems(RecipeError, problems[:MAX_PROBLEMS])
    return dict(tree["steps"])


def _header_problems(tree: dict[str, Any], at: _At) -> Iterator[Problem]:
    """Yield unknown, missing and wrong top-level keys."""
    for key in [key for key in tree if key not in _KEYS][:MAX_PROBLEMS]:
        yield Problem(at((key,)), f"unknown key {short_repr(key)}", choose(key, _KEYS))
    for key, right in _KEYS.items():
        if key not in tree:
            yield Problem(at(()), f"the key '{key}' is missing", f"add '{key}: {right}'")
        # 1.0 and True equal 1, but are not a version.
        elif key != "steps" and (tree[key] != right or type(tree[key]) is not type(right)):
            wrong = f"the {key} is {short_repr(tree[key])}, not {short_repr(right)}"
            yield Problem(at((key,)), wrong, f"write '{key}: {right}'")


def _step_problems(steps: object, at: _At) -> list[Problem]:
    if type(steps) is not dict:
        remedy = "write 'steps: {name: {option: value}}'"
        return [Problem(at(("steps",)), f"'steps' is {kind_of(steps)}, not a mapping", remedy)]
    remedy = "write its options as 'option: value', or null to drop the step"
    return [
        Problem(at(("steps", name)), f"the step {short_repr(name)} is {kind_of(options)}", remedy)
        for name, options in steps.items()
        if options is not None and type(options) is not dict and type(name) is str
    ]
