"""The answers at the top of a sweep's page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prepare.core.document import Answer
from prepare.core.utils.numbers import verdict_text
from prepare.core.utils.text import size, times
from prepare.report.sentences import timing_text, verified_text
from prepare.report.sweep_table import choices
from prepare.sweep.ranking import Ranking, first_timing

if TYPE_CHECKING:
    from prepare.job.headline import FlowFigures, VerifyFigures
    from prepare.sweep.summary import Summary, SweepRow

# More best rows do not fit on a card.
_FEW = 3


def sweep_cards(summary: Summary, ranking: Ranking) -> Iterable[Answer]:
    """Yield the answers of a sweep's page: which row is best, whether it is right, whether all ended well."""
    rows = summary.rows
    best = [group.best for group in ranking.groups if group.best]
    if len(best) == 1:
        yield Answer(
            question="Which is best?",
            kind="good",
            answer=f"#{best[0].number} {choices(best[0], summary.varying)}",
            remark=timing_text(timed) if (timed := first_timing(best[0])) else "",
            section="recommendation",
        )
        yield _verified(best[0].headline.verified)
        if lost := best[0].headline.lost:
            yield _layout(lost)
    else:
        yield _best_of(summary, ranking)
        yield from _counted(rows)
    statuses = Counter(row.status for row in rows)
    ok = statuses.pop("ok", 0)
    others = ", ".join(f"{n:,} {status.replace('_', ' ')}" for status, n in statuses.items())
    yield Answer(
        question="Did all rows end well?",
        kind="good" if ok == len(rows) else "warn",
        answer=f"{ok:,} of {len(rows):,} ok",
        remark=others,
        section="failures" if others else "rows",
    )


def _best_of(summary: Summary, ranking: Ranking) -> Answer:
    """Return the best rows of several groups, or why there is none."""
    groups = [group for group in ranking.groups if group.best]
    question, section = "Which is best?", "recommendation"
    if not groups:
        any_timed = any(map(first_timing, summary.rows))
        answer = "None was shown to be faster" if any_timed else "No row was timed"
        return Answer(question=question, kind="plain", answer=answer, section=section)
    best = [group.best for group in groups if group.best]
    return Answer(
        question=question,
        kind="good",
        answer=" and ".join(f"#{row.number}" for row in best[:_FEW]),
        remark="; ".join(
            f"{group.about}: {verdict_text(timed.verdict, timed.ratio, timed.interval)}"
            for group, row in zip(groups[:_FEW], best, strict=False)
            if (timed := first_timing(row))
        ),
        section=section,
    )


def _counted(rows: Iterable[SweepRow]) -> Iterable[Answer]:
    """Yield how many rows are right, and how many keep the layout."""
    rows = list(rows)
    checked = Counter(row.headline.verified.status for row in rows if row.headline.verified)
    if checked:
        kind = "bad" if checked["fail"] else "good" if set(checked) == {"pass"} else "warn"
        others = ", ".join(f"{n:,} {status}" for status, n in checked.items() if status != "pass")
        answer = f"{checked['pass']:,} of {checked.total():,} are right"
        yield Answer(question="Right?", kind=kind, answer=answer, remark=others, section="rows")
    followed = [row.headline.lost.breaks for row in rows if row.headline.lost]
    if followed:
        kept = followed.count(0)
        yield Answer(
            question="Layout?",
            kind="good" if kept == len(followed) else "bad",
            answer=f"Kept in {kept:,} of {len(followed):,} rows",
            section="layout",
        )


def _layout(lost: FlowFigures) -> Answer:
    """Return whether the best row keeps the layout."""
    kept = lost.breaks == 0
    return Answer(
        question="Layout?",
        kind="good" if kept else "bad",
        answer="Never lost" if kept else f"Lost {times(lost.breaks)}",
        remark="" if kept else f"{size(lost.copied_bytes)} copied in each forward",
        section="layout",
    )


def _verified(verified: VerifyFigures | None) -> Answer:
    kinds = {"pass": ("good", "Right"), "fail": ("bad", "Wrong")}
    kind, answer = kinds.get(verified.status if verified else "", ("warn", "Not verified"))
    return Answer(
        question="Right?",
        kind=kind,
        answer=answer,
        remark=verified_text(verified),
        section="rows",
    )
