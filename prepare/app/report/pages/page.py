"""HTML pages as single files without network access: of a run, of a report on a model."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from markupsafe import Markup

from prepare import recipe
from prepare.app.job.results import Analyses, Results, read_results
from prepare.app.report.documents import answers, cards_of, sentences_of, shown_of, verdict
from prepare.app.report.pages.section import MALFORMED, drawn, has_content, sections, unexpected
from prepare.app.report.render import render, template_text
from prepare.app.report.run_documents import audit_facts, command, own_documents, training_code
from prepare.app.report.sentences import bytes_text, convolutions_text, steps_text
from prepare.core.document import Advice, Answer, Charts, Code, Document, Facts, Part
from prepare.core.utils import files
from prepare.core.utils.wording import command_line_words
from prepare.errors import PrepareError
from prepare.stages.stage import ordered_stages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prepare.app.job.record import Result

NAME = "report.html"
T = TypeVar("T")
# The attribute of a table that the script of a page sorts.
_SORTED = ' class="sorted"'


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
        run = read_results(folder, result)
        problems = list(run.problems)
        documents = list(run_documents(run, problems))
        return page(
            run.model,
            documents,
            cards=_known(answers, run, documents) or (),
            verdict=_known(verdict, run, documents) or "",
            lead=_known(_run_lead, run, documents) or (),
            problems=problems,
            about=("report of a run", _known(_day, run) or ""),
            command=_known(command, run) or "",
        )


def model_page(
    report: Analyses,
    documents: Sequence[Document],
    default: Iterable[Advice],
    *,
    model: str,
    steps: str,
) -> str:
    """Return the page of a report on a model, in the words of Python; `default` is what to do with it."""
    cards = cards_of(documents, default)
    facts = [("Steps", steps)] if steps else []
    facts += audit_facts(report.audit) if report.audit else []
    done = Facts(rows=tuple(facts), title="What was done")
    return page(
        model,
        documents,
        cards=cards,
        verdict=sentences_of(cards),
        lead=[[done], [part for document in documents for part in document.lead]],
        about=("report on a model",),
    )


def run_documents(run: Results, problems: list[str]) -> Iterator[Document]:
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
            problems.append(unexpected(name, error))


def _known(part: Callable[..., T], *args: Any) -> T | None:
    """Return a part of the header; None if its file is malformed, which its section reports."""
    try:
        return part(*args)
    except MALFORMED:
        return None


def page(
    title: str,
    documents: Iterable[Document],
    *,
    cards: Iterable[Answer] = (),
    verdict: str = "",
    lead: Iterable[Iterable[Part]] = (),
    problems: Iterable[str] = (),
    about: Iterable[str] = (),
    command: str = "",
) -> str:
    """Return a page: a header with answers, a list of the sections, and a section for each document.

    `about` and `command` stand in small letters above the title. Below the answers is the `lead`, parts that
    stand below each other in each of its columns. `problems` are sentences on unreadable files. A page with
    tables has one script, which sorts and searches them, and forbids every other script.
    """
    problems = list(problems)
    found = list(sections(documents, problems))
    columns = []
    with suppress(*MALFORMED):  # a section says so
        columns = [drawn(parts, f"lead-{at}", level=2) for at, parts in enumerate(lead)]
    has_tables = any(_SORTED in section.body for section in found)
    return render(
        "page.html",
        title=title,
        sections=found,
        anchors={section.name for section in found},
        cards=list(cards),
        verdict=verdict,
        lead=columns,
        problems=problems,
        about=list(about),
        command=command,
        script=_script() if has_tables else None,
    )


def _run_lead(run: Results, documents: Iterable[Document]) -> list[list[Part]]:
    """Return what was done, the code for it, and what the documents add; nothing for an unprepared model."""
    if run.audit is None:
        return [[part] for document in documents for part in document.lead]
    steps = _steps(run)
    facts = [("Steps", steps_text(steps))]
    amp = run.result.amp if run.result is not None else "none"
    if amp != "none":
        facts.append(("Autocast", f"every forward in {amp}"))
    summary = run.audit.summary
    facts.append(("Convolutions", convolutions_text(summary["convolutions"], steps)))
    facts.append(("Memory", bytes_text(summary)))
    if seen := run.job.seen if run.job else None:
        facts.append(("Example", f"{seen['given']} -> {seen['gave']}"))
    # Code for a model that computes something else is not worth a place on the first screen.
    wrong = run.result is not None and run.result.status == "verification_failed"
    done = Facts(rows=tuple(facts), title="What was done")
    lead = [part for document in documents for part in document.lead]
    code = Code(text="" if wrong else training_code(run), title="In your code")
    pictures: list[Part] = [part for part in lead if isinstance(part, Charts)]
    others = [part for part in lead if part not in pictures]
    columns: list[list[Part]] = [pictures, [done, code]] if pictures else [[done], [code]]
    columns.append(others)
    return [column for column in columns if any(map(has_content, column))]


def _day(run: Results) -> str:
    """Return day and minute of the run: `2026-11-24 06:55`; empty if not known."""
    date = str((run.environment or {}).get("date") or "")
    return date[:16].replace("T", " ")


def _steps(run: Results) -> Mapping[str, Mapping[str, Any] | None]:
    try:
        return recipe.loads(run.recipe) if run.recipe is not None else {}
    except PrepareError:
        return {}


@cache
def _script() -> dict[str, Any]:
    """Return the script that sorts and searches tables, and its digest for the security policy."""
    text = template_text("page.js")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return {"text": Markup(text), "digest": digest}  # noqa: S704  a file of this package
