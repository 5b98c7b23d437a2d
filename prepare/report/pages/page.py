"""Write HTML pages as single files without network access; make the page of a run from its record."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from markupsafe import Markup

from prepare.core.utils import files
from prepare.core.utils.wording import command_line_words
from prepare.job.results import read_results
from prepare.registry import ordered_stages
from prepare.report.documents import answers, shown_of, verdict
from prepare.report.pages.run_lead import day, run_lead
from prepare.report.pages.section import MALFORMED, PageSection, sections
from prepare.report.render import render, template_text
from prepare.report.run_documents import command, own_documents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prepare.core.document import Answer, Document
    from prepare.job.record import Result
    from prepare.job.results import SavedResults

NAME = "report.html"
T = TypeVar("T")
# The attribute that starts the template of a long table.
_LONG = 'class="frame grid'


def write_page(folder: str | Path, *, result: Result | None = None) -> Path:
    """Write `report.html` into the folder of a run, from the files in it; return its path.

    The same files give the same bytes. `result` is used if the run has not written its result yet.
    Raises FileError.
    """
    path = Path(folder) / NAME
    files.write_text(path, run_page(folder, result=result))
    return path


def run_page(folder: str | Path, *, result: Result | None = None) -> str:
    """Return the page of the run in `folder`.

    Raises:
        FileError: The folder does not exist, or holds no file of a run.
    """
    with command_line_words():
        run = read_results(folder)
        run = replace(run, result=run.result or result)
        problems = list(run.problems)
        documents = list(run_documents(run, problems))
        found = list(sections(documents, problems))
        return page(
            run.model,
            found,
            cards=_known(answers, run, documents) or (),
            verdict=_known(verdict, run, documents) or "",
            lead=_known(run_lead, run, documents) or "",
            problems=problems,
            about=("report of a run", _known(day, run) or ""),
            command=_known(command, run) or "",
        )


def run_documents(run: SavedResults, problems: list[str]) -> Iterator[Document]:
    """Yield the documents of the stages, and those that every run has.

    Leave out one whose file is malformed, and add a sentence to `problems`.
    """
    shown = shown_of(run)
    makers = [(cls.name, partial(cls.document, shown)) for cls in ordered_stages()]
    makers += [(title, partial(make, run)) for title, make in own_documents()]
    for name, make in makers:
        try:
            if document := make():
                yield document
        except MALFORMED as error:
            reason = f"{type(error).__name__}: {error}"
            problems.append(f"{name}: a file has unexpected content ({reason})")


def _known(part: Callable[..., T], *args: Any) -> T | None:
    """Return a part of the header; None if its file is malformed, which its section reports."""
    try:
        return part(*args)
    except MALFORMED:
        return None


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


@cache
def _script() -> dict[str, Any]:
    """Return the script that searches long tables, and its digest for the security policy."""
    text = template_text("page.js")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return {"text": Markup(text), "digest": digest}  # noqa: S704  a file of this package
