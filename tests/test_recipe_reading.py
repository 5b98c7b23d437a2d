"""Recipes that are read: what a value means, what is refused, and that nothing of a recipe runs."""

import json
import os
import sys

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from prepare import recipe
from prepare.core.utils import plain_yaml
from prepare.errors import RecipeError
from recipe_checks import HEAD, STEPS_1, VERSION_1, Watch, option, refusal

WATCH = Watch()


def read(text):
    return recipe.loads(option(text))["half"]["keep"]


def test_a_recipe_of_version_1_is_read_and_written_the_same_for_ever():
    assert recipe.loads(VERSION_1) == STEPS_1
    assert recipe.dumps(STEPS_1) == VERSION_1
    assert recipe.loads(f"\ufeff# one\n---\n# two\n{VERSION_1}...\n# %three\n".encode()) == STEPS_1
    assert recipe.loads(VERSION_1.replace("\n", "\r\n")) == STEPS_1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None), ("~", None), ("Null", None), ("true", True), ("FALSE", False), ("0", 0), ("+5", 5),
        (".5", 0.5), ("5.", 5.0), ("-1e3", -1000.0), ("on", "on"), ("No", "No"),
        ("1:30", "1:30"), ("None", "None"), ("2024-01-01", "2024-01-01"),
        ("cuda:0", "cuda:0"), ("'1'", "1"), ('"true"', "true"), ('".nan"', ".nan"), ("|\n      1\n", "1\n"),
        (">-\n      a\n      b\n", "a b"), ('"\\x41\\u00e9\\e\\0"', "Aé\x1b\0"), ("$x", "$x"), ("[a: 1]", [{"a": 1}]),
        (str((1 << 64) - 1), (1 << 64) - 1),
    ],
)  # fmt: skip
def test_plain_values_mean_what_yaml_1_2_says(text, value):
    assert repr(read(text)) == repr(value)


AMBIGUOUS = ["010", "0x1F", "0o17", "1_", "0_1", "01.5", "1_000", "1e1_0", "-inf", "nan", ".inf", ".NaN", "tRue"]  # fmt: skip
WORDS = ["0", "+5", "1.5", "5.", "1e3", "True", "NULL", "on", "No", "1:30", "cuda:0", "re:x", "a.b.*", "'010'"]  # fmt: skip


@pytest.mark.parametrize("text", [*AMBIGUOUS, *WORDS])
def test_a_word_has_one_value_in_recipes_and_on_the_command_line(text):
    if text in AMBIGUOUS:
        with pytest.raises(RecipeError, match="on the command line"):
            read(text)
        assert read(f"'{text}'") == text
        return
    override = OverridesParser.create().parse_override(f"x={text}").value()
    # Hydra keeps a quoted string as an object that knows its quotes.
    assert repr(read(text)) == repr(getattr(override, "text", override))


def test_steps_and_options_keep_their_order():
    steps = {"z": {"b": 1, "a": 2}, "a": None, "m": {}}
    assert json.dumps(recipe.loads(recipe.dumps(steps))) == json.dumps(steps)


# The value of an option in line 5, the line that is named, and a word of what is wrong.
HOSTILE_VALUES = [
    ("!!python/object/apply:os.system ['touch MARKER']", 5, "tag"),
    ("!!python/object:prepare_hostile.Thing {a: 1}", 5, "tag"),
    ("!!python/module:prepare_hostile ''", 5, "tag"),
    ("!<tag:yaml.org,2002:python/name:os.system> x", 5, "tag"),
    ("[[[!!python/name:os.system x]]]", 5, "tag"),
    ("{!!python/name:os.system x: 1}", 5, "tag"),
    ("! 1", 5, "tag '!'"),
    ("&a [1]", 5, "anchor '&a'"),
    ("*a", 5, "alias '*a'"),
    ("&" + "a" * 500_000 + " x", 5, "anchor"),
    ("{<<: {a: 1}}", 5, "merge key"),
    ("{_target_: os.system, command: touch MARKER}", 5, "'_target_'"),
    ('{"\\x5ftarget_": os.system}', 5, "'_target_'"),
    ("${oc.env:HOME}", 5, "'${'"),
    ('"\\x24\\x7boc.env:HOME}"', 5, "'${'"),
    ('"$\\\n      {oc.env:HOME}"', 5, "'${'"),
    ("{'${a}': 1}", 5, "'${'"),
    ("{a: 1,\n      b: 2, 'a': 3}", 6, "first in line 5"),
    ("{1: a}", 5, "number"),
    ("{~: a}", 5, "null"),
    ("{? [a] : b}", 5, "list or a mapping"),
    ("[" * 30 + "]" * 30, 5, "32 levels"),
    ("[" * 1_000_000, 5, "32 levels"),
    ("{a: " * 250_000, 5, "32 levels"),
    ("\n      " + "- " * 500_000, 6, "32 levels"),
    ("\n      " + "? " * 500_000, 6, "list or a mapping"),
    ("a\0b", None, "not YAML"),
    ("\x1b[31m", None, "not YAML"),
    ("\ud800", 5, "UTF-8"),
    ('"\\U00110000"', 5, "not YAML"),
    ("9" * 1_000_000, 5, "64 bits"),
    (str(1 << 64), 5, "64 bits"),
    ("1e999", 5, "too large"),
    ("a\n---\nformat: prepare.recipe", 6, "second document"),
    ("[a", 6, "not YAML"),
]
HOSTILE_FILES = [
    ("", None, "is empty"),
    ("half", None, "string"),
    ("- half", None, "list"),
    ("#" * (1 << 20) + "\n", None, "1,048,576 bytes"),
    (b"format: x\n\xff\xfe", 2, "UTF-8"),
    (VERSION_1.encode("utf-16"), 1, "UTF-8"),
    ("%YAML 1.2\n---\n" + VERSION_1, 1, "directive"),
    ("%YAML " + "9" * 5000 + ".1\n---\n" + VERSION_1, 1, "not YAML"),
    ("steps: {}", None, "'format' is missing"),
    ("format: prepare.recipe\nversion: 1\nstep: {}\n", 3, "did you mean 'steps'?"),
    ("format: prepare.audit\nversion: 1\nsteps: {}\n", 1, "'prepare.audit'"),
    ("format: prepare.recipe\nversion: 2\nstages: []\n", 2, "upgrade prepare"),
    ("format: prepare.recipe\nversion: true\nsteps: {}\n", 2, "True"),
    ("format: prepare.recipe\nversion: 1\nsteps: [half]\n", 3, "list"),
    (HEAD + "  half: bfloat16\n  device: [cpu]\n  x: {}\n", 4, "string"),
    (HEAD + "  half: {}\n  device: {}\n  half: {}\n", 6, "first in line 4"),
    ("format: prepare.recipe\n\tversion: 1\n", 2, "tab"),
]
HOSTILE = [(option(text), *told) for text, *told in HOSTILE_VALUES] + HOSTILE_FILES


@pytest.mark.parametrize("slow", [False, True], ids=["libyaml", "PyYAML"])
def test_a_hostile_recipe_is_refused_and_nothing_runs(slow, tmp_path, monkeypatch):
    (tmp_path / "prepare_hostile.py").write_text("open('MARKER', 'w').close()\nclass Thing: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if slow:
        monkeypatch.setattr(plain_yaml, "_LOADER", yaml.SafeLoader)
    modules, environment = set(sys.modules), dict(os.environ)
    for data, line, wrong in HOSTILE:
        with WATCH:
            error = refusal(data)
        assert WATCH.seen == []
        assert all(map(str.isprintable, str(error).split("\n")))
        if not slow:  # the two parsers differ in the line and the words of a syntax error
            assert error.problems[0].where == (f"recipe:{line}" if line else "recipe"), data[:99]
            assert wrong in str(error), data[:99]
    assert set(sys.modules) == modules
    assert dict(os.environ) == environment
    assert not (tmp_path / "MARKER").exists()
    assert recipe.loads(VERSION_1) == STEPS_1


def test_the_watch_sees_what_a_careless_loader_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with WATCH:
        yaml.unsafe_load("!!python/object/apply:os.system ['touch MARKER']")
    assert "os.system" in {event for event, _ in WATCH.seen}
    assert (tmp_path / "MARKER").exists()


def test_32_levels_are_read_and_twenty_mistakes_are_listed():
    steps = recipe.loads(option("[" * 29 + "]" * 29))
    assert recipe.loads(recipe.dumps(steps)) == steps
    assert len(refusal(HEAD + "".join(f"  step{n}: []\n" for n in range(100))).problems) == 20


TOKENS = [
    "&a ", "*a", "!!python/name:os.system ", "! ", "<<: ", "${oc.env:HOME}", "_target_: os.system", "- ", "[", "]",
    "{", "}", ",", ":", ": ", "? ", '"', "'", "|\n", ">\n", "%YAML 1.2\n", "---\n", "\t", "\n", "\r\n", "\0", "\x1b",
    "\x85", "\u2028", "\ufeff", "\\ud800", "\\", "#", "0x", "010", "1e999", ".nan", "~", "=", "  ", "9" * 30, "steps",
]  # fmt: skip


BYTES = (
    st.lists(st.sampled_from([VERSION_1, HEAD, *TOKENS])).map("".join).map(str.encode) | st.binary()
)


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_any_bytes_are_refused_or_round_trip(count):
    @settings(max_examples=count, deadline=None, derandomize=True, database=None)
    @given(BYTES)
    def check(data):
        with WATCH:
            try:
                steps = recipe.loads(data)
            except RecipeError as error:
                lines = str(error).split("\n")
                assert len(lines) == len(error.problems)
                assert all(map(str.isprintable, lines))
                return
        text = recipe.dumps(steps)
        # repr tells 1 from 1.0 and True, and shows the order of keys.
        assert repr(recipe.loads(text)) == repr(steps)
        assert recipe.dumps(recipe.loads(text)) == text
        assert not WATCH.seen

    check()
