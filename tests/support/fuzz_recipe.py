"""Feeds bytes of all kinds to the recipe reader and reports what happened as one line of JSON.

    PYTHONPATH=. python tests/support/fuzz_recipe.py --cases 100000 --seed 1 [--slow-parser]

A case is right if it is a RecipeError of printable lines, or a recipe that is written and read back
as the same; and if nothing was opened, imported or executed meanwhile. The first case that is not
right ends the run with its traceback.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Self

from prepare import recipe
from prepare.core.utils import plain_yaml
from prepare.errors import RecipeError

HEAD = "format: prepare.recipe\nversion: 1\nsteps:\n"
SEEDS = [
    HEAD + "  device: {device: cpu}\n  half: {dtype: bfloat16, keep: [norms, 'type:Conv3d']}\n",
    HEAD
    + "  half:\n    keep:\n    - norms\n    - re:.*\\d\n    -  - 1\n       - x: [2.5, -1e-3]\n",
    HEAD + "  a: null\n  b: {}\n  ? c\n  : d: ~\n  'e f': {g: \"\\u00e9\\n\\x41\\\n     z\"}\n",
    HEAD
    + "  a: # comment\n    text: |+2\n        two\n\n      one\n    fold: >-\n      x\n      y\n",
    "---\n{format: prepare.recipe, 'version': 1, \"steps\": {a: {b: [1, {c: [[]]}, 0x1f]}}}\n...\n",
    HEAD + "  a: {n: [0, -1, 18446744073709551615, 0o17, 1.5, .5, 1e5, true, on, 1:30, ü, 日本]}\n",
    HEAD
    + '  a: {s: "\\ud800 \\U0001f600 \\0\\a\\e\\N\\_\\L\\P", t: \'\\ud800\', u: "\\\\ud800"}\n',
]
TOKENS = [
    "&a ", "*a", "!!python/name:os.system ", "!!python/object/apply:os.system ['true']", "! ",
    "!<x> ", "<<: ", "${oc.env:HOME}", "_target_: os.system", "- ", "[", "]", "{", "}", ",", ":",
    ": ", "? ", '"', "'", "|\n", ">\n", "|2-\n", "%YAML 1.2\n", "%TAG ! x\n", "---\n", "...\n", "\t",
    "\n", "\r", "\r\n", "\0", "\x1b", "\x7f", "\x85", "\u2028", "\ufeff", "\\ud800", "\\", "#",
    " #", "0x", "010", "1_0", "1e999", ".nan", "~", "null", "@", "`", "=", "  ", "\\U00110000",
    "\\UFFFFFFFF", "9" * 30, "9" * 5000, "k" * 1100, "a: b\n", "  a: {b: c}\n", "steps", "'' : ",
]  # fmt: skip
# Each is repeated up to 1 MiB, and begins a file or the value of an option.
REPEATED = [
    "[", "{", "- ", "? ", "-\n", "[{", "{[", "{a: ", "[a: ", "[? ", "{? ", "a,", "1,", "a: b,", "?",
    "a", "a ", "a\n", "a\n\n", "1", "1.", "0x1", "_1", "-1", ".5", "1e", ": ", ":", "\\", "\\\\",
    "\\x00", "\\ud800", "\\\\ud800", "\\n", "\n", " ", "\t", "#\n", "# ", "&a ", "*a ", "!a ", "!",
    "%a\n", "---\n", "...\n", "'", '"', "''", '""', "|\n", ">\n", "\x00", "\x85", "\xe9", "日", "😀",
    "${", "_a: ", "<<: ", "a: b\n", "\r", "\r\n", "- - ", "- a: ", "'a': ", '"a": ', "]", "}", ",",
]  # fmt: skip
OPENINGS = ["", "[", "{", '"', "'", "|\n", ">\n", "'a', [", "\\"]

WATCHED = (
    "import",
    "open",
    "exec",
    "compile",
    "os.",
    "subprocess.",
    "socket.",
    "shutil.",
    "ctypes.",
)


class Watch:
    """Notes what Python's audit events show to have been opened, imported or run while it is on."""

    def __init__(self) -> None:
        self.on, self.seen = False, []
        sys.addaudithook(self.note)  # cannot be taken away again, hence the switch

    def note(self, event: str, args: tuple) -> None:
        if self.on and event.startswith(WATCHED):
            self.seen.append((event, repr(args)[:200]))

    def __enter__(self) -> Self:
        self.on, self.seen = True, []
        return self

    def __exit__(self, *_: object) -> None:
        self.on = False


def big_cases(size: int) -> Iterator[bytes]:
    """Every repetition after every opening, alone and as an option: `size` bytes each."""
    for token in REPEATED:
        for opening in OPENINGS:
            for before in ("", HEAD + "  a:\n    b: "):
                start = (before + opening).encode()
                unit = token.encode()
                yield start + unit * ((size - len(start)) // len(unit))
    for width in (10, 100, 1000):
        row = f"    {'k' * width}%06d: {'v' * width}\n"
        rows = (row % index for index in range((size - 60) // len(row % 0)))
        yield (HEAD + "  a:\n" + "".join(rows)).encode()
    yield "".join(f"formt{index}: 1\n" for index in range(2000)).encode()
    yield ("format" * (size // 7) + ": 1\n").encode()
    yield ("steps: {" + ", ".join(f"a{index}: []" for index in range(2000)) + "}").encode()
    yield (HEAD + "  a: {b: " + "[" * 27 + "1," * 4900 + "]" * 27 + "}\n").encode()


def small_cases(seed: int, count: int) -> Iterator[bytes]:
    """Arbitrary bytes, bytes that YAML gives a meaning, and recipes mutated up to eight times."""
    rng = random.Random(seed)
    for _ in range(count):
        kind = rng.random()
        if kind < 0.1:
            yield rng.randbytes(rng.randrange(200))
        elif kind < 0.25:
            yield "".join(rng.choices(TOKENS, k=rng.randrange(40))).encode()
        elif kind < 0.35:
            yield (
                HEAD + "  a:\n    b: " + "".join(rng.choices(TOKENS, k=rng.randrange(6)))
            ).encode()
        elif kind < 0.5:
            yield recipe.dumps({"a": {"b": any_value(rng, 4)}}).encode()
        else:
            yield mutated(rng)


def any_value(rng: random.Random, depth: int) -> object:
    kind = rng.randrange(9 if depth else 7)
    if kind == 7:
        return [any_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 8:
        return {f"k{any_text(rng)}": any_value(rng, depth - 1) for _ in range(rng.randrange(4))}
    scalars = (None, True, False, rng.getrandbits(63) >> rng.randrange(64), -rng.getrandbits(60))
    return (*scalars, rng.gauss(0, 10.0 ** rng.randrange(-20, 20)), any_text(rng))[kind]


def any_text(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return "".join(rng.choices(TOKENS, k=rng.randrange(4))).replace("${", "$")
    return "".join(
        chr(rng.randrange(1 << rng.choice((7, 8, 16, 20)))) for _ in range(rng.randrange(9))
    )


def mutated(rng: random.Random) -> bytes:
    data = rng.choice(SEEDS).encode()
    for _ in range(rng.randrange(9)):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.randrange(12))
        piece = rng.choice(
            (b"", rng.choice(TOKENS).encode(), rng.choice(TOKENS).encode(), data[start:end] * 2,
             rng.choice(SEEDS).encode()[start:], rng.randbytes(1))
        )  # fmt: skip
        data = data[:start] + piece + data[end:]
    return data


def outcome(data: bytes) -> str:
    """The outcome of one case; an exception is a finding."""
    steps = read(data)
    if isinstance(steps, RecipeError):
        lines = str(steps).split("\n")
        assert len(lines) == len(steps.problems), lines
        assert all(map(str.isprintable, lines)), lines
        return "refused"
    try:
        text = recipe.dumps(steps)
    except RecipeError as error:  # indentation and escapes can make the written text too large
        assert "is larger than" in str(error), data[:500]
        return "accepted"
    again = recipe.loads(text)
    # repr tells 1 from 1.0 and True, and shows the order of keys.
    assert repr(again) == repr(steps), data
    assert recipe.dumps(again) == text, data
    return "accepted"


def read(data: bytes) -> dict | RecipeError:
    try:
        return recipe.loads(data)
    except RecipeError as error:
        return error


def same_by_both_parsers(data: bytes) -> None:
    """Wherever libyaml and PyYAML's own parser both take a recipe, they find the same in it."""
    fast, slow = read(data), None
    libyaml, plain_yaml._FAST = plain_yaml._FAST, plain_yaml._SLOW
    try:
        slow = read(data)
    finally:
        plain_yaml._FAST = libyaml
    if isinstance(fast, dict) and isinstance(slow, dict):
        assert repr(fast) == repr(slow), data


def timed(data: bytes, watch: Watch) -> tuple[float, str]:
    begin = time.perf_counter()
    with watch:
        found = outcome(data)
    assert not watch.seen, (watch.seen, data[:500])
    return time.perf_counter() - begin, found


def peak() -> float:
    """The most memory this process ever had, in MB; 0 where the platform does not say."""
    # Not ru_maxrss: on Linux that outlives exec, and begins at what pytest, with torch, ever had.
    status = Path("/proc/self/status")
    if not status.exists():
        return 0.0
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--big", type=int, default=1, help="take every n-th of the largest cases")
    parser.add_argument("--slow-parser", action="store_true", help="as if libyaml were missing")
    options = parser.parse_args()
    if options.slow_parser:
        for data in small_cases(options.seed + 1, options.cases // 4):
            same_by_both_parsers(data)
        plain_yaml._FAST = plain_yaml._SLOW
    recipe.loads(SEEDS[0])
    watch, found, slowest = Watch(), Counter(), (0.0, b"")
    big = islice(big_cases(plain_yaml.MAX_BYTES), 0, None, options.big)
    before = peak()
    for data in chain(big, small_cases(options.seed, options.cases)):
        seconds, what = timed(data, watch)
        found[what] += 1
        slowest = max(slowest, (seconds, data[:80]))
    result = {"cases": found.total(), **found, "slowest_s": round(slowest[0], 4)}
    extra = round(peak() - before, 1)
    result |= {"slowest": repr(slowest[1]), "extra_mb": extra, "peak_mb": round(peak(), 1)}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
