"""Write steps, options and arguments as the user writes them: on a command line, or in Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

# Errors, advice and sentences are made in many places, and their user is known in two: where the command
# line begins, and where one of its jobs begins in a process of its own.
_ON_COMMAND_LINE: ContextVar[bool] = ContextVar("_ON_COMMAND_LINE", default=False)


@contextmanager
def command_line_words() -> Iterator[None]:
    """Within this context, write everything as on the command line; outside of it, as in Python."""
    token = _ON_COMMAND_LINE.set(True)
    try:
        yield
    finally:
        _ON_COMMAND_LINE.reset(token)


def words(*, cli: str, python: str) -> str:
    """Return the text for the present user."""
    return cli if _ON_COMMAND_LINE.get() else python


def step(name: str, /, **options: Any) -> str:
    """Return a step to add: `+steps.half={dtype:bfloat16}`, or `"half": {"dtype": "bfloat16"}`."""
    python = f"{as_python(name)}: {as_python(options)}"
    return words(cli=f"+steps.{name}={_hydra(options)}", python=python)


def option(name: str, key: str, value: Any) -> str:
    """Return an option to set: `steps.half.dtype=bfloat16`, or `"half": {"dtype": "bfloat16"}`."""
    return words(cli=f"steps.{name}.{key}={_hydra(value)}", python=step(name, **{key: value}))


def dropped(name: str) -> str:
    """Return a step to drop: `steps.compile=null`, or `"compile": None`."""
    return words(cli=f"steps.{name}=null", python=f"{as_python(name)}: None")


def argument(key: str, value: Any) -> str:
    """Return a setting that is an argument in Python: `bench=full`, or `bench="full"`."""
    return f"{key}={words(cli=_hydra(value), python=as_python(value))}"


def in_training() -> str:
    """Return ` (mode=train)`, which says on the command line why a model is in training mode."""
    return words(cli=" (mode=train)", python="")


def inference_mode() -> str:
    """Return the words for the other mode: `choose mode=eval`, or `call model.eval()`."""
    return words(cli="choose mode=eval", python="call model.eval() first")


def _hydra(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_hydra(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_hydra, value))}]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return "..." if value is ... else str(value)


def as_python(value: Any) -> str:
    """Return a plain value as Python code, with double quotes."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{as_python(key)}: {as_python(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(as_python, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return "..." if value is ... else repr(value)
