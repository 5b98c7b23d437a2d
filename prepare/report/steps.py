"""The list of every registered step: its phase, its options with their defaults, and its card."""

import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator

from prepare.errors import PrepareError
from prepare.options import describe, plain
from prepare.registry import STEPS
from prepare.step import Step


def steps_text(width: int) -> str:
    """All steps, in a form for a terminal of `width` columns."""
    return "\n\n".join("\n".join(_step(name, width)) for name in STEPS)


def _step(name: str, width: int) -> Iterator[str]:
    try:
        cls = STEPS[name]
    except PrepareError as error:
        yield f"{name}: {error.problems[0].wrong}"
        return
    yield f"{name}  ({cls.phase})"
    for paragraph in _card(cls):
        wrapped = textwrap.wrap(paragraph, width - 2, subsequent_indent="    ")
        yield from (f"  {text}" for text in wrapped)
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        default = "required" if _required(field) else f"{_shown(_default(field))}"
        text = f"steps.{name}.{field.name}={default}"
        yield f"    {text:<46} {describe(hints[field.name])}".rstrip()


def _card(cls: type[Step]) -> list[str]:
    """The paragraphs of the docstring: its first sentence, when it helps, when it hurts, its source."""
    text = inspect.getdoc(cls) or ""
    if text.startswith(f"{cls.__name__}("):
        return []  # what dataclass writes where there is no docstring
    paragraphs: list[str] = []
    for row in text.splitlines():
        starts = row.partition(":")[0] in ("Helps", "Hurts", "Source")
        if starts or not row.strip() or not paragraphs:
            paragraphs.append(row.strip())
        else:
            paragraphs[-1] = f"{paragraphs[-1]} {row.strip()}".strip()
    return [paragraph for paragraph in paragraphs if paragraph]


def _required(field: dataclasses.Field) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _default(field: dataclasses.Field) -> object:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory()


def _shown(value: object) -> str:
    """A value as it is written on the command line."""
    value = plain(value)
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")
