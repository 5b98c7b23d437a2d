"""Say what earned a speed: the precision alone, and the rest of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from prepare.core.document import Advice
from prepare.core.utils.numbers import Interval, verdict_text
from prepare.stages.bench import statistics
from prepare.stages.bench.statistics import Estimate

if TYPE_CHECKING:
    from prepare.stages.bench.records import Case

# It ends the name of a third variant, `bfloat16 alone`: prepared without the steps that the setting `REST`
# names.
ALONE, REST = " alone", "rest"


class Earned(NamedTuple):
    """One part of a speed; the product of the ratios of both parts is that of the prepared model."""

    name: str
    verdict: str
    ratio: float
    interval: Interval

    def __str__(self) -> str:
        return verdict_text(self.verdict, self.ratio, self.interval)


def parts_of(case: Case) -> list[Earned]:
    """Return the parts of a speed, by `bfloat16` and by `the layout`; empty where a recipe is one part."""
    compared, row = case.comparison, case.row
    rows = compared.rows if compared else ()
    alone = next((each for each in rows if each.name.endswith(ALONE)), None)
    if compared is None or alone is None or not (alone.ratio and row.ratio):
        return []
    interval = None
    if len(alone.samples) == len(row.samples):
        confidence = float(compared.settings.get("confidence", 0.95))
        interval = statistics.ratio(row.samples, alone.samples, confidence).interval
    rest = Estimate(row.ratio / alone.ratio, interval)
    verdict = statistics.verdict(rest, compared.noise)
    name = alone.name.removesuffix(ALONE)
    return [
        Earned(name, alone.verdict, alone.ratio, alone.ratio_interval),
        Earned(str(compared.settings.get(REST) or "the rest"), verdict, *rest),
    ]


def earned_text(case: Case) -> str:
    """Return the parts in words: `2.5x by bfloat16, 1.2x slower by the layout`; empty if both are unclear."""
    parts = parts_of(case)
    if all(each.verdict == "unclear" for each in parts):
        return ""
    own = f" {case.row.verdict}"
    return ", ".join(f"{str(each).removesuffix(own)} by {each.name}" for each in parts)


def earned_advice(case: Case, section: str) -> Iterator[Advice]:
    """Yield the advice to leave out a part that is slower, if the other one is faster."""
    parts = parts_of(case)
    slower = [each for each in parts if each.verdict == "slower"]
    if len(slower) == 1 and any(each.verdict == "faster" for each in parts):
        alone, rest = parts
        # The rest was timed with the precision only, so what it is alone is not known.
        known = f"{alone.name} alone is {alone}"
        yield Advice(
            59 if case.row.verdict == "slower" else 72,
            "warn",
            f"Leave {slower[0].name} out",
            known if slower == [rest] else f"{known}; time {rest.name} without it",
            section=section,
        )
