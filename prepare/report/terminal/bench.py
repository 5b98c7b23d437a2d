"""A bench in the terminal: one sentence, and a table; made from its records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.table import Table

from prepare.core.utils.text import line, plural, printable, size
from prepare.report.terminal.console import show_table

if TYPE_CHECKING:
    from prepare.bench.records import Case, Comparison, Control, Interval, Row

_TITLES = ("variant", "time", "of the baseline's", "interval", "items/s", "peak", "verdict")


def bench_sentence(found: Comparison) -> str:
    """One sentence: `half is faster: 0.620 of the time of contiguous (0.601 to 0.643); 1 failed`."""
    differing = sorted((r for r in found.rows if r.verdict in ("faster", "slower")), key=_ratio)
    named, rest = differing[:2], [row for row in found.rows if row not in differing[:2]]
    counted = Counter(row.verdict for row in rest if row.verdict != "baseline")
    parts = [_difference(row, found.baseline) for row in named]
    parts += [
        f"{count} {'with ' * word.startswith('no ')}{word}" for word, count in counted.items()
    ]
    return "; ".join(parts) or f"{printable(found.baseline)} alone was timed"


def case_sentence(case: Case) -> str:
    """One sentence: `inference: faster, 0.82 of the time (0.80 to 0.85): 38 ms in place of 46 ms`."""
    row = case.row
    if case.comparison is None or row.ratio is None:
        named = "" if row.verdict == "not compared" else f"{row.name} "
        return printable(f"{case.what}: {named}{row.verdict}: {row.reason}")
    before = case.comparison.row(case.comparison.baseline)
    times = " in place of ".join(
        seconds(one.seconds) for one in (row, before) if one.seconds is not None
    )
    ratio = f"{factor(row.ratio)} of the time"
    if row.ratio_interval is None:
        rounds = plural(case.comparison.repeats, "round")
        return printable(f"{case.what}: about {ratio}, {rounds} are too few to be sure: {times}")
    ratio += f" ({span(row.ratio_interval, factor)})"
    low, high = row.ratio_interval
    if row.verdict.startswith("no ") and not low <= 1 <= high:  # else it would look like a mistake
        ratio += _noise(case.comparison.aa, ", where ")
    return printable(f"{case.what}: {row.verdict}, {ratio}: {times}")


def show_bench(found: Comparison, folder: str = "") -> None:
    """Prints the sentence, the table, the control, why variants failed, and what to bear in mind."""
    step = "training step" if found.settings["train"] else "inference"
    line(f"bench ({step}): {bench_sentence(found)}")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in _TITLES:
        right = title not in ("variant", "interval", "verdict")
        table.add_column(title, overflow="fold", justify="right" if right else "left")
    for row in found.rows:
        table.add_row(*_cells(row))
    show_table(table)
    line(f"  {plural(found.repeats, 'round')} in {seconds(found.seconds)}{control(found.aa)}")
    for row in found.rows:
        if row.reason:
            line(f"  {printable(row.name)} failed: {printable(row.reason)}")
    for note in found.notes:
        line(f"  note: {printable(note)}")
    if folder:
        line(f"  all of it is in {printable(folder)}")


def seconds(value: float) -> str:
    """A time as a person says it, in three digits: `1.23 s`, `45.6 ms`, `789 us`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= 0.9995 * scale:
            return f"{digits(value / scale)} {unit}"
    return f"{digits(value / 1e-6)} us"


def factor(value: float) -> str:
    """A ratio as a person says it: `0.82`, `12.3`, `0.0041`."""
    if value < 0.095:
        return f"{value:.2g}"
    return f"{value:.2f}" if value < 9.995 else digits(value)


def span(interval: Interval, say: Callable[[float], str]) -> str:
    """`0.80 to 0.85`; empty where there is no interval."""
    return "" if interval is None else " to ".join(map(say, interval))


def digits(value: float) -> str:
    """Three digits, and no fewer than all before the point."""
    places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{places}f}"


def _cells(row: Row) -> tuple[str, ...]:
    return (
        printable(row.name),
        "" if row.seconds is None else seconds(row.seconds),
        "" if row.ratio is None else f"{row.ratio:.3f}",
        _interval(row.ratio_interval),
        "" if row.throughput is None else digits(row.throughput),
        "" if row.peak_bytes is None else size(row.peak_bytes),
        row.verdict,
    )


def control(aa: Control | None) -> str:
    """What the baseline against itself says, to stand behind the number of rounds."""
    if aa is None:
        return "; the baseline failed, so there is nothing to compare to"
    text = f"; the baseline against itself: {aa.ratio:.3f} {_interval(aa.interval)}".rstrip()
    return text + _noise(aa, ", so ")


def _noise(aa: Control | None, before: str) -> str:
    return (
        "" if aa is None or aa.noise is None else f"{before}less than {aa.noise - 1:.1%} is noise"
    )


def _difference(row: Row, baseline: str) -> str:
    name, than = printable(row.name), printable(baseline)
    of = f"{row.ratio:.3f} of the time of {than} {_interval(row.ratio_interval)}"
    return f"{name} is {row.verdict}: {of}"


def _interval(interval: Interval) -> str:
    return "" if interval is None else f"({span(interval, '{:.3f}'.format)})"


def _ratio(row: Row) -> float:
    return row.ratio or 0.0
