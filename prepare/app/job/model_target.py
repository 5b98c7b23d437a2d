"""Locate the `_target_` of a model, and check its keywords before anything is built."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

from prepare.core.utils.packages import described, install_remedy, place_of
from prepare.core.utils.suggest import choose, nearest
from prepare.errors import ConfigError, ModelError, PrepareError, Problem

# Keys that Hydra reads and does not pass to the target.
_HYDRA_KEYS = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")
# The own names of a module are listed if they are not more.
_LISTED = 12


def check_targets(config: Mapping[str, Any]) -> None:
    """Check a mapping with `_target_`, and every such mapping inside it.

    Raises:
        ConfigError: with one problem for every target that does not exist and every keyword that
            is unknown or missing.
        ModelError: importing the target's module raised.
    """
    problems: list[Problem] = []
    for path, node in targets_in(config, "model"):
        try:
            target = locate_named(node["_target_"], f"{path}._target_")
            problems += _keyword_problems(target, node, path)
        except ModelError:
            raise
        except PrepareError as error:
            problems += error.problems
    if problems:
        raise ConfigError.of(problems)


def without_method(config: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the configuration of a model without `method`, and the method that its call shall run.

    That is None if none is given, or if the target has a keyword of this name.
    """
    rest = {key: value for key, value in config.items() if key != "method"}
    method = config.get("method")
    if method is not None:
        with suppress(PrepareError, TypeError, ValueError):  # a wrong target is reported elsewhere
            target = locate_named(config["_target_"], "model._target_")
            if "method" in inspect.signature(target).parameters:
                return dict(config), None
    return rest, method


def locate_named(target: str, where: str) -> Callable[..., Any]:
    """Return the class or function with the dotted name `target`, which the key `where` gives.

    Raises:
        ConfigError: it does not exist; the error names the missing part and its nearest match.
        ModelError: importing its module raised.
    """
    parts = target.split(".")
    module = _import(parts[0], where, target)
    target_object: Any = module
    for index, part in enumerate(parts[1:], start=1):
        if isinstance(target_object, ModuleType) and not hasattr(target_object, part):
            with suppress(_AbsentError):
                _import(".".join(parts[: index + 1]), where, target)
        if not hasattr(target_object, part):
            name = ".".join(parts[:index])
            raise ConfigError(where, f"{name} has no {part!r}", _instead(part, target_object, name))
        target_object = getattr(target_object, part)
    if not callable(target_object):
        own = _own_names(target_object) if isinstance(target_object, ModuleType) else []
        remedy = f"it has {', '.join(own)}: give {target}.{own[0]}" if own else ""
        raise ConfigError(where, f"{target} is not a class or function", remedy)
    return target_object


class _AbsentError(ConfigError):
    """The module does not exist."""


def _import(name: str, where: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing == name and "." in name:
            raise _AbsentError(where, f"module {name!r} does not exist") from error
        raise absent(missing, where, error, named=target) from error
    except Exception as error:
        raise ModelError(where, f"importing {name}: {described(error)}") from error


def absent(module: str, where: str, error: ImportError, *, named: str) -> ConfigError:
    """Return the error of a missing `module`, with the line that imports it, or the name that was meant.

    `named` is the dotted name that the user gave.
    """
    name = named.partition(".")[0]
    if module.partition(".")[0] != name:
        place = place_of(error)
        importer = f", imported at {place}," if place else ""
        wrong = f"module {module!r}{importer} does not exist"
        return ConfigError(where, wrong, install_remedy(module))
    close = nearest(name, [each.name for each in pkgutil.iter_modules([os.curdir])])
    remedy = install_remedy(module)
    if close and close[0] != name:
        remedy = f"did you mean {close[0]!r}? {remedy}"
    return ConfigError(where, f"module {module!r} does not exist", remedy)


def _instead(part: str, owner: Any, name: str) -> str:
    """Return the remedy for a name that `owner` does not have: the nearest, else its own names."""
    if close := nearest(part, _names(owner)):
        return f"did you mean {'.'.join([name, close[0]])!r}?"
    if not isinstance(owner, ModuleType):
        return ""
    own = _own_names(owner)
    return f"it has {', '.join(own)}" if own else ""


def _own_names(owner: ModuleType) -> list[str]:
    """Return the classes and functions that a module defines, networks first; none if they are too many."""
    own = {
        name: value
        for name, value in vars(owner).items()
        if not name.startswith("_") and callable(value) and value.__module__ == owner.__name__
    }
    # A class that has a forward is a network: this module imports no torch.
    names = sorted(own, key=lambda name: not hasattr(own[name], "forward"))
    return names if len(names) <= _LISTED else []


def _names(owner: Any) -> list[str]:
    names = [name for name in dir(owner) if not name.startswith("_")]
    if isinstance(owner, ModuleType):
        names += [module.name for module in pkgutil.iter_modules(getattr(owner, "__path__", []))]
    return names


def targets_in(node: Any, where: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    if isinstance(node, Mapping):
        if isinstance(node.get("_target_"), str):
            yield where, node
        for key, item in node.items():
            yield from targets_in(item, f"{where}.{key}")
    elif isinstance(node, list):
        for index, item in enumerate(node):
            yield from targets_in(item, f"{where}[{index}]")


def _keyword_problems(
    target: Callable[..., Any], node: Mapping[str, Any], where: str
) -> Iterable[Problem]:
    try:
        parameters = inspect.signature(target).parameters.values()
        # A wrapper may accept more than the function it wraps, as the configurations of transformers do.
        outermost = inspect.signature(target, follow_wrapped=False).parameters.values()
    except (ValueError, TypeError):  # classes written in C may have no signature
        return
    positional = node.get("_args_") or []
    keywords = [str(key) for key in node if key not in _HYDRA_KEYS]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    allowed = [p.name for p in named]
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in (*parameters, *outermost))
    unknown = [] if accepts_any else [key for key in keywords if key not in allowed]
    for key in unknown:
        known = [*allowed, *_HYDRA_KEYS] if key.startswith("_") else allowed
        wrong = f"not a keyword of {node['_target_']}"
        yield Problem(f"{where}.{key}", wrong, choose(key, known, noun="keywords"))
    if node.get("_partial_"):
        return
    # A misspelt keyword is not reported as missing too.
    keywords += [match for key in unknown for match in nearest(key, allowed)[:1]]
    for index, parameter in enumerate(named):
        filled = parameter.kind is parameter.POSITIONAL_OR_KEYWORD and index < len(positional)
        if parameter.default is parameter.empty and parameter.name not in keywords and not filled:
            wrong = f"is missing, and {node['_target_']} needs it"
            remedy = f"give +{where}.{parameter.name}=value"
            yield Problem(f"{where}.{parameter.name}", wrong, remedy)
