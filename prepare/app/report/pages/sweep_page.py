"""The page of a sweep: recommendation, failures, all rows, and recipes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from prepare import recipe
from prepare.app.job.results import read_results
from prepare.app.report.pages.page import NAME, page
from prepare.app.report.render import short
from prepare.app.report.run_documents import training_code
from prepare.app.report.sentences import timing_text, verified_text
from prepare.app.report.sweep_table import (
    choices,
    columns,
    conclusions,
    in_words,
    numbered,
    reasons,
    shared_rows,
    verdict_of,
)
from prepare.app.sweep.ranking import (
    RankedGroup,
    Ranking,
    command,
    rank,
)
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
from prepare.core.utils import files
from prepare.core.utils.text import plural, size, times
from prepare.errors import PrepareError

_SWITCHES = ("true", "false", "null", "none")
# Show at most so many recipes; the sentences name the best row of every field.
_RECIPES = 10
# More reasons below a table, and longer commands, are not read; more best rows do not fit on a card.
_REASONS, _LETTERS, _FEW = 40, 4000, 3
_KINDS = {"#": "link", "status": "word"}


def write_sweep_page(summary: Summary, folder: Path) -> None:
    """Write `report.html` into the folder of the sweep, from the records of its rows. Raises FileError."""
    files.write_text(folder / NAME, sweep_page(summary, folder))


def sweep_page(summary: Summary, folder: Path) -> str:
    """Return the page of a sweep; the same files give the same bytes."""
    sweep = _Sweep(folder, summary, rank(summary))
    parts = (
        ("recommendation", "Recommendation", sweep.recommendation),
        ("failures", "Failures", sweep.failures),
        ("rows", "All rows", sweep.all_rows),
        ("recipes", "Recipes", sweep.recipes),
    )
    documents = [Document(name=name, title=title, parts=make) for name, title, make in parts]
    return page(
        _title(summary),
        documents,
        cards=sweep_cards(summary, sweep.ranking),
        about=("report of a sweep",),
        command=summary.command,
    )


@dataclass(frozen=True)
class _Sweep:
    """The folder of a sweep, its summary and its ranking; its methods yield the parts of sections."""

    folder: Path
    summary: Summary
    ranking: Ranking

    def recommendation(self) -> Iterator[Part]:
        """Yield the conclusions, and a line with the command of the best row of each field."""
        for text in [*conclusions(self.summary, self.ranking)] or _why_none(self.summary):
            yield Text(text=f"{text}.")
        yield Code(text="\n".join(short(command(row), _LETTERS) for row in self._best()))

    def recipes(self) -> Iterator[Part]:
        """Yield behind a line the code for the best row of each field, and its recipe."""
        for row in self._best():
            if (steps := _recipe(self.folder, row)) is not None:
                code = _code(self.folder, row)
                file = f"The recipe, in {row.folder}/recipe.yaml:"
                parts = (Code(text=code, title="In training code:"), Code(text=steps, title=file))
                yield Folded(title=self._named(row), parts=parts)

    def _best(self) -> list[SweepRow]:
        return [field.best for field in self.ranking.groups if field.best][:_RECIPES]

    def _named(self, row: SweepRow) -> str:
        return f"#{row.number} {choices(row, self.summary.varying)}".rstrip()

    def failures(self) -> Iterator[Part]:
        """Yield the rows that failed, grouped by reason."""
        failed: dict[tuple[str, str], list[SweepRow]] = {}
        for row in self.summary.rows:
            if row.status not in ("ok", *UNENDED):
                failed.setdefault((row.status, row.reason or ""), []).append(row)
        if failed:
            yield Table(
                label="Failures",
                columns=(
                    *(("Status", "word"), ("Reason", "prose"), ("Rows", "number")),
                    *(("Numbers", "text"), ("First row", "link")),
                ),
                rows=[
                    (
                        *(status, reason, plural(len(rows), "row")),
                        *(numbered(row.number for row in rows), self._choices(rows[0])),
                    )
                    for (status, reason), rows in failed.items()
                ],
                links=[self._page(rows[0]) for rows in failed.values()],
                form="stacked",
            )
            if any(status in ("failed", "crashed") for status, _ in failed):
                text = "The traceback of a failed row is in traceback.txt in its folder."
                yield Text(text=text, kind="note")

    def all_rows(self) -> Iterator[Part]:
        """Yield the table of all rows, in the order of their rank."""
        shown, rows = columns(self.summary, self.ranking), self.ranking.rows
        star = "The best row has a star. " if self.ranking.best else ""
        order = "measured time if comparable, then by " if any(map(_is_timed, rows)) else ""
        shared = numbered(shared_rows(self.ranking))
        shared = shared and f". Not compared, as other runs used the same cores: {shared}"
        text = f"{star}Rows are ordered by {order}number; summary.csv names their folders{shared}."
        yield Text(text=text, kind="note")
        kinds = ((c.title, _KINDS.get(c.title, "number" if c.number else "text")) for c in shown)
        yield Table(
            label="All rows",
            columns=tuple(kinds),
            rows=[[column.text(row) for column in shown] for row in rows],
            file="summary.csv",
            links=[*map(self._page, rows)],
        )
        ended = (row for row in self.summary.rows if row.status in ("ok", *UNENDED))
        why = [f"{numbered(found)}: {reason}" for found, reason in reasons(ended)]
        if len(why) > _REASONS:
            why[_REASONS:] = [f"{plural(len(why) - _REASONS, 'reason')} more in summary.csv"]
        parts = (Items(texts=tuple(why), kind="note"),)
        yield Folded(title="Why rows are unclear or have no time", parts=parts)

    def _page(self, row: SweepRow) -> str:
        """Return the relative address of the row's page; empty if it has none."""
        if row.folder is None or not (self.folder / row.folder / NAME).is_file():
            return ""
        return f"./{quote(row.folder.encode('utf-8', 'surrogateescape'))}/{NAME}"

    def _choices(self, row: SweepRow) -> str:
        return choices(row, self.summary.varying)


def sweep_cards(summary: Summary, ranking: Ranking) -> Iterator[Answer]:
    """Yield the answers of a sweep's page: which row is best, whether it is right, whether all ended well."""
    rows = summary.rows
    groups = [group for group in ranking.groups if group.best]
    yield _best(summary, ranking.groups)
    best = [group.best for group in groups if group.best]
    yield from _judged(best[0]) if len(best) == 1 else _counted(rows)
    statuses = Counter(row.status for row in rows)
    ok = statuses.pop("ok", 0)
    others = ", ".join(f"{n:,} {in_words(status)}" for status, n in statuses.items())
    kind, answer = "good" if ok == len(rows) else "warn", f"{ok:,} of {len(rows):,} ok"
    section = "failures" if others else "rows"
    yield Answer("Did all rows end well?", kind, answer, others, section=section)


def _best(summary: Summary, groups: Sequence[RankedGroup]) -> Answer:
    """Return the best rows of the groups by their values, or why there is none."""
    # What could not be told apart is no success.
    kind, remark = "plain" if any(group.ties for group in groups) else "good", ""
    found = [(group, group.best) for group in groups if group.best][:_FEW]
    if not found:
        any_timed = any(map(_is_timed, summary.rows))
        answer = "None was shown to be faster" if any_timed else "No row was timed"
        kind = "plain"
    else:
        names = dict.fromkeys(_values_of(row, summary.varying, group.about) for group, row in found)
        answer = " and ".join(names)
        missing = [group.about for group in groups if not group.best]
        if missing:
            answer = " and ".join(
                f"{_values_of(row, summary.varying, group.about)} for {group.about}"
                for group, row in found
            )
        remarks = (f"{group.about}: {verdict_of(row)}" for group, row in found)
        single = timing_text(found[0][1].figures)
        remark = single if len(groups) == 1 else "; ".join(remarks)
        remark += (
            f"; none was shown to be faster for {', '.join(missing[:_FEW])}" if missing else ""
        )
        if tied := [row.number for group in groups for row in group.ties]:
            remark += f"; not told apart from {numbered(tied)}"
    return Answer("Which is best?", kind, answer, remark, section="recommendation")


def _is_timed(row: SweepRow) -> bool:
    return "timed" in row.figures


def _values_of(row: SweepRow, keys: Iterable[str], about: str) -> str:
    """Return `channels_last + bfloat16`: the values of the row, but of what all rows of its group have."""
    given = {key: row.choices[key] for key in keys if row.choices.get(key)}
    values = [
        # A number or a switch says nothing without its key.
        value if value[0].isalpha() and value not in _SWITCHES else f"{key}={value}"
        for key, value in given.items()
        if f"{key}={value}" not in about.split()
    ]
    return " + ".join(values) or f"#{row.number}"


def _judged(row: SweepRow) -> Iterator[Answer]:
    """Yield whether one row is right, and whether it keeps the layout."""
    breaks, asked = row.figures.get("layout_breaks"), row.figures.get("layout_asked", True)
    kinds = {"pass": ("good", "Right"), "fail": ("bad", "Wrong")}
    kind, answer = kinds.get(row.figures.get("verified", ""), ("warn", "Not verified"))
    remark = verified_text(row.figures)
    yield Answer(RIGHT, kind, answer, remark, section="rows")
    if breaks is not None and asked:
        yield Answer(
            LAYOUT,
            "bad" if breaks else "good",
            f"Lost {times(breaks)}" if breaks else "Never lost",
            f"{size(row.figures.get('copied_bytes', 0))} copied in each forward" if breaks else "",
            section="rows",
        )


def _counted(rows: Iterable[SweepRow]) -> Iterator[Answer]:
    """Yield how many rows are right, and how many keep the layout."""
    rows = list(rows)
    checked = Counter(row.figures["verified"] for row in rows if "verified" in row.figures)
    if checked:
        kind = "bad" if checked["fail"] else "good" if set(checked) == {"pass"} else "warn"
        others = ", ".join(f"{n:,} {status}" for status, n in checked.items() if status != "pass")
        answer = f"{checked['pass']:,} of {checked.total():,} are right"
        yield Answer(RIGHT, kind, answer, others, section="rows")
    # A row whose convolutions are to be contiguous has no layout to keep.
    asked = [row.figures for row in rows if row.figures.get("layout_asked", True)]
    followed = [found["layout_breaks"] for found in asked if "layout_breaks" in found]
    if followed:
        kept = followed.count(0)
        yield Answer(
            LAYOUT,
            "good" if kept == len(followed) else "bad",
            f"Kept in {kept:,} of {len(followed):,} rows",
            section="rows",
        )


def _title(summary: Summary) -> str:
    count = plural(len(summary.rows), "run")
    model = next((row.choices["model"] for row in summary.rows if "model" in row.choices), "")
    return f"{model}: {count}" if model and "model" not in summary.varying else count


def _why_none(summary: Summary) -> list[str]:
    succeeded = any(row.status == "ok" for row in summary.rows)
    return ["no row was timed, so there is no best row" if succeeded else "no row succeeded"]


def _recipe(folder: Path, row: SweepRow) -> str | None:
    with suppress(PrepareError):  # the table shows its row nevertheless
        return recipe.dumps(recipe.load(folder / (row.folder or "") / "recipe.yaml"))
    return None


def _code(folder: Path, row: SweepRow) -> str:
    with suppress(PrepareError):
        return training_code(read_results(folder / (row.folder or "")))
    return ""
