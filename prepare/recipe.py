"""Recipes: the steps of a pipeline as one plain YAML file, read as data and never as code.

A recipe is `{format: prepare.recipe, version: 1, steps: {name: {option: value}}}` and nothing else;
`plain_yaml` says what of YAML may stand in it. Which steps and options exist is for the Pipeline to
say.
"""

import os
from collections.abc import Callable

from prepare.core.utils import files, plain_yaml
from prepare.core.utils.suggest import choose, nearest
from prepare.core.utils.yaml_scalars import dotted, kind_of, short_repr
from prepare.errors import FileError, Problem, RecipeError

FORMAT = "prepare.recipe"
VERSION = 1
MAX_PROBLEMS = 20
_KEYS = {"format": FORMAT, "version": VERSION, "steps": "{name: {option: value}}"}
_BEGINNING = f"a recipe begins with 'format: {FORMAT}'"


def load(path: str | os.PathLike) -> dict:
    """The steps of the recipe at `path`: `{name: {option: value} or None}`; raises RecipeError."""
    try:
        data = files.read_bytes(path, limit=plain_yaml.MAX_BYTES)
    except FileError as error:
        raise RecipeError.of(error.problems) from error
    return loads(data, where=files.printable_path(path))


def loads(text: str | bytes, *, where: str = "recipe") -> dict:
    """The steps of the recipe `text`; raises RecipeError, whose places begin with `where`."""
    document = plain_yaml.read(text, where, remedy=_BEGINNING)
    steps = _steps(document.value, document.at)
    # Indentation and escapes can make it longer when it is written, and it has to be readable then.
    _text(steps, where)
    return steps


def save(path: str | os.PathLike, steps: dict) -> None:
    """Write `steps` as a recipe, whole or not at all; raises RecipeError and FileError."""
    files.write_text(path, dumps(steps))


def dumps(steps: dict) -> str:
    """The canonical text of a recipe with these steps; `loads` gives exactly them back.

    Raises RecipeError, which names the path of what is not plain data: `steps.half.keep[1]`.
    """
    if problems := _step_problems(steps, dotted):
        raise RecipeError.of(problems[:MAX_PROBLEMS])
    return _text(steps, "steps")


def _text(steps: dict, where: str) -> str:
    return plain_yaml.write({"format": FORMAT, "version": VERSION, "steps": steps}, where)


def _steps(tree: object, at: Callable[[tuple], str]) -> dict:
    """The steps of a recipe's whole content; all that is wrong around them in one RecipeError."""
    if not isinstance(tree, dict):
        raise RecipeError(at(()), f"is {kind_of(tree)}, not a mapping", _BEGINNING)
    version = tree.get("version")
    if tree.get("format") == FORMAT and type(version) is int and version > VERSION:
        wrong = f"has version {version}, and this prepare reads version {VERSION}"
        raise RecipeError(at(("version",)), wrong, "upgrade prepare")
    problems = [*_header_problems(tree, at)]
    if "steps" in tree:
        problems += _step_problems(tree["steps"], at)
    if problems:
        raise RecipeError.of(problems[:MAX_PROBLEMS])
    return tree["steps"]


def _header_problems(tree: dict, at: Callable[[tuple], str]) -> list[Problem]:
    """Unknown, missing and wrong top-level keys; a misspelt key is not also a missing one."""
    unknown = [key for key in tree if key not in _KEYS][:MAX_PROBLEMS]
    missing = [key for key in _KEYS if key not in tree]
    guesses = [guess for key in unknown for guess in nearest(key, missing)[:1]]
    problems = [
        Problem(at((key,)), f"unknown key {short_repr(key)}", choose(key, _KEYS)) for key in unknown
    ]
    problems += [
        Problem(at(()), f"the key '{key}' is missing", f"add '{key}: {_KEYS[key]}'")
        for key in missing
        if key not in guesses
    ]
    for key, right in (("format", FORMAT), ("version", VERSION)):
        # 1.0 and True equal 1, and are no version.
        if key in tree and (tree[key] != right or type(tree[key]) is not type(right)):
            wrong = f"the {key} is {short_repr(tree[key])}, not {short_repr(right)}"
            problems.append(Problem(at((key,)), wrong, f"write '{key}: {right}'"))
    return problems


def _step_problems(steps: object, at: Callable[[tuple], str]) -> list[Problem]:
    if type(steps) is not dict:
        remedy = "write 'steps: {name: {option: value}}'"
        return [Problem(at(("steps",)), f"'steps' is {kind_of(steps)}, not a mapping", remedy)]
    remedy = "write its options as 'option: value', or null to drop the step"
    return [
        Problem(at(("steps", name)), f"the step {short_repr(name)} is {kind_of(options)}", remedy)
        for name, options in steps.items()
        if options is not None and type(options) is not dict and type(name) is str
    ]
