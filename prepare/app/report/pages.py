"""HTML pages as single files without network access: of a run, of a report on a model, of a sweep."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from markupsafe import Markup

from prepare.app.report import sweep_table
from prepare.app.report.answers import advice, answers, stage_documents, training_code
from prepare.app.report.html import FOLDER, drawn, has_content, render, sections, short
from prepare.app.report.sections import command, is_wrong, own_documents
from prepare.app.report.sentences import bytes_text, converted_text, steps_text, timing_text
from prepare.app.sweep.ranking import Ranking, rank
from prepare.app.sweep.ranking import command as row_command
from prepare.app.sweep.summary import UNENDED, Summary, SweepRow
from prepare.core import document as parts
from prepare.core.document import LAYOUT, RIGHT, Answer, Code, Document, Facts, Part, Text
from prepare.core.utils import files
from prepare.core.utils.text import plural

if TYPE_CHECKING:
    from prepare.app.job.record import Results

NAME = "report.html"
# Longer commands are not read; more best rows do not fit on a card.
_LETTERS, _FEW = 4000, 3
_KINDS = {"#": "link", "status": "word"}


def write_page(folder: Path, run: Results) -> None:
    """Write `report.html` into the folder of a run. Raises FileError."""
    files.write_text(folder / NAME, run_page(run))


def run_page(run: Results) -> str:
    """Return the page of a run, or of a report on a model."""
    documents = stage_documents(run)
    documents += own_documents(run, advice(run, documents).answer)
    date = str((run.environment or {}).get("date") or "")
    return page(
        run.model,
        documents,
        cards=answers(run, documents),
        lead=_run_lead(run),
        about=("report of a run" if run.task else "report on a model", date[:16].replace("T", " ")),
        command=command(run) if run.task else "",
    )


def page(
    title: str,
    documents: Iterable[Document],
    *,
    cards: Iterable[Answer] = (),
    lead: Iterable[Part] = (),
    about: Iterable[str] = (),
    command: str = "",
) -> str:
    """Return a page: a header with answers, a list of the sections, and a section for each document.

    `about` and `command` stand in small letters above the title. Below the answers is the `lead`, parts that
    stand beside each other. A page with tables has one script, which sorts and searches them, and forbids
    every other script.
    """
    found = list(sections(documents))
    shown = [part for part in lead if has_content(part)]
    return render(
        "page.html",
        title=title,
        sections=found,
        anchors={section["name"] for section in found},
        cards=list(cards),
        lead=[drawn([part], f"lead-{at}", level=2) for at, part in enumerate(shown)],
        about=list(about),
        command=command,
        script=_script() if any('class="sorted"' in section["body"] for section in found) else None,
    )


def _run_lead(run: Results) -> list[Part]:
    """Return what was done, and the code for it; nothing for an unprepared model."""
    if run.audit is None:
        return []
    facts = [("Steps", steps_text(run.steps))]
    if run.amp != "none":
        facts.append(("Autocast", f"every forward in {run.amp}"))
    facts += [
        ("Convolutions", converted_text(run.audit)),
        ("Memory", bytes_text(run.audit.summary)),
    ]
    if run.task and (seen := run.job.seen):
        facts.append(("Example", f"{seen['given']} -> {seen['gave']}"))
    code = Code(text="" if is_wrong(run) else training_code(run), title="In your code")
    return [Facts(rows=tuple(facts), title="What was done"), code]


def write_sweep_page(summary: Summary, folder: Path) -> None:
    """Write `report.html` into the folder of the sweep, from the records of its rows. Raises FileError."""
    files.write_text(folder / NAME, sweep_page(summary, folder))


def sweep_page(summary: Summary, folder: Path) -> str:
    """Return the page of a sweep; the same files give the same bytes."""
    ranking, count = rank(summary), plural(len(summary.rows), "run")
    keys = {"model", "model._target_"}
    named = (row.choices[key] for row in summary.rows for key in keys & row.choices.keys())
    model = "" if keys & {*summary.varying} else next(named, "").rpartition(".")[2]
    made = (
        ("recommendation", "Recommendation", tuple(_recommendation(summary, ranking))),
        ("failures", "Failures", tuple(_failures(summary, folder))),
        ("rows", "All rows", tuple(_all_rows(summary, ranking, folder))),
    )
    return page(
        f"{model}: {count}" if model else count,
        [Document(name=name, title=title, parts=each.__iter__) for name, title, each in made],
        cards=sweep_cards(summary, ranking),
        about=("report of a sweep",),
        command=summary.command,
    )


def sweep_cards(summary: Summary, ranking: Ranking) -> Iterator[Answer]:
    """Yield the answers of a sweep's page: which row is best, what is right, whether all ended well."""
    rows = summary.rows
    yield _best(summary, ranking)
    checked = Counter(row.figures["verified"] for row in rows if row.figures.get("verified"))
    if checked:
        kind = "bad" if checked["fail"] else "good" if set(checked) == {"pass"} else "warn"
        others = ", ".join(f"{n:,} {status}" for status, n in checked.items() if status != "pass")
        answer = f"{checked['pass']:,} of {checked.total():,} are right"
        yield Answer(RIGHT, kind, answer, others, section="rows")
    # A row whose convolutions are to be contiguous has no layout to keep.
    breaks = [row.figures.get("layout_breaks") for row in rows if row.figures.get("layout_asked")]
    if breaks:
        kept = breaks.count(0)
        kind, answer = "good" if kept == len(breaks) else "bad", f"Kept in {kept:,} of"
        yield Answer(LAYOUT, kind, f"{answer} {len(breaks):,} rows", section="rows")
    statuses = Counter(row.status for row in rows)
    ok = statuses.pop("ok", 0)
    others = ", ".join(f"{n:,} {sweep_table.in_words(status)}" for status, n in statuses.items())
    kind, answer = "good" if ok == len(rows) else "warn", f"{ok:,} of {len(rows):,} ok"
    section = "failures" if others else "rows"
    yield Answer("Did all rows end well?", kind, answer, others, section=section)


def _best(summary: Summary, ranking: Ranking) -> Answer:
    """Return the best row of each group by its choices, or why there is none; the rest is in sentences."""
    best = {group.about: group.best for group in ranking.groups if group.best}
    names = [sweep_table.own_choices(row, summary.varying, of) for of, row in best.items()]
    # What could not be told apart is no success.
    kind = "plain" if not best or any(group.ties for group in ranking.groups) else "good"
    remark = ""
    if not best:
        timed = any("timed" in row.figures for row in summary.rows)
        names = ["None was shown to be faster" if timed else "No row was timed"]
    elif len(ranking.groups) > 1:
        names = [f"{name} for {of}" for name, of in zip(names, best, strict=True)]
    else:
        remark = timing_text(next(iter(best.values())).figures)
    answer = " and ".join(dict.fromkeys(names[:_FEW]))
    return Answer("Which is best?", kind, answer, remark, section="recommendation")


def _recommendation(summary: Summary, ranking: Ranking) -> Iterator[Part]:
    """Yield the conclusions, and a line with the command of the best row of each field."""
    succeeded = any(row.status == "ok" for row in summary.rows)
    none = "no row was timed, so there is no best row" if succeeded else "no row succeeded"
    for text in [*sweep_table.conclusions(summary, ranking)] or [none]:
        yield Text(text=f"{text}.")
    best = [field.best for field in ranking.groups if field.best]
    yield Code(text="\n".join(short(row_command(row), _LETTERS) for row in best))
    if best:
        text = "The page of a row has the code that applies its recipe, the recipe.yaml beside it."
        yield Text(text=text, kind="note")


def _failures(summary: Summary, folder: Path) -> Iterator[Part]:
    """Yield the rows that failed, grouped by reason."""
    failed: dict[tuple[str, str], list[SweepRow]] = {}
    for row in summary.rows:
        if row.status not in ("ok", *UNENDED):
            failed.setdefault((row.status, row.reason or ""), []).append(row)
    rows = []
    for kind, found in failed.items():
        numbers = sweep_table.numbered(row.number for row in found)
        first = sweep_table.own_choices(found[0], summary.varying)
        rows.append((*kind, plural(len(found), "row"), numbers, first))
    yield parts.Table(
        label="Failures",
        columns=parts.columns(
            "Status word, Reason prose, Rows number, Numbers text, First row link"
        ),
        rows=rows,
        links=[_address(found[0], folder) for found in failed.values()],
        form="stacked",
    )
    if any(status in ("failed", "crashed") for status, _ in failed):
        text = "The traceback of a failed row is in traceback.txt in its folder."
        yield Text(text=text, kind="note")


def _all_rows(summary: Summary, ranking: Ranking, folder: Path) -> Iterator[Part]:
    """Yield the table of all rows, in the order of their rank."""
    shown, rows = sweep_table.columns(summary, ranking), ranking.rows
    timed = "measured time where it can be compared, the best with a star, then by "
    text = f"Rows are ordered by {timed if ranking.groups else ''}number."
    yield Text(text=text, kind="note")
    kinds = ((c.title, _KINDS.get(c.title, "number" if c.number else "text")) for c in shown)
    yield parts.Table(
        label="All rows",
        columns=tuple(kinds),
        rows=[[column.text(row) for column in shown] for row in rows],
        file="summary.csv",
        links=[_address(row, folder) for row in rows],
    )
    ended = (row for row in summary.rows if row.status in ("ok", *UNENDED))
    why = (f"{sweep_table.numbered(n)}: {reason}" for n, reason in sweep_table.reasons(ended))
    note = Text(text=tuple(why), kind="note")
    yield parts.Folded(title="Why rows are unclear or have no time", parts=(note,))


def _address(row: SweepRow, folder: Path) -> str:
    """Return the relative address of the row's page; empty if it has none."""
    if row.folder is None or not (folder / row.folder / NAME).is_file():
        return ""
    return f"./{quote(row.folder.encode('utf-8', 'surrogateescape'))}/{NAME}"


@cache
def _script() -> dict[str, Any]:
    """Return the script that sorts and searches tables, and its digest for the security policy."""
    text = (FOLDER / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return {"text": Markup(text), "digest": digest}  # noqa: S704  a file of this package
