"""Write numbers, names and tables for reading, print lines, and name settings in the words of their user."""

from __future__ import annotations

import csv
import io
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")

# Called with the name of the stage that begins; returns a context that lasts as long as the stage.
Progress = Callable[[str], AbstractContextManager[Any]]


def line(text: str, *, errors: bool = False) -> None:
    """Print one line on stdout or stderr, not wrapped, so that paths can be copied from it."""
    stream = sys.stderr if errors else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        to_nobody(stream)


def to_nobody(stream: TextIO) -> None:
    """Let the reader of a stream go, as in `| head`: what follows is written to nobody, and nothing fails."""
    with Path(os.devnull).open("wb") as nobody:
        os.dup2(nobody.fileno(), stream.fileno())


def size(count: int) -> str:
    """Return a number of bytes with a binary unit: `5.4 MiB`."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} bytes" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def printable(text: Any) -> str:
    """Return `text` as one line for any terminal, with unprintable characters escaped."""
    letters = (x if x.isprintable() else x.encode("unicode_escape").decode() for x in str(text))
    return "".join(letters)


def first_line(message: object) -> str:
    """Return the first line of an error or of a text, without colours and the space around the whole."""
    return _COLOURS.sub("", str(message)).strip().partition("\n")[0]


def capitalized(text: str) -> str:
    """Return the text with a capital first letter; `torch_export` and `key=value` stay as they are."""
    return text if {"_", "="} & {*text.partition(" ")[0]} else text[:1].upper() + text[1:]


def plural(count: int, word: str) -> str:
    """Return a count with its noun: `1 tensor`, `2 tensors`."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    r"""Return the rows as CSV with its line ends, `\r\n`; None is an empty cell.

    A lone surrogate, which UTF-8 cannot encode, is written as `\udc80`.
    """
    stream = io.StringIO(newline="")
    csv.writer(stream).writerows(rows)
    return stream.getvalue().encode("utf-8", "backslashreplace").decode()


# ------------------------------------------------------------ times and ratios
Interval = tuple[float, float] | None
# The words of records, and those that people read.
_DOUBTS = {
    "cannot tell": "unclear",
    "cannot predict": "unclear",
    "too noisy": "unclear",
    "not compared": "not measured",
}
# An error of more times its tolerance is not given in figures.
_MANY_TIMES = 1000
# More noise than this, as a factor, is not printed.
_LOUDEST = 1.5


def seconds(value: float) -> str:
    """Format a time with three digits: `1.23 s`, `45.6 ms`, `789 us`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= 0.9995 * scale:
            return f"{digits(value / scale)} {unit}"
    return f"{digits(value / 1e-6)} us"


def digits(value: float) -> str:
    """Format a number with three digits, or with all before the point if these are more."""
    places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{places}f}"


def finite(value: float | None) -> float | None:
    """Return a number as JSON can hold it; None for None, infinity and NaN."""
    return float(value) if value is not None and math.isfinite(value) else None


def part_of_tolerance(error: float | None, tolerance: float | None) -> float | None:
    """Return an error as a part of its tolerance: infinite for an error where none is allowed.

    None if one of them is not known.
    """
    if error is None or tolerance is None:
        return None
    if tolerance:
        return error / tolerance
    return math.inf if error else 0.0


def share_text(part: float) -> str:
    """Return a part as a share: `<1 %`, `4 %`, `46 times`, `more than 1,000 times`."""
    if part > _MANY_TIMES:
        return f"more than {_MANY_TIMES:,} times"
    if part >= 10:
        return f"{part:,.0f} times"
    return "<1 %" if part < 0.01 else f"{100 * part:,.0f} %"


def tolerance_text(part: float) -> str:
    """Return a part of a tolerance in words: `17 % of the tolerance`, `46 times the tolerance`."""
    text = share_text(part)
    return f"{text} of the tolerance" if text.endswith("%") else f"{text} the tolerance"


def small(value: float | None) -> str:
    """Format an error with two digits, `1.7e-06`; empty for None."""
    return "" if value is None else f"{value:.2g}"


def verdict_text(verdict: str, ratio: float | None, interval: Interval = None) -> str:
    """Return `1.5x faster` or `1.2x slower`; another verdict in the words of readers.

    A figure has two places, `1.36x`, where one would lie outside of the interval.
    """
    if ratio is None or verdict not in ("faster", "slower"):
        return doubt(verdict)
    factor, *ends = (r if verdict == "slower" else _inverse(r) for r in (ratio, *(interval or ())))
    is_outside = bool(ends) and not min(ends) <= round(factor, 1) <= max(ends)
    return f"{_times(factor, fine=is_outside)} {verdict}"


def speed_text(
    verdict: str,
    ratio: float | None,
    interval: Interval = None,
    *,
    time: float | None = None,
    confidence: float | None = 0.95,
) -> str:
    """Return the verdict with its figures: `1.3x faster, 163 instead of 214 ms (95 % interval: ...)`.

    `time` are the seconds that belong to the ratio. `unclear` has no times. Without `confidence` the
    interval is left out.
    """
    text = verdict_text(verdict, ratio, interval)
    if ratio is None or verdict not in ("faster", "slower", "no difference", "unclear"):
        return text
    if time is not None and verdict != "unclear":
        before = time / ratio
        text += f", {seconds(before) if verdict == 'no difference' else instead(time, before)}"
    if confidence is None or not (shown := interval_text(interval, verdict)):
        return text
    return f"{text} ({100 * confidence:g} % interval: {shown})"


def instead(after: float, before: float) -> str:
    """Return two times: `163 instead of 214 ms`, the unit once if it is the same."""
    first, second = seconds(after), seconds(before)
    figure, _, unit = first.partition(" ")
    return f"{figure if second.endswith(f' {unit}') else first} instead of {second}"


def interval_text(interval: Interval, verdict: str = "") -> str:
    """Return an interval of ratios: `1.22x to 1.37x faster`, `1.05x slower to 1.1x faster`.

    It leaves out the word that `verdict` says, and is empty for None.
    """
    if interval is None:
        return ""
    low, high = interval
    if high <= 1 or low >= 1:
        word = "faster" if high <= 1 else "slower"
        ends = (_inverse(high), _inverse(low)) if high <= 1 else interval
        text = " to ".join(_times(end, fine=True) for end in ends)
        return text if word == verdict else f"{text} {word}"
    return f"{_times(high, fine=True)} slower to {_times(_inverse(low), fine=True)} faster"


def doubt(status: str) -> str:
    """Return a status in one of the two words of doubt, `unclear` or `not measured`; others stay."""
    return _DOUBTS.get(status, status)


def noise_text(noise: float | None) -> str:
    """Return what the unprepared model shows against itself; empty if there is no interval."""
    if noise is None:
        return ""
    if noise > _LOUDEST:
        return "these times scatter too much to show a difference"
    return f"differences below {100 * (noise - 1):.1f} % are noise"


def _inverse(ratio: float) -> float:
    return 1 / ratio if ratio else math.inf


def _times(factor: float, *, fine: bool = False) -> str:
    """Return `1.04x`, `1.5x`, `45x`; a `fine` factor has two places below 10."""
    places = 2 if factor < (9.95 if fine else 1.095) else 1 if factor < 9.95 else 0
    return f"{factor:,.{places}f}x"


# ------------------------------------------------------------ settings, as the command line writes them
EVAL_MODE = "choose mode=eval (in Python model.eval())"


def list_option(step: str, key: str, names: Iterable[str]) -> str:
    """Return an option to set: `steps.half.keep=[norms,head]`."""
    return f"steps.{step}.{key}=[{','.join(names)}]"
