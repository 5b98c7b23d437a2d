"""The flags of the command line, as Hydra reads them; and what is wrong with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from prepare.core.utils.suggest import choose
from prepare.errors import ConfigError, Problem
from prepare.job.settings import GROUPS, KEYS

if TYPE_CHECKING:
    from argparse import Namespace

_WITH_VALUE = (
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn"),
    *("--config-dir", "-cd", "--experimental-rerun"),
)
_REFUSED = ("--experimental-rerun",)
# What Hydra's own shell completion can be asked for.
_COMPLETION, _SHELLS = ("install", "uninstall", "query"), ("bash", "fish", "zsh")


def flags_first(argv: list[str]) -> list[str]:
    """The arguments with the flags first: Hydra 1.3 takes none after an override."""
    values = {index + 1 for index, word in enumerate(argv) if word in _WITH_VALUE}
    flags = [word for index, word in enumerate(argv) if word.startswith("-") or index in values]
    rest = [w for index, w in enumerate(argv) if not (w.startswith("-") or index in values)]
    return [*flags, *rest]


def read_flags(argv: list[str]) -> Namespace:
    """The arguments as Hydra reads them.

    Raises:
        ConfigError: a flag that does not exist, or is given wrongly.
    """
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    known = [name for action in parser._actions for name in action.option_strings]
    unknown = [w for w in argv if w.startswith("-") and w.partition("=")[0] not in known]
    if unknown:
        flags = [name for name in known if name.startswith("--") and name not in _REFUSED]
        raise ConfigError.of(_no_flag(word, flags) for word in unknown)

    def refuse(message: str) -> NoReturn:
        raise ConfigError("", message, "see --help")

    parser.error = refuse
    asked = parser.parse_args(argv)
    _check_flags(asked)
    return asked


def _no_flag(word: str, flags: list[str]) -> Problem:
    key, sign, value = word.lstrip("-").partition("=")
    if key.split(".")[0] not in KEYS:
        return Problem(word, "no such flag", choose(word, flags, noun="flags"))
    value = value if sign else "NAME" if key in GROUPS else "VALUE"
    return Problem(word, "no such flag", f"write it without the dashes: {key}={value}")


def _check_flags(asked: Namespace) -> None:
    """What Hydra would answer with a traceback."""
    if asked.experimental_rerun is not None:
        wrong = "a run is not repeated from a pickle, which may run any code"
        remedy = "give the overrides in its job.json once more"
        raise ConfigError("--experimental-rerun", wrong, remedy)
    given = {"--run": asked.run, "--multirun": asked.multirun, "--cfg": asked.cfg}
    given |= {"--shell-completion": asked.shell_completion, "--info": asked.info}
    several = [flag for flag, value in given.items() if value]
    if len(several) > 1:
        raise ConfigError(" ".join(several), "only one of these can be done", "give one of them")
    if asked.resolve and not asked.cfg:
        raise ConfigError("--resolve", "is for --cfg", "write --cfg job --resolve")
    if asked.shell_completion:
        words = [word.partition("=") for word in asked.overrides]
        if len(words) != 1 or words[0][0] not in _COMPLETION or words[0][2] not in _SHELLS:
            remedy = f"write --shell-completion install=bash; shells: {', '.join(_SHELLS)}"
            wrong = f"takes one of {', '.join(_COMPLETION)}, with the name of a shell"
            raise ConfigError("--shell-completion", wrong, remedy)
