"""The list of every registered step: its phase, its options with their defaults, and its card."""

import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator

from prepare.core.utils.options import describe, plain
from prepare.errors import PrepareError
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
    fields = dataclasses.fields(cls)
    options = [f"steps.{name}.{field.name}={_default(field)}" for field in fields]
    longest = max(map(len, options), default=0)
    for field, option in zip(fields, options, strict=True):
        yield f"    {option.ljust(longest)}  {describe(hints[field.name])}"


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


def _default(field: dataclasses.Field) -> str:
    """The default as it is written on the command line."""
    if field.default is not dataclasses.MISSING:
        value = plain(field.default)
    elif field.default_factory is not dataclasses.MISSING:
        value = plain(field.default_factory())
    else:
        return "... (required)"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")
