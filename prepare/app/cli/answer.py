"""The answer of a command for scripts, `--json`: one object on stdout, and `--quiet`."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from prepare.core.utils.text import line, output_to, printable
from prepare.stages.stage import DONE, INTERRUPTED, NOT_VERIFIED, WRONG

FLAGS = ("--json", "--quiet")
_REASONS = {WRONG: "configuration", INTERRUPTED: "interrupted", NOT_VERIFIED: "verification"}


@dataclass
class _Answer:
    """Values collected while a command runs; `quiet` shows no progress."""

    quiet: bool = False
    values: dict[str, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


_ANSWER: ContextVar[_Answer | None] = ContextVar("_ANSWER", default=None)


def answered(argv: list[str], run: Callable[[list[str]], int]) -> int:
    """Run a command without our flags; with `--json` print one object; with it and `--quiet` no summary."""
    rest = [word for word in argv if word not in FLAGS]
    if len(rest) == len(argv):
        return run(argv)
    answer = _Answer(quiet="--quiet" in argv)
    token = _ANSWER.set(answer)
    as_json = "--json" in argv
    hidden = output_to(io.StringIO()) if as_json or answer.quiet else nullcontext()
    try:
        # What a model prints is not part of the object, and goes to stderr.
        with hidden, redirect_stdout(sys.stderr) if as_json else nullcontext():
            code = run(rest)
    finally:
        _ANSWER.reset(token)
    if as_json:
        line(json.dumps(_object(answer, code), allow_nan=False))
    return code


def tell(**values: Any) -> None:
    """Add members to the object of `--json`."""
    if (answer := _ANSWER.get()) is not None:
        answer.values |= values


def is_quiet() -> bool:
    """Return whether `--quiet` was given."""
    answer = _ANSWER.get()
    return answer is not None and answer.quiet


def print_problems(problems: Iterable[Any]) -> None:
    """Print one line for each problem on stderr, and add it to the object of `--json`."""
    for problem in problems:
        line(printable(problem), errors=True)
        if (answer := _ANSWER.get()) is not None:
            answer.errors.append(str(problem))


def _object(answer: _Answer, code: int) -> dict[str, Any]:
    status = "ok" if code == DONE else "interrupted" if code == INTERRUPTED else "failed"
    reason = None if code == DONE else _REASONS.get(code, "error")
    head = {"format": "prepare.answer", "version": 1, "status": status, "reason": reason}
    return head | {"error": "\n".join(answer.errors) or None, "code": code} | answer.values
