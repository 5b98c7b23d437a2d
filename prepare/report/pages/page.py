"""One HTML page for a run: a file that needs no network and no script, made from the run's folder."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from markupsafe import Markup

from prepare.core.utils import files
from prepare.job.results import read_results
from prepare.report.pages.run_sections import SECTIONS, Section, tiles
from prepare.report.render import render, template_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prepare.job.record import Result

NAME = "report.html"
# What the template of a long table begins with.
_LONG = 'class="frame grid"'
# What a file of another version or by another hand can do to code that expects ours.
_ODD = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError)


@dataclass(frozen=True)
class Part:
    """A section as it stands in the page."""

    name: str
    title: str
    body: Markup


def write_page(folder: str | Path, *, result: Result | None = None) -> Path:
    """Writes `report.html` into the folder of a run, from the files that are there; gives its path.

    The same files give the same bytes. `result` is that of a run which has not written its own yet.
    Raises FileError.
    """
    path = Path(folder) / NAME
    files.write_text(path, run_page(folder, result=result))
    return path


def run_page(folder: str | Path, *, result: Result | None = None) -> str:
    """The page of the run in `folder`.

    Raises:
        FileError: there is no such folder, or nothing of a run in it.
    """
    run = read_results(folder)
    run = replace(run, result=run.result or result)
    problems = list(run.problems)
    parts = list(parts_of(run, SECTIONS, problems))
    try:
        figures = tiles(run)
    except _ODD:  # the section that shows them says so
        figures = []
    return page(run.model, parts, tiles=figures, result=run.result, problems=problems, of=run.name)


def page(
    title: str,
    parts: Iterable[Part],
    *,
    tiles: Iterable[tuple[str, str, str]] = (),
    result: Any = None,
    problems: Iterable[str] = (),
    of: str = "",
    kind: str = "report of a run",
) -> str:
    """Any page of ours: a head with figures, a list of the sections, the sections.

    `problems` are sentences on what could not be read; `of` names the folder it is made from. A page
    with long tables bears one script, to search them, and lets no other run.
    """
    parts = list(parts)
    long = any(_LONG in part.body for part in parts)
    return render(
        "page.html",
        title=title,
        parts=parts,
        tiles=list(tiles),
        result=result,
        problems=list(problems),
        of=of,
        kind=kind,
        script=_script() if long else None,
    )


def parts_of(
    found: Any, sections: Iterable[Section], problems: list[str], *, folder: str = "sections"
) -> Iterable[Part]:
    """The sections that have something to say of what was found, by their templates in `folder`.

    One that stumbles over an odd file is left out, and says so in `problems`.
    """
    for section in sections:
        try:
            context = section.context(found)
            if context is None:
                continue
            text = render(f"{folder}/{section.name}.html", **context)
        except _ODD as error:
            said = f"{type(error).__name__}: {error}"
            problems.append(f"{section.title}: a file does not hold what it should ({said})")
            continue
        yield Part(section.name, section.title, Markup(text))  # noqa: S704  rendered with escaping


@cache
def _script() -> dict[str, Any]:
    """The script that searches long tables, and its digest, by which a browser knows it as ours."""
    text = template_text("page.js")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return {"text": Markup(text), "digest": digest}  # noqa: S704  a file of this package
