"""Convert plain values, as of a configuration or a record, to the types of fields, and report mistakes."""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Union

from prepare.core.utils.suggest import choose, meant
from prepare.errors import ConfigError, Problem

# The most characters of a value in a message.
_LONGEST = 300
_INTEGERS = range(-(1 << 63), 1 << 64)
_UNIONS = (Union, types.UnionType)
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Any: "a value",
    type(None): "null",
}


class _MisfitError(ValueError):
    """A value has another type; a check in an annotation that refuses it says more."""


class ForRecipes(NamedTuple):
    """Marks the type of an option, in `Annotated`: a recipe may set the values that `allows` accepts."""

    allows: Callable[[Any], bool] = lambda _: True


def is_for_recipes(value: Any, hint: Any) -> bool:
    """Return whether a recipe may set an option of type `hint` to `value`: a number, or one of known words.

    Any other text may name a file, an address, a program or code. The mark `ForRecipes` decides for its type.
    """
    origin, args = _parts(hint)
    if origin is Annotated:
        marks = [each for each in args[1:] if isinstance(each, ForRecipes)]
        if not marks:
            return is_for_recipes(value, args[0])
        with suppress(ValueError):
            return bool(convert(plain(value), hint) == value and marks[0].allows(value))
        return False
    if value is None or type(value) in (bool, int, float):
        return True
    if origin in _UNIONS:
        return any(is_for_recipes(value, arg) for arg in args)
    if origin is tuple:
        return isinstance(value, tuple) and all(is_for_recipes(item, args[0]) for item in value)
    return origin is Literal and value in args


def plain(value: Any) -> Any:
    """Return `value` as dicts, lists and scalars; torch's dtypes, devices and formats as their names."""
    if isinstance(value, str | bytes) or not isinstance(value, Mapping | Sequence):
        return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value]


def read_options(
    cls: type, options: Mapping[str, Any], *, where: str, noun: str = "option"
) -> dict[str, Any]:
    """Return keyword arguments for the dataclass `cls`, checked against the types of its fields.

    Raises:
        ConfigError: with one problem for every unknown, missing or ill-typed option.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    problems: list[Problem] = []
    read: dict[str, Any] = {}
    for key, value in options.items():
        if key not in fields:
            remedy = choose(str(key), fields, noun=f"{noun}s")
            problems.append(Problem(f"{where}.{key}", f"no such {noun}", remedy))
            continue
        try:
            read[key] = convert(plain(value), hints[key])
        except ValueError as error:
            problems.append(Problem(f"{where}.{key}", *error.args))
    for key, field in fields.items():
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and key not in options:
            problems.append(Problem(f"{where}.{key}", "is missing", f"give {describe(hints[key])}"))
    if problems:
        raise ConfigError.of(problems)
    return read


def convert(value: Any, hint: Any) -> Any:  # noqa: PLR0912  a branch for each kind of type
    """Convert `value` to the type `hint`; raise ValueError(problem, remedy) if that is not possible."""
    if type(value) is hint and hint in (str, bool):
        return value
    origin, args = _parts(hint)
    if origin is Annotated:
        try:
            result = convert(value, args[0])
        except ValueError:
            # The description in the annotation says more than that of the type.
            raise _misfit(value, hint) from None
        for check in filter(callable, args[1:]):
            known = check(result)  # another name of the value, if it returns one
            result = result if known is None else known
        return result
    if origin in _UNIONS:
        kinds = [arg for arg in args if arg is not type(None) or value is None]
        if len(kinds) == 1:
            return convert(value, kinds[0])
        for kind in kinds:
            with suppress(_MisfitError):
                return convert(value, kind)
        raise _misfit(value, hint)
    if origin is Literal:
        word = value if isinstance(value, str) else ""
        if (known := meant(word, args)) is not None:
            return known
        raise _MisfitError(f"{as_written(value)} is not allowed", choose(word, args))
    if origin in (tuple, list) and isinstance(value, (str, list)):
        items = [value] if isinstance(value, str) else value
        if args[-1] is not Ellipsis and len(args) > 1:
            return tuple(convert(*pair) for pair in zip(items, args, strict=True))
        return origin(convert(item, args[0]) for item in items)
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {args[0](key): convert(item, args[1]) for key, item in value.items()}
    if isinstance(value, dict) and (dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")):
        return make(hint, value)
    if type(value) is int and value not in _INTEGERS:
        raise ValueError("has more than 64 bits", f"give {describe(hint)}")
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if hint is Any or type(value) is hint is not float or (value is None and hint is type(None)):
        return value
    raise _misfit(value, hint)


@cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(hint), typing.get_args(hint)


def make(cls: type, values: Mapping[str, Any]) -> Any:
    """Return a dataclass or NamedTuple of `values`; raise ValueError, KeyError or TypeError for others."""
    hints = _hints(cls)
    return cls(**{key: convert(value, hints[key]) for key, value in values.items()})


_hints = cache(typing.get_type_hints)


def no_options(name: str, value: Any) -> Problem:
    """Return the problem of a step whose options are not a mapping."""
    remedy = "give them as {OPTION:value}, or null to drop the step"
    return Problem(f"steps.{name}", f"{as_written(value)} is not a mapping of options", remedy)


def describe(hint: Any) -> str:
    """Describe a type in words: `a whole number`."""
    origin, args = _parts(hint)
    if origin is Annotated:
        # A string among the annotations describes the value.
        return next((word for word in args[1:] if isinstance(word, str)), describe(args[0]))
    if origin in _UNIONS:
        return " or ".join(map(describe, args))
    if origin is Literal:
        words = [*map(str, args)]
        return " or ".join(words) if len(words) < 3 else f"one of {', '.join(words)}"
    if origin is tuple:
        return "a list of texts" if args[0] is str else f"a list, each {describe(args[0])}"
    if origin in (dict, Mapping):
        return "a mapping"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def as_written(value: Any) -> str:
    """Return a value as the user wrote it, cut: `null`, `true` and `-1`, not None, True and -1.0."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = repr(value).removesuffix(".0")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _misfit(value: Any, hint: Any) -> _MisfitError:
    return _MisfitError(f"{as_written(value)} is not allowed", f"give {describe(hint)}")
