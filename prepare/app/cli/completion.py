"""Complete words of the command line, with what Hydra's own completion does not know."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr, suppress
from dataclasses import fields
from io import StringIO
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from hydra._internal.utils import get_args_parser
from hydra.core.plugins import Plugins
from hydra.plugins.completion_plugin import CompletionPlugin

from prepare.app.cli.answer import FLAGS
from prepare.app.cli.commands import COMMANDS
from prepare.app.cli.compose_config import CONFIG_NAME, ERRORS, composing
from prepare.app.cli.flags import REFUSED, WITH_VALUE
from prepare.app.job.settings import Settings
from prepare.registry import STEPS
from prepare.stages.registry import STAGES, tasks

# Folders of our configurations that Hydra takes for groups of options.
_NO_GROUPS = ("launcher", "steps")


def complete(shell: str) -> None:
    """Print the words that may follow the line in the environment variable `COMP_LINE`."""
    line = os.environ.setdefault("COMP_LINE", "prepare ")
    words = line.split()
    at = [words.index(flag) for flag in ("--config-dir", "-cd") if flag in words[:-1]]
    with composing(words[at[0] + 1] if at else None) as composer:
        plugins = cast("list[Any]", Plugins.instance().discover(CompletionPlugin))
        # zsh hands its query to the plugin of bash.
        name = "bash" if shell == "zsh" else shell
        plugin = next(plugin for plugin in plugins if plugin.provides() == name)
        always = composer.always
        loader = composer.loader

        class Completion(plugin):  # type: ignore[misc, valid-type]  # known when it runs
            def _query(self, config_name: str | None, line: str) -> list[str]:
                words = _overrides(line)
                if words is None:
                    return []
                if words[-1].startswith("-"):
                    return _flags()
                hydras: list[str] = []
                # Words before this one may be wrong, or not complete.
                with suppress(*ERRORS, SystemExit), redirect_stderr(StringIO()):
                    hydras = super()._query(config_name, " ".join([*always, *words]))
                return sorted(_offered(words, hydras))

        Completion(loader).query(CONFIG_NAME)


def _overrides(line: str) -> list[str] | None:
    """Return the overrides of a line and, last, the word to complete; None after a command."""
    words = line.split()
    if not line or line[-1].isspace():
        words.append("")
    if words[0] in COMMANDS and len(words) > 1:
        return None  # the shell completes names of files
    kept = []
    before = ""
    for word in words[:-1]:
        if not word.startswith("-") and before not in WITH_VALUE:
            kept.append(word)
        before = word
    return None if before in WITH_VALUE else [*kept, words[-1]]


def _flags() -> list[str]:
    names = (name for action in get_args_parser()._actions for name in action.option_strings)
    return [*(name for name in names if name.startswith("--") and name not in REFUSED), *FLAGS]


def _offered(words: list[str], hydras: Iterable[str]) -> set[str]:
    """Return Hydra's words without those that are not options, and ours."""
    word = words[-1]
    key, sign, _ = word.partition("=")
    if sign and (values := _values(key)):
        return {f"{key}={value}" for value in values}
    offered = {text for text in hydras if not text.startswith(tuple(_not_keys()))}
    offered |= set() if sign else set(_step_words(word))
    if len(words) == 1:
        offered |= {command for command in COMMANDS if command.startswith(word)}
    return offered


def _not_keys() -> Iterator[str]:
    for group in _NO_GROUPS:
        yield from (f"{group}=", f"{group}/", f"+{group}=", f"+{group}/")


def _values(key: str) -> list[str]:
    """Return the words that a key may have; empty if it takes any."""
    hint: Any = get_type_hints(Settings).get(key)
    if key == "task":
        return list(tasks())
    name, _, option = key.partition(".")
    if name in STAGES:
        hint = get_type_hints(STAGES[name]).get(option or "level")
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return ["true", "false"] if hint is bool else []


def _step_words(word: str) -> Iterator[str]:
    """Yield the names of steps, and the options of the step that is written."""
    if word.startswith("+steps."):
        yield from (f"+steps.{name}=" for name in STEPS if f"+steps.{name}".startswith(word))
    elif word.startswith("steps."):
        _, name, *option = word.split(".")
        if not option:
            yield from (f"steps.{step}." for step in STEPS if step.startswith(name))
        elif name in STEPS:
            yield from (f"steps.{name}.{field.name}=" for field in fields(STEPS[name]))
