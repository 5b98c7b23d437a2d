"""Explain words of the command line that Hydra cannot read as an override."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from prepare.cli.commands import COMMANDS
from prepare.core.utils.suggest import nearest
from prepare.errors import Problem
from prepare.job.settings import key_names
from prepare.registry import tasks

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
    if word in COMMANDS:
        return Problem(word, COMMAND_LATE, "see --help")
    if word.endswith((",", "]", "}")):
        remedy = "if it belongs to the value before it, leave the spaces out: key=[a,b]"
        return Problem(word, NO_OVERRIDE, remedy)
    spelled = {key: f"{key}=VALUE" for key in key_names()} | {
        group: f"{group}=NAME" for group in groups
    }
    spelled |= _OTHER_WORDS | {word: f"task={word}" for word in tasks()}
    spelled |= {name: name for name in COMMANDS}
    spelled |= {option: f"{group}={option}" for group in groups for option in groups[group]}
    close = nearest(word.strip("+~-"), spelled, cutoff=0.6)
    remedy = f"did you mean {spelled[close[0]]}? " if close else ""
    return Problem(word if word.strip() else repr(word), NO_OVERRIDE, f"{remedy}see --help")
