"""The page of a sweep: answers, the command of the best row, failures, and the table of all rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import quote

from prepare.app.report.pages.page import NAME, page
from prepare.app.report.render import short
from prepare.app.report.sentences import timing_text
from prepare.app.report.sweep_table import (
    columns,
    conclusions,
    in_words,
    numbered,
    own_choices,
    reasons,
    shared_rows,
    verdict_of,
)
from prepare.app.sweep.ranking import Ranking, command, rank
from prepare.app.sweep.summary import UNENDED, Summary, SweepRow
from prepare.core.document import (
    LAYOUT,
    RIGHT,
    Answer,
    Code,
    Document,
    Folded,
    Items,
    Part,
    Table,
    Text,
)
from prepare.core.document import (
    columns as titles,
)
from prepare.core.utils import files
from prepare.core.utils.text import plural

# More reasons below a table, and longer commands, are not read; more best rows do not fit on a card.
_REASONS, _LETTERS, _FEW = 40, 4000, 3
_KINDS = {"#": "link", "status": "word"}


def write_sweep_page(summary: Summary, folder: Path) -> None:
    """Write `report.html` into the folder of the sweep, from the records of its rows. Raises FileError."""
    files.write_text(folder / NAME, sweep_page(summary, folder))


def sweep_page(summary: Summary, folder: Path) -> str:
    """Return the page of a sweep; the same files give the same bytes."""
    ranking, count = rank(summary), plural(len(summary.rows), "run")
    model = next((row.choices["model"] for row in summary.rows if "model" in row.choices), "")
    parts = (
        ("recommendation", "Recommendation", _recommendation(summary, ranking)),
        ("failures", "Failures", _failures(summary, folder)),
        ("rows", "All rows", _all_rows(summary, ranking, folder)),
    )
    documents = [
        Document(name=name, title=title, parts=partial(tuple, made)) for name, title, made in parts
    ]
    return page(
        f"{model}: {count}" if model and "model" not in summary.varying else count,
        documents,
        cards=sweep_cards(summary, ranking),
        about=("report of a sweep",),
        command=summary.command,
    )


def _recommendation(summary: Summary, ranking: Ranking) -> Iterator[Part]:
    """Yield the conclusions, and a line with the command of the best row of each field."""
    succeeded = any(row.status == "ok" for row in summary.rows)
    none = "no row was timed, so there is no best row" if succeeded else "no row succeeded"
    for text in [*conclusions(summary, ranking)] or [none]:
        yield Text(text=f"{text}.")
    best = [field.best for field in ranking.groups if field.best]
    yield Code(text="\n".join(short(command(row), _LETTERS) for row in best))
    if best:
        text = "The page of a row has the code that applies its recipe, the recipe.yaml beside it."
        yield Text(text=text, kind="note")


def _failures(summary: Summary, folder: Path) -> Iterator[Part]:
    """Yield the rows that failed, grouped by reason."""
    failed: dict[tuple[str, str], list[SweepRow]] = {}
    for row in summary.rows:
        if row.status not in ("ok", *UNENDED):
            failed.setdefault((row.status, row.reason or ""), []).append(row)
    if not failed:
        return
    yield Table(
        label="Failures",
        columns=titles("Status word, Reason prose, Rows number, Numbers text, First row link"),
        rows=[
            (
                *(status, reason, plural(len(rows), "row")),
                *(numbered(row.number for row in rows), own_choices(rows[0], summary.varying)),
            )
            for (status, reason), rows in failed.items()
        ],
        links=[_page(rows[0], folder) for rows in failed.values()],
        form="stacked",
    )
    if any(status in ("failed", "crashed") for status, _ in failed):
        text = "The traceback of a failed row is in traceback.txt in its folder."
        yield Text(text=text, kind="note")


def _all_rows(summary: Summary, ranking: Ranking, folder: Path) -> Iterator[Part]:
    """Yield the table of all rows, in the order of their rank."""
    shown, rows = columns(summary, ranking), ranking.rows
    star = "The best row has a star. " if ranking.best else ""
    timed = any("timed" in row.figures for row in rows)
    order = "measured time if comparable, then by " if timed else ""
    shared = numbered(shared_rows(ranking))
    shared = shared and f". Not compared, as other runs used the same cores: {shared}"
    text = f"{star}Rows are ordered by {order}number; summary.csv names their folders{shared}."
    yield Text(text=text, kind="note")
    kinds = ((c.title, _KINDS.get(c.title, "number" if c.number else "text")) for c in shown)
    yield Table(
        label="All rows",
        columns=tuple(kinds),
        rows=[[column.text(row) for column in shown] for row in rows],
        file="summary.csv",
        links=[_page(row, folder) for row in rows],
    )
    ended = (row for row in summary.rows if row.status in ("ok", *UNENDED))
    why = [f"{numbered(found)}: {reason}" for found, reason in reasons(ended)]
    if len(why) > _REASONS:
        why[_REASONS:] = [f"{plural(len(why) - _REASONS, 'reason')} more in summary.csv"]
    parts = (Items(texts=tuple(why), kind="note"),)
    yield Folded(title="Why rows are unclear or have no time", parts=parts)


def _page(row: SweepRow, folder: Path) -> str:
    """Return the relative address of the row's page; empty if it has none."""
    if row.folder is None or not (folder / row.folder / NAME).is_file():
        return ""
    return f"./{quote(row.folder.encode('utf-8', 'surrogateescape'))}/{NAME}"


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
    others = ", ".join(f"{n:,} {in_words(status)}" for status, n in statuses.items())
    kind, answer = "good" if ok == len(rows) else "warn", f"{ok:,} of {len(rows):,} ok"
    section = "failures" if others else "rows"
    yield Answer("Did all rows end well?", kind, answer, others, section=section)


def _best(summary: Summary, ranking: Ranking) -> Answer:
    """Return the best rows of the groups by their choices, or why there is none."""
    best = [(group, group.best) for group in ranking.groups if group.best]
    found, groups = best[:_FEW], ranking.groups
    # What could not be told apart is no success.
    kind, remark = "plain" if any(group.ties for group in groups) or not found else "good", ""
    names = [own_choices(row, summary.varying, group.about) for group, row in found]
    if len(found) == len(groups) == 1:
        remark = timing_text(found[0][1].figures)
    else:
        named = zip(names, found, strict=True)
        names = [f"{name} for {group.about}" for name, (group, _) in named]
        remark = "; ".join(f"{group.about}: {verdict_of(row)}" for group, row in found)
        if missing := [group.about for group in groups if not group.best and found]:
            remark += f"; none was shown to be faster for {', '.join(missing[:_FEW])}"
    if tied := [row.number for group in groups for row in group.ties]:
        remark += f"; not told apart from {numbered(tied)}"
    timed = any("timed" in row.figures for row in summary.rows)
    none = "None was shown to be faster" if timed else "No row was timed"
    answer = " and ".join(dict.fromkeys(names)) or none
    return Answer("Which is best?", kind, answer, remark, section="recommendation")
