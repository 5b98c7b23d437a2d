"""One HTML page for a run: a file that needs no network and no script, made from the run's folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from markupsafe import Markup

from prepare import files
from prepare.report.rendering import render
from prepare.report.run import Run, read_run
from prepare.report.sections import SECTIONS, Section, tiles

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prepare.record import Result

NAME = "report.html"
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
    run = read_run(folder)
    run = replace(run, result=run.result or result)
    problems = list(run.problems)
    parts = list(_parts(run, SECTIONS, problems))
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
) -> str:
    """Any page of ours: a head with figures, a list of the sections, the sections.

    `problems` are sentences on what could not be read; `of` names the folder it is made from.
    """
    return render(
        "page.html",
        title=title,
        parts=list(parts),
        tiles=list(tiles),
        result=result,
        problems=list(problems),
        of=of,
    )


def _parts(run: Run, sections: Iterable[Section], problems: list[str]) -> Iterable[Part]:
    for section in sections:
        try:
            context = section.context(run)
            if context is None:
                continue
            text = render(f"sections/{section.name}.html", **context)
        except _ODD as error:
            said = f"{type(error).__name__}: {error}"
            problems.append(f"{section.title}: a file does not hold what it should ({said})")
            continue
        yield Part(section.name, section.title, Markup(text))  # noqa: S704  rendered with escaping
