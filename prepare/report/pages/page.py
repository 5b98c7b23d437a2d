"""Write HTML pages as single files without network access; make the page of a job from its record."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2 import TemplateError
from markupsafe import Markup

from prepare.core.utils import files
from prepare.core.utils.wording import command_line_words
from prepare.job.results import read_results
from prepare.report.answers import answers, verdict
from prepare.report.pages.run_lead import day, run_lead
from prepare.report.pages.run_sections import SECTIONS, Section, command
from prepare.report.render import render, template_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prepare.job.record import Result
    from prepare.job.results import SavedResults
    from prepare.report.answer import Answer

NAME = "report.html"
T = TypeVar("T")
# The attribute that starts the template of a long table.
_LONG = 'class="frame grid"'
# Errors that a file of another version or of another program can raise in a section.
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError)


@dataclass(frozen=True)
class PageSection:
    """A rendered section: its anchor, title and HTML."""

    name: str
    title: str
    body: Markup


def write_page(folder: str | Path, *, result: Result | None = None) -> Path:
    """Write `report.html` into the folder of a job, from the files in it; return its path.

    The same files give the same bytes. `result` is used if the job has not written its result yet.
    Raises FileError.
    """
    path = Path(folder) / NAME
    files.write_text(path, run_page(folder, result=result))
    return path


def run_page(folder: str | Path, *, result: Result | None = None) -> str:
    """Return the page of the job in `folder`.

    Raises:
        FileError: The folder does not exist, or holds no file of a job.
    """
    with command_line_words():
        return _run_page(folder, result)


def _run_page(folder: str | Path, result: Result | None) -> str:
    run = read_results(folder)
    run = replace(run, result=run.result or result)
    problems = list(run.problems)
    sections = list(rendered(run, SECTIONS, problems))
    return page(
        run.model,
        sections,
        cards=_known(answers, run) or (),
        verdict=_known(verdict, run) or "",
        lead=_known(run_lead, run) or "",
        problems=problems,
        about=("report of a job", _known(day, run) or ""),
        command=_known(command, run) or "",
    )


def page(
    title: str,
    sections: Iterable[PageSection],
    *,
    cards: Iterable[Answer] = (),
    verdict: str = "",
    lead: str = "",
    problems: Iterable[str] = (),
    about: Iterable[str] = (),
    command: str = "",
) -> str:
    """Return a page: a header with answers, a list of the sections, and the sections.

    `about` and `command` stand in small letters above the title, `lead` is markup below the answers.
    `problems` are sentences on unreadable files. A page with long tables has one script, which searches
    them, and forbids every other script.
    """
    sections = list(sections)
    long = any(_LONG in section.body for section in sections)
    return render(
        "page.html",
        title=title,
        sections=sections,
        anchors={section.name for section in sections},
        cards=list(cards),
        verdict=verdict,
        lead=lead,
        problems=list(problems),
        about=list(about),
        command=command,
        script=_script() if long else None,
    )


def _known(part: Callable[[SavedResults], T], run: SavedResults) -> T | None:
    """Return a part of the header; None if its file is malformed, which its section reports."""
    try:
        return part(run)
    except _MALFORMED:
        return None


def rendered(
    record: T, sections: Iterable[Section[T]], problems: list[str], *, folder: str = "sections"
) -> Iterable[PageSection]:
    """Yield the sections that are not empty, rendered by their templates in `folder`.

    Leave out a section whose file is malformed, and add a sentence to `problems`.
    """
    for section in sections:
        try:
            context = section.context(record)
            if context is None:
                continue
            text = render(f"{folder}/{section.name}.html", **context)
        except _MALFORMED as error:
            reason = f"{type(error).__name__}: {error}"
            problems.append(f"{section.title}: a file has unexpected content ({reason})")
            continue
        yield PageSection(section.name, section.title, Markup(text))  # noqa: S704  rendered with escaping


@cache
def _script() -> dict[str, Any]:
    """Return the script that searches long tables, and its digest for the security policy."""
    text = template_text("page.js")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return {"text": Markup(text), "digest": digest}  # noqa: S704  a file of this package
