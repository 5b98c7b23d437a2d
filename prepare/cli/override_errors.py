"""What is wrong with an override of the command line that does not compose, in a user's words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from prepare.core.utils.options import no_options
from prepare.core.utils.suggest import choose, nearest
from prepare.errors import ConfigError, Problem
from prepare.job.settings import KEYS
from prepare.registry import STEPS

# The keys that the choice in a group fills: where it failed, a missing key there says nothing.
FILLS = {"model": ("model", "input"), "input": ("input",)}
_STEP_GROUPS = ("steps",)
# The bare words, which stand first and alone.
COMMANDS = ("steps", "diff", "summary")
NO_OVERRIDE = "is neither key=value nor a command"
COMMAND_LATE = "is a command, and stands first and alone"
# What people write for a key or a word of ours.
_OTHER_KEYS = {
    **dict.fromkeys(("dtype", "half", "fp16"), "precision"),
    **dict.fromkeys(("memory_format", "format", "layout", "channels_last"), "memfmt"),
    **dict.fromkeys(("net", "network", "arch"), "model"),
    **dict.fromkeys(("shape", "size", "example"), "input"),
}
_OTHER_WORDS = {
    "help": "--help",
    "version": "--version",
    "multirun": "--multirun",
    "list": "steps",
    **{word: f"task={word}" for word in ("prepare", "plan")},
    **{word: f"mode={word}" for word in ("eval", "train")},
}
_OURS = "hydra.callbacks.prepare"
# The groups of Hydra's own that decide how a sweep runs.
HYDRAS = ("hydra/launcher", "hydra/sweeper")
_KEY = re.compile(r"[+~]{0,2}[\w$-]+([./][\w$-]+)*(@[\w.:$-]*)?", re.ASCII)


@dataclass(frozen=True)
class Override:
    """One override: `kind` is set, add or delete; `several` that it gives values for a sweep."""

    text: str
    kind: str
    key: str
    value: Any = None
    several: bool = False


@dataclass(frozen=True)
class Menu:
    """What there is to choose: the options of each group, and the configuration without the mistakes."""

    groups: Mapping[str, list[str]]
    config: Mapping[str, Any]


def explain(override: Override, menu: Menu, said: str) -> Problem:
    """The mistake in an override that was refused with the words `said`."""
    if not override.key:
        return Problem(
            override.text, "no key stands before the =", "write key=value, without spaces"
        )
    if within(override.key, "hydra.sweeper.params"):
        remedy = "give a key of yours several values, as in seed=1,2"
        return Problem(override.key, "cannot be set on the command line", remedy)
    if override.several:
        return _explain_several(override)
    if override.key == "steps":
        remedy = "add one as +steps.NAME={}, set an option as steps.NAME.OPTION=value"
        remedy += ", drop one as steps.NAME=null"
        return Problem("steps", "cannot be set as a whole", f"{remedy}; steps: {', '.join(STEPS)}")
    if override.key in menu.groups:
        return _explain_choice(override, menu)
    if "/" in override.key and (options := re.findall(r"^\t([\w-]+)$", said, re.MULTILINE)):
        remedy = choose(str(override.value), options, noun="installed")
        return Problem(override.key, f"there is no option {_value(override)!r}", remedy)
    if override.key in HYDRAS and isinstance(override.value, list):
        return several_options(override.key)
    if problem := _explain_key(override, menu):
        return problem
    return Problem(override.key, first_sentence(said))


def several_options(group: str) -> Problem:
    """The mistake in a list for a group of Hydra's own, of which it would take the last."""
    return Problem(group, "takes one option, and not a list", f"write {group}=NAME")


def unreadable(text: str, groups: Mapping[str, list[str]]) -> Problem:
    """The mistake in a word of the command line that is no override at all."""
    key, sign, value = text.partition("=")
    if not sign:
        return _not_an_override(text, groups)
    if not _KEY.fullmatch(key):
        remedy = "a key is names with dots between them, as in steps.half.dtype, and no spaces"
        return Problem(text, f"{key!r} is no key", remedy)
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    remedy = f"""quote a value that holds special characters: {shlex.quote(f'{key}="{quoted}"')}"""
    if value[:1] in ("[", "{", "("):
        remedy = "write a list as [a,b] and a mapping as {a:b}, without spaces; quote an item that "
        remedy += f"""holds special characters: '{key}=["re:.*"]'"""
    return Problem(key.strip("+~"), f"the value {value!r} cannot be read", remedy)


def filled_by(group: str) -> tuple[str, ...]:
    """The top-level keys that the choice in a group fills."""
    return FILLS.get(group, _STEP_GROUPS)


def is_certain(key: str, unfilled: Collection[str], known: Mapping[str, Any]) -> bool:
    """Whether a refused key is a mistake, whatever the choices that failed would have filled.

    Every key of the input is there without them, and every option of a step that is there.
    """
    top, *rest = key.split(".")
    if top not in unfilled:
        return True
    here = known.get(top) or {}
    if top == "input":
        return bool(rest) and rest[0] not in here
    return top == "steps" and bool(rest) and (rest[0] in here or rest[0] not in STEPS)


def no_values(key: str, value: str, groups: Mapping[str, list[str]]) -> Problem:
    """The mistake in values for a sweep of which there are none."""
    if key in groups:
        return Problem(
            key, f"{value!r} matches none of its options", choose("", groups[key], noun="options")
        )
    remedy = "write the values with commas, as in {key}=1,2"
    if value.startswith("range"):
        remedy = "a range stops before its end, as in range(1,4) for 1, 2 and 3"
    elif value.startswith("glob"):
        remedy = f"a glob is for a group; {remedy}"
    return Problem(key, f"{value!r} gives no value", remedy.format(key=key))


def of_our_checks(override: str) -> Problem | None:
    """The mistake in an override that would switch off or replace the checks before a run."""
    key, _, value = override.partition("=")
    key = key.lstrip("+~")
    if key == "hydra.callbacks" or within(key, _OURS) or (key == "hydra" and "callbacks" in value):
        remedy = "add one of your own as +hydra.callbacks.NAME={_target_:package.Class}"
        return Problem(key, "the checks before a run stay as they are", remedy)
    return None


def within(where: str, key: str) -> bool:
    """Whether `where` is `key`, or something in it."""
    return where == key or where.startswith((f"{key}.", f"{key}["))


def first_sentence(said: str) -> str:
    """The first sentence of an error, on one line."""
    lines = [line.strip() for line in said.strip().splitlines() if line.strip()]
    first = lines[0].rstrip(".:") if lines else "cannot be used"
    return re.sub(r'^\w+ raised while resolving interpolation: "?(.*?)"?$', r"\1", first)


def hides_the_model(problem: Problem) -> bool:
    """Whether a mistake explains why no model is chosen, so that none need be asked for as well."""
    is_word = problem.wrong in (NO_OVERRIDE, COMMAND_LATE)
    is_list = problem.where == "model" and problem.wrong.startswith("takes one option")
    return is_word or is_list or bool(re.search(r"\bmodel=|'model'", problem.remedy))


def _not_an_override(word: str, groups: Mapping[str, list[str]]) -> Problem:
    if word in COMMANDS:
        return Problem(word, COMMAND_LATE, "see --help")
    if word.endswith((",", "]", "}")):
        remedy = "if it belongs to the value before it, leave the spaces out: key=[a,b]"
        return Problem(word, NO_OVERRIDE, remedy)
    meant = {key: f"{key}=VALUE" for key in KEYS} | {group: f"{group}=NAME" for group in groups}
    meant |= _OTHER_WORDS | {name: name for name in COMMANDS}
    meant |= {option: f"{group}={option}" for group in groups for option in groups[group]}
    close = nearest(word.strip("+~-"), meant, cutoff=0.6)
    remedy = f"did you mean {meant[close[0]]}? " if close else ""
    return Problem(word if word.strip() else repr(word), NO_OVERRIDE, f"{remedy}see --help")


def _explain_several(override: Override) -> Problem:
    values = _value(override)
    if values.startswith("interval("):
        remedy = "the basic sweeper takes a,b or range(1,3)"
        return Problem(override.key, f"{values!r} is for a sweeper that searches", remedy)
    remedy = "add --multirun for a run of each"
    # The other keys at the top take one value each.
    if (override.key == "plugins" or "." in override.key) and "(" not in values:
        remedy += f", or write a list as {override.key}=[{values}]"
    return Problem(override.key, f"{values!r} is several values", remedy)


def _explain_choice(override: Override, menu: Menu) -> Problem:
    key, value, options = override.key, override.value, menu.groups[override.key]
    if override.kind == "delete":
        return Problem(
            key, f"{_value(override)!r} is not what is chosen", f"~{key} drops any choice"
        )
    if "@" in override.text.partition("=")[0]:
        return Problem(key, "takes no package", f"write {key}={_value(override)}, without the @")
    if value is None:
        return Problem(key, "null is no option", f"~{key} drops the choice")
    if isinstance(value, list):
        remedy = _instead_of_a_list(override, options)
        return Problem(key, f"takes one option, and not the list {_value(override)}", remedy)
    if isinstance(value, dict):
        if key in menu.config and (problem := _explain_key(override, menu)):
            return problem
        remedy = f"choose {key}=NAME, and set an option of a step as steps.NAME.OPTION=value"
        return Problem(key, "takes the name of an option, and not a mapping", remedy)
    word = value if isinstance(value, str) else _value(override)
    if word not in options:
        remedy = choose(word, options, noun="options")
        if key == "device" and _is_device(word):
            remedy = f"give it as steps.device.device={word}; options: {', '.join(options)}"
        return Problem(key, f"there is no option {word!r}", remedy)
    return Problem(key, "is chosen already", f"write {key}={value} once, without the +")


def _instead_of_a_list(override: Override, options: list[str]) -> str:
    key, items = override.key, override.value
    if key == "input" and items and all(type(item) is int for item in items):
        return f"give the shape as input.shape={_value(override)}"
    if len(items) == 1 and items[0] in options:
        return f"write {key}={items[0]}"
    if len(items) > 1 and all(isinstance(item, str) for item in items):
        return f"with --multirun, {key}={','.join(items)} runs each of them"
    return f"options: {', '.join(options)}"


def _explain_key(override: Override, menu: Menu) -> Problem | None:
    at: Any = menu.config
    parts = override.key.split(".")
    for index, part in enumerate(parts):
        where = ".".join(parts[:index])
        if isinstance(at, list):
            return None
        if not isinstance(at, Mapping):
            what, remedy = "a value", f"set it as {where}=value"
            if at is None:
                what, remedy = "null", f"set all of it, as in {where}={{{part}:value}}"
            return Problem(override.key, f"{where} is {what} and has no keys", remedy)
        if part not in at:
            return _missing(override, menu, parts[: index + 1], at)
        at = at[part]
    if isinstance(override.value, dict) and isinstance(at, Mapping):
        unknown = [str(key) for key in override.value if key not in at]
        return _missing(override, menu, [*parts, unknown[0]], at) if unknown else None
    if override.kind == "add":
        return Problem(override.key, "is there already", f"write {override.text.lstrip('+')}")
    if isinstance(at, Mapping) and isinstance(override.value, list):
        if parts[0] == "steps" and len(parts) == 2:
            return no_options(parts[1], override.value)
        return Problem(
            override.key,
            f"{_value(override)} is no mapping",
            f"set a key in it as {override.key}.KEY=value",
        )
    if isinstance(at, list) and not isinstance(override.value, list):
        return Problem(
            override.key, f"{_value(override)} is no list", f"write {override.key}=[a,b]"
        )
    return None


def _missing(
    override: Override, menu: Menu, parts: list[str], siblings: Mapping[str, Any]
) -> Problem:
    where, name = ".".join(parts), parts[-1]
    if parts[0] == "steps" and len(parts) == 2:
        return _missing_step(name, siblings)
    if len(parts) == 1:
        return Problem(where, "no such key", _top_level(override, menu, siblings))
    if parts[0] == "model":
        keys = [str(key) for key in siblings if not str(key).startswith("_")]
        listed = f"{choose(name, keys, noun='keys')}; " if keys else ""
        remedy = f"{listed}a keyword that is not listed is added as +{where}=value"
        return Problem(where, "this model's configuration has no such key", remedy)
    noun = "option" if parts[0] == "steps" else "key"
    return Problem(where, f"no such {noun}", choose(name, map(str, siblings), noun=f"{noun}s"))


def _top_level(override: Override, menu: Menu, siblings: Mapping[str, Any]) -> str:
    """The remedy for a wrong key: where it stands deeper down, or which group has such an option."""
    steps = siblings.get("steps") or {}
    deeper = {at: siblings.get(at) or {} for at in ("model", "input")}
    deeper |= {f"steps.{name}": options or {} for name, options in steps.items()}
    found = [f"{at}.{override.key}" for at, keys in deeper.items() if override.key in keys]
    meant = [group for group, options in menu.groups.items() if override.value in options]
    name = override.key.partition(".")[0]
    word = _OTHER_KEYS.get(name, name)
    if len(meant) == 1 and override.kind != "delete":
        word = meant[0]
    elif found:
        return f"did you mean {found[0]!r}? keys and groups: {', '.join(KEYS)}"
    return choose(word, KEYS, noun="keys and groups")


def _missing_step(name: str, present: Mapping[str, Any]) -> Problem:
    if name not in STEPS:
        return Problem(f"steps.{name}", "no such step", choose(name, STEPS, noun="steps"))
    here = f"it holds {', '.join(present)}" if present else "it is empty"
    adds = {
        "half": "precision=half",
        "conv2d_memory_format": "memfmt=channels_last",
        "conv3d_memory_format": "memfmt=channels_last_3d",
        "device": "device=auto",
    }
    way = f"{adds[name]} or " if name in adds else ""
    remedy = f"add it with {way}+steps.{name}={{}}"
    return Problem(f"steps.{name}", f"this pipeline has no such step, {here}", remedy)


def _is_device(word: str) -> bool:
    try:
        STEPS["device"].from_options({"device": word})
    except ConfigError:
        return False
    return True


def _value(override: Override) -> str:
    return override.text.partition("=")[2]
