"""Explain words and overrides that Hydra refused: what is wrong with each, and what to write instead."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from prepare.app.cli.flags import USAGES
from prepare.app.job.settings import ADDED_GROUP, NO_MODEL, key_names, unknown_key
from prepare.core.utils.options import no_options
from prepare.core.utils.suggest import choose, choose_option, nearest, options_text
from prepare.errors import ConfigError, Problem, StepError
from prepare.registry import STEPS
from prepare.stages.registry import STAGES, tasks

NO_OVERRIDE = "is neither key=value nor a command"
COMMAND_LATE = "is a command, and must come first, without overrides"
# Words of other command lines, and what they are called here.
_OTHER_WORDS = {
    "help": "--help",
    "version": "--version",
    "multirun": "--multirun",
    "list": "steps",
    **{word: f"mode={word}" for word in ("eval", "train")},
}
_KEY = re.compile(r"[+~]{0,2}[\w$-]+([./][\w$-]+)*(@[\w.:$-]*)?", re.ASCII)
# The keys that the option of a group fills: if the option is wrong, a missing key there is no evidence.
FILLS = {"model": ("model", "input"), "input": ("input",), ADDED_GROUP: ("model", "input", "steps")}
# Other words for our keys.
_OTHER_KEYS = {
    **dict.fromkeys(("dtype", "half", "fp16"), "precision"),
    **dict.fromkeys(("memory_format", "format", "layout", "channels_last"), "memfmt"),
    **dict.fromkeys(("net", "network", "arch"), "model"),
    **dict.fromkeys(("shape", "size", "example"), "input"),
}
_OUR_CALLBACK = "hydra.callbacks.prepare"
SWEEPS = "give values with commas and --multirun; for the fastest recipe choose task=tune"
# Packages that bring an option of Hydra's own groups; those of our launchers are in `launcher_checks`.
_PLUGINS = {"hydra/launcher=rq": "hydra-rq-launcher"}
_STEPS = "add one as +steps.NAME={}, set an option as steps.NAME.OPTION=value, drop one as steps.NAME=null"
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

    @property
    def written(self) -> str:
        """Return the value as it was written."""
        return self.text.partition("=")[2]


@dataclass(frozen=True)
class Menu:
    """The options of each group, and the configuration composed without the refused overrides."""

    groups: Mapping[str, list[str]]
    config: Mapping[str, Any]


def explain(override: Override, menu: Menu, message: str) -> Problem:
    """Return the problem of an override that Hydra refused with `message`."""
    key, chosen = override.key, f"{override.key}={override.value}"
    if not key:
        return Problem(override.text, "no key before the =", "write key=value, without spaces")
    if within(key, "hydra.sweeper.params"):
        remedy = "give one of your keys several values, as in seed=1,2"
        return Problem(key, "cannot be set on the command line", remedy)
    if override.several:
        return _explain_several(override)
    if key == "steps":
        return Problem("steps", "cannot be set as a whole", f"{_STEPS}; steps: {', '.join(STEPS)}")
    if key in menu.groups:
        keys = key in menu.config and isinstance(override.value, dict)
        wrong_key = _explain_key(override, menu) if keys else None
        return wrong_key or Problem(key, *_explain_choice(override, menu.groups[key]))
    if plugin := _PLUGINS.get(chosen):
        wrong = f"{override.value!r} is not installed"
        return Problem(key, wrong, f"install it: pip install {plugin}")
    if "/" in key and (options := re.findall(r"^\t([\w-]+)$", message, re.MULTILINE)):
        remedy = choose(str(override.value), options, noun="installed")
        return Problem(key, f"{override.written!r} is not an option", remedy)
    if key in HYDRAS and isinstance(override.value, list):
        return Problem(key, "takes one option, not a list", f"write {key}=NAME")
    return _explain_key(override, menu) or Problem(key, first_sentence(message))


def filled_by(group: str) -> tuple[str, ...]:
    """Return the top-level keys that the option of a group fills."""
    return FILLS.get(group, (group,) if group in STAGES else ("steps",))


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
        remedy = choose_option("", key, groups[key])
        return Problem(key, f"{value!r} matches none of its options", remedy)
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
    every = key == "hydra.callbacks" or (key == "hydra" and "callbacks" in value)
    if every or within(key, _OUR_CALLBACK):
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
    values = override.written
    if values.startswith("interval("):
        remedy = "the basic sweeper takes a,b or range(1,3)"
        return Problem(override.key, f"{values!r} needs a sweeper that searches", remedy)
    remedy = "add --multirun to run each of them"
    # The other keys at the top take one value each.
    if (override.key == "plugins" or "." in override.key) and "(" not in values:
        remedy += f", or write a list as {override.key}=[{values}]"
    return Problem(override.key, f"{values!r} gives several values", remedy)


def _explain_choice(override: Override, options: list[str]) -> tuple[str, str]:
    """Return what is wrong with the choice of a group, and the remedy."""
    key, value, written = override.key, override.value, override.written
    if override.kind == "delete":
        return f"{written!r} is not the chosen option", f"~{key} drops any choice"
    if "@" in override.text.partition("=")[0]:
        return "does not take a package", f"write {key}={written}, without the @"
    if value is None:
        return "null is not an option", f"~{key} drops the choice"
    if isinstance(value, list):
        return f"takes one option, not the list {written}", _instead_of_a_list(override, options)
    if isinstance(value, dict):
        remedy = f"choose {key}=NAME, and set an option of a step as steps.NAME.OPTION=value"
        return "takes the name of an option, not a mapping", remedy
    word = value if isinstance(value, str) else written
    if key == ADDED_GROUP and override.kind == "set" and word in options:
        return "is added to the other groups", f"write +{key}={word}"
    if word in options:
        return "is already chosen", f"write {key}={value} once, without the +"
    if key == "device" and _is_device(word):
        remedy = f"give it as steps.device.device={word}; options: {', '.join(options)}"
    elif key == "model" and "." in word:
        remedy = f"give a class or function of your own as model._target_={word}"
    else:
        remedy = choose_option(word, key, options)
    return f"{word!r} is not an option", remedy


def _instead_of_a_list(override: Override, options: list[str]) -> str:
    key, items = override.key, override.value
    if key == "input" and items and all(type(item) is int for item in items):
        return f"give the shape as input.shape={override.written}"
    if len(items) == 1 and items[0] in options:
        return f"write {key}={items[0]}"
    if len(items) > 1 and all(isinstance(item, str) for item in items):
        return f"with --multirun, {key}={','.join(items)} runs each of them"
    return options_text(key, options)


def _explain_key(override: Override, menu: Menu) -> Problem | None:
    node: Any = menu.config
    key, value, parts = override.key, override.value, override.key.split(".")
    for index, part in enumerate(parts):
        where = ".".join(parts[:index])
        if isinstance(node, list):
            return None
        if node is None:
            remedy = f"set all of it, as in {where}={{{part}:value}}"
            return Problem(key, f"{where} is null and has no keys", remedy)
        if not isinstance(node, Mapping):
            wrong = f"{where} is a value and has no keys"
            return Problem(key, wrong, f"set it as {where}=value")
        if part not in node:
            return _missing(override, menu, parts[: index + 1], node)
        node = node[part]
    is_mapping = isinstance(node, Mapping)
    if isinstance(value, dict) and is_mapping:
        unknown = [str(name) for name in value if name not in node]
        return _missing(override, menu, [*parts, unknown[0]], node) if unknown else None
    if override.kind == "add":
        return Problem(key, "already exists", f"write {override.text.lstrip('+')}")
    if is_mapping and isinstance(value, list):
        if parts[0] == "steps" and len(parts) == 2:
            return no_options(parts[1], value)
        remedy = f"set a key in it as {key}.KEY=value"
        return Problem(key, f"{override.written} is not a mapping", remedy)
    if isinstance(node, list) and not isinstance(value, list):
        return Problem(key, f"{override.written} is not a list", f"write {key}=[a,b]")
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
        return Problem(where, "no such key", f"did you mean hydra/{where}={override.written}?")
    if len(parts) == 1 and name in STEPS:
        below = "." in override.key
        problem = unknown_key(name, {override.key: override.value} if below else override.value)
        group = f"write {word}, or " if (word := _added_by(name)) else "write "
        return replace(problem, remedy=problem.remedy.replace("write ", group))
    if len(parts) == 1:
        remedy = _top_level(override, menu, siblings)
        return Problem(where, "no such key", remedy) if remedy else unknown_key(name)
    if parts[0] == "model":
        keys = [str(key) for key in siblings if not str(key).startswith("_")]
        remedy = f"add it as +{where}=value"
        if keys != ["method"] or nearest(name, keys):
            remedy = f"{choose(name, keys, noun='keys')}; add any other keyword as +{where}=value"
        return Problem(where, "no such key in the configuration of this model", remedy)
    noun = "option" if parts[0] == "steps" else "key"
    return Problem(where, f"no such {noun}", choose(name, map(str, siblings), noun=f"{noun}s"))


def _top_level(override: Override, menu: Menu, siblings: Mapping[str, Any]) -> str:
    """Return the remedy for a wrong key: a key deeper down, or the group that has this option; or nothing."""
    choosing = [group for group, options in menu.groups.items() if override.value in options]
    name = override.key.partition(".")[0]
    word = _OTHER_KEYS.get(name, name)
    if len(choosing) == 1 and override.kind != "delete" and "." not in override.key:
        word = choosing[0]
    elif paths := _deeper(override.key, siblings, word):
        meant = " or ".join(map(repr, paths))
        return f"did you mean {meant}? keys and groups: {', '.join(key_names())}"
    return choose(word, key_names(), noun="keys and groups") if word != override.key else ""


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
        return STEPS.problem(name)
    content = f"holds {', '.join(present)}" if present else "is empty"
    group = f"{word} or " if (word := _added_by(name)) else ""
    remedy = f"add it with {group}+steps.{name}={{}}"
    return Problem(f"steps.{name}", f"is not in this pipeline, which {content}", remedy)


def _added_by(name: str) -> str:
    """Return the option of a group that adds a step; empty for none, and for a plugin that fails."""
    with suppress(StepError):
        return STEPS[name].added_by
    return ""


def _is_device(word: str) -> bool:
    try:
        STEPS["device"].from_options({"device": word})
    except ConfigError:
        return False
    return True


def unreadable(text: str, groups: Mapping[str, list[str]]) -> Problem:
    """Return the problem of a word that is neither an override nor a command."""
    key, sign, value = text.partition("=")
    if not sign:
        return _not_an_override(text, groups)
    if not _KEY.fullmatch(key):
        remedy = "write names with dots between them and no spaces, as in steps.half.dtype"
        return Problem(text, f"{key!r} is not a key", remedy)
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    remedy = f"""quote a value that holds special characters: {shlex.quote(f'{key}="{quoted}"')}"""
    if value[:1] in ("[", "{", "("):
        remedy = "write a list as [a,b] and a mapping as {a:b}, without spaces; quote an item that "
        remedy += f"""holds special characters: '{key}=["re:.*"]'"""
    return Problem(key.strip("+~"), f"the value {value!r} cannot be read", remedy)


def _not_an_override(word: str, groups: Mapping[str, list[str]]) -> Problem:
    if word in USAGES:
        return Problem(word, COMMAND_LATE, "see --help")
    if word.endswith((",", "]", "}")):
        remedy = "if it belongs to the value before it, leave the spaces out: key=[a,b]"
        return Problem(word, NO_OVERRIDE, remedy)
    if "/" in word:
        remedy = "if it is a part of a path with a space, quote that twice: 'hydra.run.dir=\"a folder/run\"'"
        return Problem(word, NO_OVERRIDE, remedy)
    spelled = {key: f"{key}=VALUE" for key in key_names()} | {
        group: f"{group}=NAME" for group in groups
    }
    spelled |= _OTHER_WORDS | {word: f"task={word}" for word in tasks()}
    spelled |= {name: name for name in USAGES} | {name: f"+steps.{name}={{}}" for name in STEPS}
    spelled |= {option: f"{group}={option}" for group in groups for option in groups[group]}
    close = nearest(word.strip("+~-"), spelled, cutoff=0.6)
    remedy = f"did you mean {spelled[close[0]]}? " if close else ""
    return Problem(word if word.strip() else repr(word), NO_OVERRIDE, f"{remedy}see --help")
