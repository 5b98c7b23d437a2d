"""Each kind of wrong configuration with its exact message, more ways to be wrong, and how good the guesses are."""

import functools
import random
import shlex
import string
import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from paths import CONF, PYTHONPATH
from prepare.app.cli import main as cli
from prepare.app.cli.compose_config import composing
from prepare.app.job.model_target import check_targets
from prepare.app.job.settings import Settings, group_names, key_names, unknown_key
from prepare.core.forward.example_input import DTYPES
from prepare.core.utils.suggest import nearest
from prepare.errors import ConfigError
from prepare.registry import STEPS
from prepare.stages.registry import STAGES

HERE = Path(__file__).resolve().parent
OPTIONS = {
    group: sorted(path.stem for path in CONF.glob(f"{group}/*.yaml")) for group in group_names()
}
# What override_errors.txt calls by a name, because it is long or grows.
LISTS = {
    "{models}": ("custom", "{own models}"),
    "{own models}": (
        *("resnet2d", "unet2d", "unet3d", "diffusers_* (10)", "monai_* (6)", "nnunet_* (4)"),
        *("timm_* (2)", "torchvision_* (2)", "transformers_* (9) (--help model lists them)"),
    ),
    "{keys}": key_names(),
    "{steps}": STEPS,
    "{dtypes}": DTYPES,
}


class Mistake(NamedTuple):
    argv: list[str]
    lines: list[str]


def mistakes(name):
    """The blocks of a file: `$` and a command, then every line that is said; `#` is a title."""
    text = (HERE / name).read_text()
    for key, words in LISTS.items():
        text = text.replace(key, ", ".join(words))
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    return [Mistake(shlex.split(block[0][1:]), block[1:]) for block in blocks if block[0][0] == "$"]


SHOWN = mistakes("override_errors.txt")
ONLY_THE_MODEL_SHOWS = mistakes("model_errors.txt")
# More ways to make these mistakes, each with the places that are named: a message is not tested twice.
REFUSED = [
    Mistake(shlex.split(words), where.split(", "))
    for words, where in (
        line.split("  =>  ") for line in (HERE / "refused_overrides.txt").read_text().splitlines()
    )
]


def each(table, quick=1):
    """Parametrize over a table; of `quick` rows, one is in the quick tier."""
    rows = [
        pytest.param(row, id=" ".join(row.argv), marks=pytest.mark.slow if number % quick else ())
        for number, row in enumerate(table)
    ]
    return pytest.mark.parametrize("mistake", rows)


@each(SHOWN, quick=4)
def test_each_configuration_error_has_its_exact_message(mistake, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = cli.run(mistake.argv)
    out, err = capsys.readouterr()
    assert err.splitlines() == mistake.lines
    assert (code, out, list(tmp_path.iterdir())) == (2, "", [])


@each(REFUSED, quick=6)
def test_every_wrong_word_is_named_before_a_job(mistake, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = cli.run(mistake.argv)
    out, err = capsys.readouterr()
    assert [line.partition(": ")[0] for line in err.splitlines()] == mistake.lines
    assert (code, out, list(tmp_path.iterdir())) == (2, "", [])


@each(ONLY_THE_MODEL_SHOWS, quick=3)
def test_a_mistake_that_only_the_model_shows_leaves_its_page(
    mistake, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    code = cli.run(mistake.argv)
    out, err = capsys.readouterr()
    # A stage that takes long is shown, by a line with three dots.
    assert [line for line in err.splitlines() if not line.endswith(" ...")] == mistake.lines
    assert (code, out) == (2, "")
    names = {path.name for path in tmp_path.rglob("*.*") if path.parent.name != ".hydra"}
    written = {"job.json", "report.html", "result.json", "prepare.log", ".hydra"}
    assert names - {"environment.json"} == written


def plain(depth):
    return depth


@functools.wraps(plain)
def wrapper(**keywords):
    return plain(len(keywords))


def test_keywords_of_a_wrapper_are_checked_against_the_wrapped():
    check_targets({"_target_": "test_override_errors.wrapper", "depth": 1, "other": 2})
    with pytest.raises(ConfigError, match="^model.depth: is missing, and .* needs it"):
        check_targets({"_target_": "test_override_errors.wrapper", "other": 2})


def test_there_are_enough_of_them_and_none_twice():
    commands = [tuple(row.argv) for row in [*SHOWN, *REFUSED, *ONLY_THE_MODEL_SHOWS]]
    assert len(set(commands)) == len(commands) >= 150


@pytest.mark.slow
def test_what_the_configuration_shows_is_told_without_torch(tmp_path):
    code = """
import sys
from prepare.app.cli import main as cli
from test_override_errors import SHOWN
codes = {cli.run(mistake.argv) for mistake in SHOWN}
assert codes == {2}, codes
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False,
        env={"PYTHONPATH": f"{PYTHONPATH}:{HERE}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------ guesses


def allowed_words():
    """Every list of words that a message chooses from."""
    yield from OPTIONS.values()
    yield list(key_names())
    yield STEPS
    yield ("shape", "dtype", "low", "high", "args", "kwargs", "factory")
    yield DTYPES
    yield cli.COMMANDS
    for config in CONF.glob("model/*.yaml"):
        yield [key for key in yaml.safe_load(config.read_text())["model"] if key != "_target_"]
    for name in STEPS:
        yield [field.name for field in fields(STEPS[name])]
    for cls in [Settings, *STAGES.values(), *STEPS.values()]:
        yield from filter(None, map(literals, typing.get_type_hints(cls).values()))


def literals(hint):
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [word for arg in typing.get_args(hint) for word in literals(arg)]


def misspelt(word, edits, rng):
    for _ in range(edits):
        at, letter = rng.randrange(len(word)), rng.choice(string.ascii_lowercase)
        before, rest = word[:at], word[at:]
        made = {
            "delete": before + rest[1:],
            "insert": before + letter + rest,
            "replace": before + letter + rest[1:],
            "swap": before + rest[1:2] + rest[:1] + rest[2:],
        }
        word = made[rng.choice(sorted(made))]
    return word


def test_the_nearest_match_is_the_right_one_for_one_and_two_slips():
    rng = random.Random(0)
    tried, wrong = 0, []
    for allowed in map(list, allowed_words()):
        for word in (word for word in allowed if len(word) >= 4):
            for edits in (1, 1, 1, 2, 2, 2):
                slip = misspelt(word, edits, rng)
                # Some slips undo each other, or make another word that is allowed.
                if slip not in allowed:
                    tried += 1
                    if nearest(slip, allowed)[:1] != [word]:
                        wrong.append((word, slip, nearest(slip, allowed)))
    assert tried >= 400
    assert len(wrong) <= 0.05 * tried, wrong


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


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(MISSPELT[::8], id="some"),
        pytest.param(MISSPELT, id="all", marks=pytest.mark.slow),
    ],
)
def test_each_misspelt_word_is_answered_with_the_right_one(cases):
    wrong = []
    with composing() as composer:
        for word, written, allowed in cases:
            slip = f"{word[:2]}{word[3]}{word[2]}{word[4:]}"
            if slip == word:
                continue
            chosen = [] if written.startswith("model=") else ["model=unet3d"]
            problems = composer.examine([[*chosen, written.format(slip)]])
            remedies = [problem.remedy for problem in problems]
            if not any(f"did you mean {word!r}?" in remedy for remedy in remedies):
                wrong.append((written.format(slip), remedies, allowed))
    assert wrong == []


@pytest.mark.parametrize(
    ("slip", "right"),
    [("une2td", "unet2d"), ("conv3d_memory_foramt", "conv3d_memory_format"), ("UNet3D", "unet3d")],
)
def test_the_rank_is_never_lost_to_letters_that_changed_places(slip, right):
    words = [*OPTIONS["model"], *STEPS]
    assert nearest(slip, words)[0] == right


@pytest.mark.parametrize(
    ("said", "meant", "allowed"),
    [
        ("float16", "half", OPTIONS["precision"]),
        ("FP16", "half", OPTIONS["precision"]),
        ("gpu", "cuda", OPTIONS["device"]),
        ("nhwc", "channels_last", OPTIONS["memfmt"]),
        ("ndhwc", "channels_last_3d", OPTIONS["memfmt"]),
    ],
)
def test_a_synonym_comes_before_a_similar_spelling(said, meant, allowed):
    assert nearest(said, allowed)[0] == meant


def test_every_step_given_as_a_key_is_told_how_to_add_it():
    for name in set(STEPS) - set(key_names()):
        problem = unknown_key(name)
        assert problem.remedy == f"write +steps.{name}={{}}"
        assert STEPS[name].from_options({})
