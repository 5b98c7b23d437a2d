"""Know the bare words of the command line, and read and check its flags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from prepare.app.cli.answer import FLAGS
from prepare.app.job.settings import group_names, key_names, step_remedy
from prepare.core.utils.suggest import choose
from prepare.errors import ConfigError, Problem
from prepare.registry import STEPS

if TYPE_CHECKING:
    from argparse import Namespace

# The bare words, and what each is for.
USAGES = {
    "steps": "steps [NAME]\n  Show the installed steps, or one, with their options.",
    "diff": "diff A B\n  Compare two runs' folders, audits or recipes.",
    "summary": "summary FOLDER\n  Print and write the table of the sweep in this folder.",
}
WITH_VALUE = (
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn"),
    *("--config-dir", "-cd", "--experimental-rerun"),
)
REFUSED = ("--config-path", "--experimental-rerun")
# What --info may be followed by; without one of them it prints all.
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
# The arguments of Hydra's own shell completion.
_COMPLETION, _SHELLS = ("install", "uninstall", "query"), ("bash", "fish", "zsh")


def flags_first(argv: list[str]) -> list[str]:
    """Return the arguments with the flags first: Hydra 1.3 does not accept a flag after an override."""
    argv = list(_with_info(argv))
    values = {index + 1 for index, word in enumerate(argv) if word in WITH_VALUE}
    flags = [word for index, word in enumerate(argv) if word.startswith("-") or index in values]
    rest = [w for index, w in enumerate(argv) if not (w.startswith("-") or index in values)]
    return [*flags, *rest]


def _with_info(argv: list[str]) -> Iterator[str]:
    """Join --info and its word: it may have none, and would take an override that follows for it."""
    words = iter(argv)
    for word in words:
        if word not in ("--info", "-i"):
            yield word
            continue
        following = next(words, None)
        yield f"--info={following if following in _INFO else 'all'}"
        if following is not None and following not in _INFO:
            yield following


def read_flags(argv: list[str]) -> Namespace:
    """Return the arguments as Hydra reads them.

    Raises:
        ConfigError: a flag does not exist, or has a wrong value.
    """
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    known = [name for action in parser._actions for name in action.option_strings]
    unknown = [w for w in argv if w.startswith("-") and w.partition("=")[0] not in known]
    if unknown:
        names = [name for name in known if name.startswith("--") and name not in REFUSED]
        names += FLAGS
        raise ConfigError.of(_unknown_flag(word, names) for word in unknown)

    def refuse(message: str) -> NoReturn:
        raise ConfigError("", message, "see --help")

    vars(parser)["error"] = refuse
    flags = parser.parse_args(argv)
    _check_flags(flags)
    return flags


def _unknown_flag(word: str, names: list[str]) -> Problem:
    key, sign, value = word.lstrip("-").partition("=")
    if key in ("dry-run", "dryrun"):
        return Problem(word, "no such flag", "write task=plan, which changes nothing")
    if key in STEPS and key not in key_names():
        return Problem(word, "no such flag", step_remedy(key))
    if key.split(".")[0] not in key_names():
        return Problem(word, "no such flag", choose(word, names, noun="flags"))
    value = value if sign else "NAME" if key in group_names() else "VALUE"
    return Problem(word, "no such flag", f"write it without the dashes: {key}={value}")


def _check_flags(flags: Namespace) -> None:
    """Raise ConfigError for values that Hydra would answer with a traceback."""
    if flags.experimental_rerun is not None:
        wrong = "runs are not repeated from a pickle, which may execute any code"
        remedy = "give the overrides in its job.json again"
        raise ConfigError("--experimental-rerun", wrong, remedy)
    if flags.config_path is not None:
        remedy = f"add the folder with --config-dir {flags.config_path}, and choose from it"
        raise ConfigError("--config-path", "would replace the configuration of prepare", remedy)
    modes = {"--run": flags.run, "--multirun": flags.multirun, "--cfg": flags.cfg}
    modes |= {"--shell-completion": flags.shell_completion, "--info": flags.info}
    several = [flag for flag, value in modes.items() if value]
    if len(several) > 1:
        raise ConfigError(
            " ".join(several), "only one of these flags can be given", "drop the others"
        )
    if flags.resolve and not flags.cfg:
        raise ConfigError("--resolve", "needs --cfg", "write --cfg job --resolve")
    if flags.shell_completion:
        words = [word.partition("=") for word in flags.overrides]
        if len(words) != 1 or words[0][0] not in _COMPLETION or words[0][2] not in _SHELLS:
            remedy = f"write --shell-completion install=bash; shells: {', '.join(_SHELLS)}"
            wrong = f"takes one of {', '.join(_COMPLETION)} and the name of a shell"
            raise ConfigError("--shell-completion", wrong, remedy)
