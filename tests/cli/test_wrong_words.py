"""Wrong words: where each is, the nearest word and the exit code, in one line; and how good the guesses are."""

import io
import shlex
import typing
from contextlib import redirect_stderr
from dataclasses import fields
from pathlib import Path

import pytest

from paths import CONF
from prepare.app.cli import main as cli
from prepare.app.job.settings import Settings, group_names, key_names
from prepare.registry import STEPS

HERE = Path(__file__).resolve().parent
OPTIONS = {
    group: sorted(path.stem for path in CONF.glob(f"{group}/*.yaml")) for group in group_names()
}
ROWS = [
    line.split("  =>")
    for line in (HERE / "wrong_words.txt").read_text().splitlines()
    if not line.startswith("#")
]


def each(table, quick=1):
    """Parametrize over rows of the table; of `quick` rows, one is in the quick tier."""
    rows = [
        pytest.param(row, id=row[0].strip(), marks=pytest.mark.slow if number % quick else ())
        for number, row in enumerate(table)
    ]
    return pytest.mark.parametrize("row", rows)


def check(row, capsys):
    words, where, write = row
    code = cli.run(shlex.split(words.lstrip("! ")))
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.endswith(" ...")]
    places, remedies = (text.strip().split(", ") for text in (where, write))
    assert len(lines) == len(places), err
    for line, place, remedy in zip(lines, places, remedies, strict=True):
        assert place in line
        assert remedy in line.replace(place, "", 1)
        assert "provider=" not in line  # Hydra's search path
    assert (code, out) == (2, "")


@each(ROWS, quick=3)
def test_a_wrong_word_is_one_line_with_the_nearest_word(row, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    check(row, capsys)
    # Of what only the model shows there is a page.
    assert bool(list(tmp_path.iterdir())) == row[0].startswith("!")


def test_the_table_has_sixty_rows_and_none_twice():
    assert len({words for words, *_ in ROWS}) == len(ROWS) >= 60


# ------------------------------------------------------------------------------------------ guesses
def literals(hint):
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [word for arg in typing.get_args(hint) for word in literals(arg)]


def misspellings():
    """Each word of the command line, in a set of overrides that misspells it by two letters that changed places."""
    for group, options in OPTIONS.items():
        yield from ((word, f"{group}={{}}", options) for word in options)
    yield from ((word, "{}.x=1", key_names()) for word in key_names())
    yield from ((word, "+steps.{}={{}}", STEPS) for word in STEPS)
    for name in STEPS:
        options = [field.name for field in fields(STEPS[name])]
        yield from ((word, f"+steps.{name}={{{{{{}}:1}}}}", options) for word in options)
    for key, hint in typing.get_type_hints(Settings).items():
        yield from ((word, f"{key}={{}}", literals(hint)) for word in literals(hint))


MISSPELT = [each for each in misspellings() if len(each[0]) >= 5]


def answer(words):
    with redirect_stderr(io.StringIO()) as err:
        assert cli.run(words) == 2
    return err.getvalue()


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(MISSPELT[::8], id="some"),
        pytest.param(MISSPELT, id="all", marks=pytest.mark.slow),
    ],
)
def test_nine_of_ten_misspelt_words_are_answered_with_the_right_one(cases, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong, tried = [], 0
    for word, written, _ in cases:
        slip = f"{word[:2]}{word[3]}{word[2]}{word[4:]}"
        if slip == word:
            continue
        tried += 1
        chosen = [] if written.startswith("model=") else ["model=unet3d"]
        said = answer([*chosen, written.format(slip)])
        if f"did you mean {word!r}" not in said and f"did you mean {word}" not in said:
            wrong.append((written.format(slip), said))
    assert len(wrong) <= tried / 10, wrong
