"""What is wrong with an override of the command line that does not compose, in a user's words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prepare.errors import Problem, choose, nearest
from prepare.options import ALIASES
from prepare.registry import STEPS

# The keys that the choice in a group fills: where it failed, a missing key there says nothing.
FILLS = {"model": ("model", "input"), "input": ("input",)}
_STEP_GROUPS = ("steps",)
# The bare words, which stand first and alone.
COMMANDS = ("steps", "diff", "summary")
NO_OVERRIDE = "is neither key=value nor a command"

# Other words for the options of the groups; nearer by meaning than any by letters.
_SYNONYMS = {**ALIASES, "gpu": "cuda", "float16": "half", "fp16": "half", "both": "by_rank"}


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
    if override.several:
        remedy = "add --multirun for a run of each, or write a list as [a,b]"
        return Problem(override.key, f"{_value(override)!r} is several values", remedy)
    if override.key == "steps" and override.kind != "delete":
        remedy = "add one as +steps.NAME={}, set an option as steps.NAME.OPTION=value"
        return Problem("steps", "cannot be set as a whole", f"{remedy}; steps: {', '.join(STEPS)}")
    if override.key in menu.groups:
        return _explain_choice(override, menu)
    if problem := _explain_key(override, menu):
        return problem
    return Problem(override.key, first_sentence(said))


def unreadable(text: str, groups: Mapping[str, list[str]]) -> Problem:
    """The mistake in a word of the command line that is no override at all."""
    key, sign, value = text.partition("=")
    if not sign:
        return _not_an_override(text, groups)
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    remedy = f"""quote a value that holds special characters: '{key}="{quoted}"'"""
    return Problem(key.strip("+~"), f"the value {value!r} cannot be read", remedy)


def filled_by(group: str) -> tuple[str, ...]:
    """The top-level keys that the choice in a group fills."""
    return FILLS.get(group, _STEP_GROUPS)


def first_sentence(said: str) -> str:
    """The first sentence of an error, on one line."""
    lines = [line.strip() for line in said.strip().splitlines() if line.strip()]
    first = lines[0].rstrip(".:") if lines else "cannot be used"
    return re.sub(r'^\w+ raised while resolving interpolation: "?(.*?)"?$', r"\1", first)


def hides_the_model(problem: Problem) -> bool:
    """Whether a mistake explains why no model is chosen, so that none need be asked for as well."""
    return problem.wrong == NO_OVERRIDE or bool(re.search(r"\bmodel=|'model'", problem.remedy))


def _not_an_override(word: str, groups: Mapping[str, list[str]]) -> Problem:
    meant = {option: f"{group}={option}" for group in groups for option in groups[group]}
    meant |= {group: f"{group}=NAME" for group in groups} | {name: name for name in COMMANDS}
    close = nearest(word, meant)
    remedy = f"did you mean {meant[close[0]]}? " if close else ""
    return Problem(word, NO_OVERRIDE, f"{remedy}see --help")


def _explain_choice(override: Override, menu: Menu) -> Problem:
    key, value, options = override.key, override.value, menu.groups[override.key]
    if override.kind == "delete":
        return Problem(key, "cannot be dropped: nothing is chosen in this group")
    if value is None:
        return Problem(key, "null is no option", f"~{key} drops the choice")
    if isinstance(value, list):
        remedy = f"with --multirun, {key}={','.join(map(str, value))} runs each of them"
        return Problem(key, f"takes one option, and not the list {_value(override)}", remedy)
    if isinstance(value, dict):
        remedy = f"choose {key}=NAME, and set a key as {filled_by(key)[0]}.KEY=value"
        return Problem(key, "takes the name of an option, and not a mapping", remedy)
    if str(value) not in options:
        word = _SYNONYMS.get(str(value).lower(), str(value))
        remedy = choose(word if word in options else str(value), options, noun="options")
        return Problem(key, f"there is no option {str(value)!r}", remedy)
    return Problem(key, "is chosen already", f"write {key}={value} once, without the +")


def _explain_key(override: Override, menu: Menu) -> Problem | None:
    at: Any = menu.config
    parts = override.key.split(".")
    for index, part in enumerate(parts):
        where = ".".join(parts[:index])
        if isinstance(at, list):
            return None
        if not isinstance(at, Mapping):
            remedy = (
                f"set it as {where}=value" if at is not None else f"it is null; set {where} first"
            )
            return Problem(override.key, f"{where} is a value and has no keys", remedy)
        if part not in at:
            return _missing(override, menu, parts[: index + 1], at)
        at = at[part]
    if override.kind == "add":
        return Problem(override.key, "is there already", f"write {override.text.lstrip('+')}")
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
        adds = f"a keyword it does not list is added as +{override.text.lstrip('+~')}"
        close = nearest(name, siblings)
        remedy = f"did you mean {close[0]!r}? {adds}" if close else adds
        return Problem(where, "this model's configuration has no such key", remedy)
    return Problem(where, "no such key", choose(name, map(str, siblings), noun="keys"))


def _top_level(override: Override, menu: Menu, siblings: Mapping[str, Any]) -> str:
    """The remedy for a wrong key; a value that is an option of one group says which was meant."""
    allowed = [*menu.groups, *(str(key) for key in siblings if key not in menu.groups)]
    meant = [group for group, options in menu.groups.items() if override.value in options]
    word = meant[0] if len(meant) == 1 and override.kind != "delete" else override.key
    return choose(word, allowed, noun="keys and groups")


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


def _value(override: Override) -> str:
    return override.text.partition("=")[2]
