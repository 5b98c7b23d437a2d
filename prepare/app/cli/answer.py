"""The answer of a command for scripts, `--json`: one object on stdout, and `--quiet`."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext, redirect_stdout
from contextvars import ContextVar
from typing import Any

from prepare.core.utils.text import line, output_to, printable
from prepare.stages.stage import DONE, INTERRUPTED, NOT_VERIFIED, WRONG

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
        # What a model prints is not part of the object, and goes to stderr.
        with output_to(io.StringIO()), redirect_stdout(sys.stderr) if as_json else nullcontext():
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
