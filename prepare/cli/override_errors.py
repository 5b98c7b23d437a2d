"""Explain an override that Hydra refused: what is wrong with it, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prepare.cli.word_errors import COMMAND_LATE, NO_OVERRIDE
from prepare.core.utils.options import no_options
from prepare.core.utils.suggest import choose, choose_option, nearest, options_text
from prepare.errors import ConfigError, Problem
from prepare.job.settings import NO_MODEL, key_names
from prepare.registry import STAGES, STEPS

# The keys that the option of a group fills: if the option is wrong, a missing key there is no evidence.
FILLS = {"model": ("model", "input"), "input": ("input",)}
_STEP_GROUPS = ("steps",)
# Other words for our keys.
_OTHER_KEYS = {
    **dict.fromkeys(("dtype", "half", "fp16"), "precision"),
    **dict.fromkeys(("memory_format", "format", "layout", "channels_last"), "memfmt"),
    **dict.fromkeys(("net", "network", "arch"), "model"),
    **dict.fromkeys(("shape", "size", "example"), "input"),
}
_OUR_CALLBACK = "hydra.callbacks.prepare"
SWEEPS = "give values with commas and --multirun; for the fastest recipe choose task=tune"
# What earlier versions took, and what to write now.
_REMOVED = {
    "optimize": SWEEPS,
    "hydra/sweeper=optuna": SWEEPS,
    "export=tensorrt": "choose export=onnx; TensorRT's trtexec reads that file on its own machine",
}
# Packages that bring an option of Hydra's own groups; those of our launchers are in `launcher_checks`.
_PLUGINS = {"hydra/launcher=rq": "hydra-rq-launcher"}
# Hydra's own groups, which choose how a sweep runs.
HYDRAS = ("hydra/launcher", "hydra/sweeper")


@dataclass(frozen=True)
class Override:
    """One override: `kind` is set, add or delete; `several` if it gives several values, for a sweep."""

    text: str
    kind: str
    key: str
    value: Any = None
    several: bool = False


@dataclass(frozen=True)
class Menu:
    """The options of each group, and the configuration composed without the refused overrides."""

    groups: Mapping[str, list[str]]
    config: Mapping[str, Any]


def explain(override: Override, menu: Menu, message: str) -> Problem:
    """Return the problem of an override that Hydra refused with `message`."""
    if not override.key:
        return Problem(override.text, "no key before the =", "write key=value, without spaces")
    if within(override.key, "hydra.sweeper.params"):
        remedy = "give one of your keys several values, as in seed=1,2"
        return Problem(override.key, "cannot be set on the command line", remedy)
    if override.several:
        return _explain_several(override)
    if override.key == "steps":
        remedy = "add one as +steps.NAME={}, set an option as steps.NAME.OPTION=value"
        remedy += ", drop one as steps.NAME=null"
        return Problem("steps", "cannot be set as a whole", f"{remedy}; steps: {', '.join(STEPS)}")
    for word in (override.key, f"{override.key}={override.value}"):
        if word in _REMOVED:
            return Problem(word, "was removed", _REMOVED[word])
    if override.key in menu.groups:
        return _explain_choice(override, menu)
    if plugin := _PLUGINS.get(f"{override.key}={override.value}"):
        remedy = f"install it: pip install {plugin}"
        return Problem(override.key, f"{override.value!r} is not installed", remedy)
    if "/" in override.key and (options := re.findall(r"^\t([\w-]+)$", message, re.MULTILINE)):
        remedy = choose(str(override.value), options, noun="installed")
        return Problem(override.key, f"{_value(override)!r} is not an option", remedy)
    if override.key in HYDRAS and isinstance(override.value, list):
        return several_options(override.key)
    if problem := _explain_key(override, menu):
        return problem
    return Problem(override.key, first_sentence(message))


def several_options(group: str) -> Problem:
    """Return the problem of a list for one of Hydra's own groups; Hydra would take its last item."""
    return Problem(group, "takes one option, not a list", f"write {group}=NAME")


def filled_by(group: str) -> tuple[str, ...]:
    """Return the top-level keys that the option of a group fills."""
    return FILLS.get(group, (group,) if group in STAGES else _STEP_GROUPS)


def is_certain(key: str, unfilled: Collection[str], known: Mapping[str, Any]) -> bool:
    """Return whether a refused key is wrong, whatever keys the wrong options of groups would have filled.

    The keys of the input, and the options of a step that is there, do not depend on those.
    """
    top, *rest = key.split(".")
    if top not in unfilled:
        return True
    siblings = known.get(top) or {}
    if top == "input":
        return bool(rest) and rest[0] not in siblings
    return top == "steps" and bool(rest) and (rest[0] in siblings or rest[0] not in STEPS)


def no_values(key: str, value: str, groups: Mapping[str, list[str]]) -> Problem:
    """Return the problem of a sweep value that stands for no values."""
    if key in groups:
        return Problem(
            key, f"{value!r} matches none of its options", choose_option("", key, groups[key])
        )
    remedy = "write the values with commas, as in {key}=1,2"
    if value.startswith("range"):
        remedy = "a range stops before its end, as in range(1,4) for 1, 2 and 3"
    elif value.startswith("glob"):
        remedy = f"a glob is for a group; {remedy}"
    return Problem(key, f"{value!r} gives no values", remedy.format(key=key))


def callback_problem(override: str) -> Problem | None:
    """Return the problem of an override that would switch off or replace the checks before a run."""
    key, _, value = override.partition("=")
    key = key.lstrip("+~")
    if (
        key == "hydra.callbacks"
        or within(key, _OUR_CALLBACK)
        or (key == "hydra" and "callbacks" in value)
    ):
        remedy = "add your own callback as +hydra.callbacks.NAME={_target_:package.Class}"
        return Problem(key, "the checks before a run cannot be changed", remedy)
    return None


def within(where: str, key: str) -> bool:
    """Return whether `where` is `key`, or is below it."""
    return where == key or where.startswith((f"{key}.", f"{key}["))


def first_sentence(message: str) -> str:
    """Return the first sentence of an error message, on one line."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    first = lines[0].rstrip(".:") if lines else "cannot be used"
    return re.sub(r'^\w+ raised while resolving interpolation: "?(.*?)"?$', r"\1", first)


def hides_the_model(problem: Problem) -> bool:
    """Return whether a problem explains why no model is chosen, so that this need not be reported too."""
    is_word = problem.wrong in (NO_OVERRIDE, COMMAND_LATE)
    is_list = problem.where == "model" and problem.wrong.startswith("takes one option")
    is_model = problem.where in ("model", "model._target_") and problem.wrong != NO_MODEL
    return is_word or is_list or is_model or bool(re.search(r"\bmodel=|'model'", problem.remedy))


def _explain_several(override: Override) -> Problem:
    values = _value(override)
    if values.startswith("interval("):
        remedy = "the basic sweeper takes a,b or range(1,3)"
        return Problem(override.key, f"{values!r} needs a sweeper that searches", remedy)
    remedy = "add --multirun to run each of them"
    # The other keys at the top take one value each.
    if (override.key == "plugins" or "." in override.key) and "(" not in values:
        remedy += f", or write a list as {override.key}=[{values}]"
    return Problem(override.key, f"{values!r} gives several values", remedy)


def _explain_choice(override: Override, menu: Menu) -> Problem:
    key, value, options = override.key, override.value, menu.groups[override.key]
    if override.kind == "delete":
        return Problem(
            key, f"{_value(override)!r} is not the chosen option", f"~{key} drops any choice"
        )
    if "@" in override.text.partition("=")[0]:
        return Problem(
            key, "does not take a package", f"write {key}={_value(override)}, without the @"
        )
    if value is None:
        return Problem(key, "null is not an option", f"~{key} drops the choice")
    if isinstance(value, list):
        remedy = _instead_of_a_list(override, options)
        return Problem(key, f"takes one option, not the list {_value(override)}", remedy)
    if isinstance(value, dict):
        if key in menu.config and (problem := _explain_key(override, menu)):
            return problem
        remedy = f"choose {key}=NAME, and set an option of a step as steps.NAME.OPTION=value"
        return Problem(key, "takes the name of an option, not a mapping", remedy)
    word = value if isinstance(value, str) else _value(override)
    if word not in options:
        remedy = choose_option(word, key, options)
        if key == "device" and _is_device(word):
            remedy = f"give it as steps.device.device={word}; options: {', '.join(options)}"
        return Problem(key, f"{word!r} is not an option", remedy)
    return Problem(key, "is already chosen", f"write {key}={value} once, without the +")


def _instead_of_a_list(override: Override, options: list[str]) -> str:
    key, items = override.key, override.value
    if key == "input" and items and all(type(item) is int for item in items):
        return f"give the shape as input.shape={_value(override)}"
    if len(items) == 1 and items[0] in options:
        return f"write {key}={items[0]}"
    if len(items) > 1 and all(isinstance(item, str) for item in items):
        return f"with --multirun, {key}={','.join(items)} runs each of them"
    return options_text(key, options)


def _explain_key(override: Override, menu: Menu) -> Problem | None:
    node: Any = menu.config
    parts = override.key.split(".")
    for index, part in enumerate(parts):
        where = ".".join(parts[:index])
        if isinstance(node, list):
            return None
        if not isinstance(node, Mapping):
            kind, remedy = "a value", f"set it as {where}=value"
            if node is None:
                kind, remedy = "null", f"set all of it, as in {where}={{{part}:value}}"
            return Problem(override.key, f"{where} is {kind} and has no keys", remedy)
        if part not in node:
            return _missing(override, menu, parts[: index + 1], node)
        node = node[part]
    if isinstance(override.value, dict) and isinstance(node, Mapping):
        unknown = [str(key) for key in override.value if key not in node]
        return _missing(override, menu, [*parts, unknown[0]], node) if unknown else None
    if override.kind == "add":
        return Problem(override.key, "already exists", f"write {override.text.lstrip('+')}")
    if isinstance(node, Mapping) and isinstance(override.value, list):
        if parts[0] == "steps" and len(parts) == 2:
            return no_options(parts[1], override.value)
        return Problem(
            override.key,
            f"{_value(override)} is not a mapping",
            f"set a key in it as {override.key}.KEY=value",
        )
    if isinstance(node, list) and not isinstance(override.value, list):
        return Problem(
            override.key, f"{_value(override)} is not a list", f"write {override.key}=[a,b]"
        )
    return None


def _missing(
    override: Override, menu: Menu, parts: list[str], siblings: Mapping[str, Any]
) -> Problem:
    where, name = ".".join(parts), parts[-1]
    if parts[0] == "steps" and len(parts) == 2:
        return _missing_step(name, siblings)
    if where in STAGES and STAGES[where].groups:
        remedy = f"choose {where}=NAME first; {options_text(where, menu.groups[where])}"
        return Problem(override.key, "no option is chosen", remedy)
    if f"hydra/{where}" in HYDRAS:
        return Problem(where, "no such key", f"did you mean hydra/{where}={_value(override)}?")
    if len(parts) == 1:
        return Problem(where, "no such key", _top_level(override, menu, siblings))
    if parts[0] == "model":
        keys = [str(key) for key in siblings if not str(key).startswith("_")]
        remedy = f"add it as +{where}=value"
        if keys:
            remedy = f"{choose(name, keys, noun='keys')}; add any other keyword as +{where}=value"
        return Problem(where, "no such key in the configuration of this model", remedy)
    noun = "option" if parts[0] == "steps" else "key"
    return Problem(where, f"no such {noun}", choose(name, map(str, siblings), noun=f"{noun}s"))


def _top_level(override: Override, menu: Menu, siblings: Mapping[str, Any]) -> str:
    """Return the remedy for a wrong key: a key deeper down, or the group that has this option."""
    choosing = [group for group, options in menu.groups.items() if override.value in options]
    name = override.key.partition(".")[0]
    word = _OTHER_KEYS.get(name, name)
    if len(choosing) == 1 and override.kind != "delete" and "." not in override.key:
        word = choosing[0]
    elif paths := _deeper(override.key, siblings, word):
        meant = " or ".join(map(repr, paths))
        return f"did you mean {meant}? keys and groups: {', '.join(key_names())}"
    return choose(word, key_names(), noun="keys and groups")


def _deeper(key: str, config: Mapping[str, Any], word: str) -> list[str]:
    """Return the keys deeper down with this name, or a nearer one than any key at the top has."""
    by_name: dict[str, list[str]] = {}
    for top in config:
        if top not in ("hydra", "plugins"):
            for path in _nested(config[top], top):
                if (name := path.rpartition(".")[2]) not in key_names():
                    by_name.setdefault(name, []).append(path)
    near = nearest(key, by_name, cutoff=0.7)[:1]
    nearest_of_all = nearest(word, [*nearest(word, key_names())[:1], *near])[:1]
    names = [key] if key in by_name else near if near == nearest_of_all else []
    return [path for name in names for path in by_name[name]]


def _nested(node: Any, path: str) -> Iterator[str]:
    for key, value in node.items() if isinstance(node, Mapping) else ():
        if not str(key).startswith("_"):
            yield f"{path}.{key}"
            yield from _nested(value, f"{path}.{key}")


def _missing_step(name: str, present: Mapping[str, Any]) -> Problem:
    if name not in STEPS:
        return Problem(f"steps.{name}", "no such step", choose(name, STEPS, noun="steps"))
    content = f"holds {', '.join(present)}" if present else "is empty"
    adds = {
        "half": "precision=half",
        "conv2d_memory_format": "memfmt=channels_last",
        "conv3d_memory_format": "memfmt=channels_last_3d",
        "device": "device=auto",
    }
    group = f"{adds[name]} or " if name in adds else ""
    remedy = f"add it with {group}+steps.{name}={{}}"
    return Problem(f"steps.{name}", f"is not in this pipeline, which {content}", remedy)


def _is_device(word: str) -> bool:
    try:
        STEPS["device"].from_options({"device": word})
    except ConfigError:
        return False
    return True


def _value(override: Override) -> str:
    return override.text.partition("=")[2]
