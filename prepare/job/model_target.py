"""Finds what a model's `_target_` names, and checks its keywords before anything is built."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

from prepare.core.utils.options import as_written
from prepare.core.utils.suggest import choose, nearest
from prepare.core.utils.text import first_line
from prepare.errors import ConfigError, ModelError, PrepareError, Problem

# Packages that come with an extra of ours, as they are imported.
EXTRAS = {
    "monai": "monai",
    "dynamic_network_architectures": "nnunet",
    "diffusers": "diffusers",
    "transformers": "transformers",
    "torchvision": "torchvision",
    "timm": "timm",
}
# Keys that are for Hydra, and not for the target.
_HYDRAS = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")
_CONVERTS = ("none", "partial", "object", "all")


def check_targets(config: Mapping[str, Any], where: str = "model") -> None:
    """Checks a mapping with `_target_`, and every such mapping within it.

    Raises:
        ConfigError: with one problem for every target that does not exist and every keyword that
            is unknown or missing.
        ModelError: importing the target's module raised.
    """
    problems: list[Problem] = []
    for path, node in _targets(config, where):
        try:
            problems += _keyword_problems(locate(node["_target_"], path), node, path)
        except ModelError:
            raise
        except PrepareError as error:
            problems += error.problems
    if problems:
        raise ConfigError.of(problems)


def hydra_key_problems(config: Mapping[str, Any], where: str = "model") -> Iterable[Problem]:
    """The values that Hydra would refuse, or pass over, in the keys that are its own."""
    for path, node in _targets(config, where):
        for key in ("_partial_", "_recursive_"):
            if key in node and not isinstance(node[key], bool):
                wrong = f"{as_written(node[key])} is not allowed"
                yield Problem(f"{path}.{key}", wrong, "give true or false")
        if "_convert_" in node and node["_convert_"] not in _CONVERTS:
            word = node["_convert_"]
            yield Problem(
                f"{path}._convert_",
                f"{as_written(word)} is not allowed",
                choose(str(word), _CONVERTS),
            )
        if not isinstance(node.get("_args_") or [], list):
            yield Problem(
                f"{path}._args_", f"{as_written(node['_args_'])} is no list", "give [a,b]"
            )


def locate(target: str, where: str = "model") -> Callable[..., Any]:
    """The class or function that the dotted name `target` means.

    Raises:
        ConfigError: there is none; names the part that is not there, and what is close to it.
        ModelError: importing its module raised.
    """
    where = f"{where}._target_"
    parts = target.split(".")
    module = _import(parts[0], where, target)
    found: Any = module
    for index, part in enumerate(parts[1:], start=1):
        if isinstance(found, ModuleType) and not hasattr(found, part):
            with suppress(_AbsentError):
                _import(".".join(parts[: index + 1]), where, target)
        if not hasattr(found, part):
            name = ".".join(parts[:index])
            close = nearest(part, _names(found))
            remedy = f"did you mean {'.'.join([name, close[0]])!r}?" if close else ""
            raise ConfigError(where, f"{name} has no {part!r}", remedy)
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(where, f"{target} is no class or function")
    return found


class _AbsentError(ConfigError):
    """The module itself does not exist."""


def _import(name: str, where: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing == name and "." in name:
            raise _AbsentError(where, f"there is no module {name}") from error
        whose = "" if missing == target.partition(".")[0] else f", which {name} imports"
        raise ConfigError(
            where, f"there is no module {missing!r}{whose}", _install(missing)
        ) from error
    except Exception as error:
        said = first_line(error)
        wrong = f"importing {name} raised {type(error).__name__}: {said}"
        raise ModelError(where, wrong) from error


def _install(package: str) -> str:
    extra = EXTRAS.get(package.partition(".")[0])
    if extra:
        return f"install the extra: pip install 'torch-prepare[{extra}]'"
    return "install it, or start in the folder that holds it"


def _names(found: Any) -> list[str]:
    names = [name for name in dir(found) if not name.startswith("_")]
    if isinstance(found, ModuleType):
        names += [module.name for module in pkgutil.iter_modules(getattr(found, "__path__", []))]
    return names


def _targets(node: Any, where: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    if isinstance(node, Mapping):
        if isinstance(node.get("_target_"), str):
            yield where, node
        for key, item in node.items():
            yield from _targets(item, f"{where}.{key}")
    elif isinstance(node, list):
        for index, item in enumerate(node):
            yield from _targets(item, f"{where}[{index}]")


def _keyword_problems(
    found: Callable[..., Any], node: Mapping[str, Any], where: str
) -> Iterable[Problem]:
    try:
        parameters = inspect.signature(found).parameters.values()
        # A wrapper may take more than what it wraps says: the configurations of transformers do.
        outermost = inspect.signature(found, follow_wrapped=False).parameters.values()
    except (ValueError, TypeError):  # classes written in C may have no signature
        return
    positional = node.get("_args_") or []
    given = [str(key) for key in node if key not in _HYDRAS]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    allowed = [p.name for p in named]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in (*parameters, *outermost))
    unknown = [] if takes_any else [key for key in given if key not in allowed]
    for key in unknown:
        known = [*allowed, *_HYDRAS] if key.startswith("_") else allowed
        wrong = f"{node['_target_']} takes no such keyword"
        yield Problem(f"{where}.{key}", wrong, choose(key, known, noun="keywords"))
    if node.get("_partial_"):
        return
    # A keyword that is misspelt is not complained of as missing too.
    given += [match for key in unknown for match in nearest(key, allowed)[:1]]
    for index, parameter in enumerate(named):
        filled = parameter.kind is parameter.POSITIONAL_OR_KEYWORD and index < len(positional)
        if parameter.default is parameter.empty and parameter.name not in given and not filled:
            wrong = f"{node['_target_']} needs it, and it is not given"
            remedy = f"give +{where}.{parameter.name}=value"
            yield Problem(f"{where}.{parameter.name}", wrong, remedy)
