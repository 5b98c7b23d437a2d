"""The list of registered steps: phase, options with defaults, and card of each."""

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
    """Return the text of all steps for a terminal of `width` columns."""
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
    """Return the paragraphs of the docstring: summary, `Helps`, `Hurts`, `Source`."""
    text = inspect.getdoc(cls) or ""
    if text.startswith(f"{cls.__name__}("):
        return []  # the docstring that dataclass generates
    paragraphs: list[str] = []
    for text_line in text.splitlines():
        starts = text_line.partition(":")[0] in ("Helps", "Hurts", "Source")
        if starts or not text_line.strip() or not paragraphs:
            paragraphs.append(text_line.strip())
        else:
            paragraphs[-1] = f"{paragraphs[-1]} {text_line.strip()}".strip()
    return [paragraph for paragraph in paragraphs if paragraph]


def _default(field: dataclasses.Field) -> str:
    """Return the default as the command line writes it."""
    if field.default is not dataclasses.MISSING:
        value = plain(field.default)
    elif field.default_factory is not dataclasses.MISSING:
        value = plain(field.default_factory())
    else:
        return "... (required)"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")
