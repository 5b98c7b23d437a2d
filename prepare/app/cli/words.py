"""Read the words of the command line, answer a wrong one with the nearest, and scripts with one object."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from contextvars import ContextVar
from typing import Any, NoReturn

from prepare.app.job.settings import GROUPS, group_names, key_names, key_remedy, level_names
from prepare.core.utils.files import conf_dir
from prepare.core.utils.suggest import choose_option, nearest
from prepare.core.utils.text import line, printable
from prepare.errors import ConfigError, Problem, raise_problems
from prepare.registry import STEPS
from prepare.stages.stage import DONE, INTERRUPTED, NOT_VERIFIED, WRONG, tasks

# The bare words, and what each is for.
USAGES = {
    "steps": "steps [NAME]\n  Show the installed steps, or one, with their options.",
    "diff": "diff A B\n  Compare two runs' folders, audits or recipes.",
    "summary": "summary FOLDER\n  Print and write the table of the sweep in this folder.",
    "run": "run RECIPE [--report FOLDER] [--module PATTERN] PROGRAM [ARGS...]\n"
    "  Run a Python program unchanged, with its networks prepared; -m MODULE in place of PROGRAM.",
}
# Words of other command lines, and what they are called here.
_OTHERS = {"help": "--help", "eval": "mode=eval", "train": "mode=train", "dry-run": "task=plan"}
_OTHERS["q"] = "--quiet"
# What to do about a word that Hydra refused, by the beginning of what it says.
_REMEDIES = {
    "BasicSweeper does not": "write the values with commas, as in KEY=1,2",
    "Ambiguous value": "add --multirun to run each of them, or write a list as KEY=[a,b]",
    "Could not append": "leave out the +",
    "Multiple values": "leave out the +",
    "Error resolving interpolation": "write the name of an option",
    "Unsupported interpolation type": "write the value itself, or add +prepare=default to the "
    "program that registers the resolver",
    "Could not override 'experiment'": "write +experiment=NAME",
    "Could not override 'launcher'": "did you mean hydra/launcher=NAME?",
    "Could not override 'steps'": "add a step as +steps.NAME={}, drop one as steps.NAME=null",
}


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides, and the flags with their values: a flag may be in any position.

    Raises:
        ConfigError: Hydra does not know a flag, or it lacks its value.
    """
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> NoReturn:
        raise ConfigError("", message, "see --help")

    parser = get_args_parser()
    vars(parser)["error"] = refuse
    known, unknown = parser.parse_known_intermixed_args(argv)
    flags = {name.lstrip("-"): name for each in parser._actions for name in each.option_strings}
    wrong = (word for word in unknown if word.startswith("-"))
    raise_problems(ConfigError, [Problem(w, "no such flag", _flag_meant(w, flags)) for w in wrong])
    return known.overrides, [word for word in argv if word not in known.overrides]


def _flag_meant(word: str, flags: Mapping[str, str]) -> str:
    key, _, value = word.lstrip("-").partition("=")
    if key.partition(".")[0] in key_names():
        return f"write it without the dashes: {key}={value or 'VALUE'}"
    return _meant(key, flags)


def options_of(group: str) -> list[str]:
    """Return the names of our options of a group."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def _meant(word: str, flags: Mapping[str, str]) -> str:
    """Return the remedy for a word that is neither an override nor a flag: what it may stand for."""
    groups = (*group_names(), *level_names())
    spelled = {key: f"{key}=VALUE" for key in key_names()}
    spelled |= {option: f"{group}={option}" for group in groups for option in options_of(group)}
    spelled |= {name: f"+steps.{name}={{}}" for name in STEPS}
    spelled |= {name: f"task={name}" for name in tasks()}
    spelled |= {name: name for name in USAGES} | {**flags} | _OTHERS
    close = nearest(word.strip("+~-"), spelled, cutoff=0.65)
    return (f"did you mean {spelled[close[0]]}? " if close else "") + "see --help"


def first_sentence(message: str) -> str:
    """Return the first sentence of an error message, on one line, without what is around it."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    first = lines[0].rstrip(".:") if lines else "cannot be used"
    first = re.sub(r'^\w+ raised while resolving interpolation: "?(.*?)"?$', r"\1", first)
    return re.sub(r"^In '[\w/]+': |, possible interpolation keys: .*", "", first)


def remedy_of(sentence: str) -> str:
    """Return what to do about a sentence of Hydra; empty where that is not known."""
    return next((text for start, text in _REMEDIES.items() if sentence.startswith(start)), "")


def refused(error: Exception, overrides: Sequence[str]) -> Problem:
    """Return the problem of a word that Hydra refused: its own sentence, and the nearest word."""
    if (text := getattr(error, "override", None)) is not None:
        return _unreadable(text)
    # OmegaConf's own error says more; Hydra makes it the cause.
    cause: Any = error.__cause__ if hasattr(error.__cause__, "full_key") else error
    where, sentence = getattr(cause, "full_key", None) or "", first_sentence(str(cause))
    remedy = remedy_of(sentence)
    group, _, option = str(getattr(error, "missing_cfg_file", "")).rpartition("/")
    if group == "model" and "." in option:
        remedy = f"give a class or function of your own as model._target_={option}"
    elif group:
        options = getattr(error, "options", None) or options_of(group)
        remedy = choose_option(option, group, options)
    elif where and isinstance(cause, KeyError | AttributeError):
        remedy = _instead(where, vars(cause)["parent_node"], overrides)
        where = where if "." in where else ""  # the sentence names it
    elif error.__class__.__module__ == "builtins":  # Hydra does not name the word
        taken = re.compile(rf"\+?({'|'.join((*GROUPS, *level_names(), 'steps'))}|)=(null|\W|\d|$)")
        where = next(filter(taken.match, overrides), "")
        group, _, value = where.lstrip("+").partition("=")
        if group == "steps":
            sentence, remedy = "takes no value of its own", _REMEDIES["Could not override 'steps'"]
        elif group:
            sentence = f"takes the name of an option, not {value}"
            remedy = f"~{group} leaves it out; {choose_option('', group, options_of(group))}"
    return Problem(where, sentence, remedy)


def _instead(where: str, parent: Any, overrides: Sequence[str]) -> str:
    """Return the remedy for a key that does not exist; `parent` is the configuration above it."""
    above, _, key = where.rpartition(".")
    names = list(map(str, parent)) if isinstance(parent, Mapping) else []
    if above == "steps":
        meant = {name: f"+steps.{name}={{}}" for name in STEPS}
    elif above:
        if not names:
            return f"{above} has no keys; set it as {above}=VALUE"
        meant = {name: f"{above}.{name}" for name in names}
    elif key in group_names():
        return f"choose an option: {key}=NAME"
    else:
        for top in names:
            if isinstance(node := parent._get_node(top), Mapping) and key in node:
                return f"did you mean '{top}.{key}'?"
        value = next((w.partition("=")[2] for w in overrides if w.partition("=")[0] == key), "")
        return key_remedy(key, None if value in ("null", "false") else value)
    if close := nearest(key, meant):
        near = meant[close[0]]
        return f"did you mean {near if '=' in near else repr(near)}?"
    return f"add it as +{where}=VALUE"


def _unreadable(text: str) -> Problem:
    """Return the problem of a word that is neither an override nor a command, or of its value."""
    key, sign, _ = text.partition("=")
    if sign:
        remedy = f"""leave out spaces, and quote special characters, as in '{key}="..."'"""
        return Problem(text, "cannot be read as key=value", remedy)
    if text in USAGES:
        return Problem(text, "is a command, and must come first, without overrides", "see --help")
    return Problem(text or "''", "is neither key=value nor a command", _meant(text, {}))


# ------------------------------------------------------------ the answer for scripts: --json and --quiet
FLAGS = ("--json", "--quiet")
_REASONS = {WRONG: "configuration", INTERRUPTED: "interrupted", NOT_VERIFIED: "verification"}
# The members of the object that are known so far; None without our flags.
_ANSWER: ContextVar[dict[str, Any] | None] = ContextVar("_ANSWER", default=None)


def answered(argv: list[str], run: Callable[[list[str]], int]) -> int:
    """Run a command without our flags; with them it prints no summary, and with `--json` one object."""
    rest = [word for word in argv if word not in FLAGS]
    if len(rest) == len(argv):
        return run(argv)
    as_json, answer = "--json" in argv, dict[str, Any]()
    token = _ANSWER.set(answer)
    try:
        with redirect_stdout(io.StringIO()):  # also what a model prints
            code = run(rest)
    finally:
        _ANSWER.reset(token)
    if as_json:
        status = "ok" if code == DONE else "interrupted" if code == INTERRUPTED else "failed"
        reason = None if code == DONE else _REASONS.get(code, "error")
        head = {"format": "prepare.answer", "version": 1, "status": status, "reason": reason}
        line(json.dumps({**head, "error": None, "code": code, **answer}, allow_nan=False))
    return code


def tell(**values: Any) -> None:
    """Add members to the object of `--json`."""
    if (answer := _ANSWER.get()) is not None:
        answer |= values


def is_quiet() -> bool:
    """Return whether no progress is shown."""
    return _ANSWER.get() is not None


def print_problems(problems: Iterable[Any]) -> None:
    """Print one line for each problem on stderr, and add them to the object of `--json`."""
    texts = [*map(str, problems)]
    for text in texts:
        line(printable(text), errors=True)
    tell(error="\n".join(texts))
