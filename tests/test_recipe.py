"""Recipes: what is read, what is written, what is refused and how it is said, and that nothing runs."""

import json
import math
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz_recipe import HEAD, Watch
from prepare import recipe
from prepare.core.utils import plain_yaml
from prepare.errors import ConfigError, RecipeError

FUZZ = Path(__file__).parent / "support" / "fuzz_recipe.py"
WATCH = Watch()

VERSION_1 = """\
format: prepare.recipe
version: 1
steps:
  device:
    device: cuda:0
  half:
    dtype: bfloat16
    keep:
      - norms
      - type:Conv3d
      - "re:.*\\\\.conv\\\\d+"
  conv3d_memory_format:
    memory_format: channels_last_3d
    include: []
    exclude: null
  compile: null
"""
STEPS_1 = {
    "device": {"device": "cuda:0"},
    "half": {"dtype": "bfloat16", "keep": ["norms", "type:Conv3d", "re:.*\\.conv\\d+"]},
    "conv3d_memory_format": {"memory_format": "channels_last_3d", "include": [], "exclude": None},
    "compile": None,
}


def option(text: str) -> str:
    """A recipe in which one option, in line 5, has the value `text`."""
    return f"{HEAD}  half:\n    keep: {text}\n"


def read(text: str) -> object:
    return recipe.loads(option(text))["half"]["keep"]


# ------------------------------------------------------------------------------------------ reading


def test_a_recipe_of_version_1_is_read_and_written_the_same_for_ever():
    assert recipe.loads(VERSION_1) == STEPS_1
    assert recipe.dumps(STEPS_1) == VERSION_1


def test_steps_and_options_keep_their_order():
    steps = {"z": {"b": 1, "a": 2}, "a": None, "m": {}}
    again = recipe.loads(recipe.dumps(steps))
    assert json.dumps(again) == json.dumps(steps)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None), ("~", None), ("null", None), ("Null", None), ("NULL", None),
        ("true", True), ("True", True), ("TRUE", True), ("false", False), ("FALSE", False),
        ("0", 0), ("-0", 0), ("+5", 5), ("-12", -12), ("0o17", 15), ("0x1F", 31), ("0x00", 0),
        ("1.5", 1.5), (".5", 0.5), ("5.", 5.0), ("-1e3", -1000.0), ("1E-3", 0.001), ("+.5e1", 5.0),
        ("on", "on"), ("yes", "yes"), ("No", "No"), ("y", "y"), ("1:30", "1:30"), ("None", "None"),
        ("2024-01-01", "2024-01-01"), ("0X1F", "0X1F"), ("-0x1F", "-0x1F"), ("1_", "1_"), ("=", "="),
        ("1__0", "1__0"), ("_1", "_1"), ("1.2.3", "1.2.3"), ("cuda:0", "cuda:0"), ("..", ".."),
        ("'1'", "1"), ('"true"', "true"), ('""', ""), ("'010'", "010"), ('".nan"', ".nan"),
        ("|\n      1\n", "1\n"), (">-\n      a\n      b\n", "a b"), ('"a\\\n      b"', "ab"),
        ('"\\x41\\u00e9\\U0001f600\\e\\0"', "Aé😀\x1b\0"), ("日本", "日本"), ("a\tb", "a\tb"),
        ("[1, {a: [b]}, ]", [1, {"a": ["b"]}]), ("[a: 1]", [{"a": 1}]), ("$x", "$x"),
    ],
)  # fmt: skip
def test_plain_values_mean_what_yaml_1_2_says(text, value):
    assert repr(read(text)) == repr(value)


AMBIGUOUS = ["010", "-010", "00", "0_1", "01.5", "1_000", "1_0.5", "1e1_0", "inf", "-inf", "Inf", "nan",
             "NaN", "-nan", ".inf", "-.Inf", ".nan", ".NaN", "tRue", "fALSE", "nUll"]  # fmt: skip


@pytest.mark.parametrize("text", AMBIGUOUS)
def test_a_value_that_the_command_line_reads_otherwise_is_refused(text):
    with pytest.raises(RecipeError) as raised:
        read(text)
    assert str(raised.value) == (
        f"recipe:5: holds '{text}', which means one thing in YAML and another on the command line; "
        "write it another way, or in quotes if it is text"
    )
    assert read(f"'{text}'") == text


@pytest.mark.parametrize(
    "text",
    ["0", "-7", "+5", "12", "1.5", ".5", "5.", "1e3", "1E-3", "true", "True", "FALSE", "null", "NULL",
     "on", "off", "yes", "No", "None", "1:30", "2024-01-01", "1_", "1__0", "_1", "cuda:0", "norms",
     "bfloat16", "0X1F", "1.2.3", "re:x", "a/b", "a.b.*", "e5", "channels_last_3d", "'010'", "'on'",
     *AMBIGUOUS],
)  # fmt: skip
def test_a_word_has_one_value_in_recipes_and_on_the_command_line(text):
    override = OverridesParser.create().parse_override(f"x={text}").value()
    try:
        found = read(text)
    except RecipeError:
        assert text in AMBIGUOUS
        return
    # Hydra keeps a quoted string as an object that knows its quotes.
    assert repr(found) == repr(getattr(override, "text", override))


@pytest.mark.parametrize("text", [str(1 << 64), str(-(1 << 63) - 1), "9" * 5000, "0x1" + "0" * 16,
                                  "0x" + "f" * 500_000, "0o2" + "0" * 21, "1" * 900_000])  # fmt: skip
def test_an_integer_of_more_than_64_bits_is_refused(text):
    with pytest.raises(
        RecipeError, match="which has more than 64 bits; write it another way"
    ) as raised:
        read(text)
    assert len(str(raised.value)) < 250


@pytest.mark.parametrize("value", [(1 << 64) - 1, -(1 << 63)])
def test_integers_of_64_bits_are_read_and_written(value):
    assert read(str(value)) == value
    assert recipe.loads(recipe.dumps({"a": {"b": value}})) == {"a": {"b": value}}


@pytest.mark.parametrize("text", ["1e999", "-1e999", "1" * 400 + ".0"])
def test_a_float_that_would_be_infinite_is_refused(text):
    with pytest.raises(RecipeError, match=", which is too large a number; write it another way"):
        read(text)


def test_paths_and_names_of_code_are_plain_strings():
    for text in (
        "../../etc/passwd",
        "/etc/shadow",
        "os.system",
        "file:///x",
        "~/x",
        "`id`",
        "$(id)",
    ):
        assert read(json.dumps(text)) == text


def test_comments_a_document_start_and_a_bom_are_allowed():
    assert recipe.loads(f"\ufeff# one\n---\n# two\n{VERSION_1}...\n# %three\n".encode()) == STEPS_1
    assert recipe.loads(VERSION_1.replace("\n", "\r\n")) == STEPS_1


# ------------------------------------------------------------------------------------------ refused

AT = "recipe:5: "
# (what it is called, the value of one option in line 5, the message)
HOSTILE_VALUES = [
    ("python object", "!!python/object/apply:os.system ['touch MARKER']",
     AT + "holds the tag 'tag:yaml.org,2002:python/object/apply:os.system'; write plain data"),
    ("python new", "!!python/object/new:os.system ['touch MARKER']",
     AT + "holds the tag 'tag:yaml.org,2002:python/object/new:os.system'; write plain data"),
    ("python object with state", "!!python/object:prepare_hostile.Thing {a: 1}",
     AT + "holds the tag 'tag:yaml.org,2002:python/object:prepare_hostile.Thing'; write plain data"),
    ("python name", "!!python/name:os.system ''",
     AT + "holds the tag 'tag:yaml.org,2002:python/name:os.system'; write plain data"),
    ("python module", "!!python/module:prepare_hostile ''",
     AT + "holds the tag 'tag:yaml.org,2002:python/module:prepare_hostile'; write plain data"),
    ("python tuple", "!!python/tuple [1]",
     AT + "holds the tag 'tag:yaml.org,2002:python/tuple'; write plain data"),
    ("own tag", "!include MARKER", AT + "holds the tag '!include'; write plain data"),
    ("verbatim tag", "!<tag:yaml.org,2002:python/name:os.system> x",
     AT + "holds the tag 'tag:yaml.org,2002:python/name:os.system'; write plain data"),
    ("harmless tag", "!!str 1", AT + "holds the tag 'tag:yaml.org,2002:str'; write plain data"),
    ("bare tag", "! 1", AT + "holds the tag '!'; write plain data"),
    ("binary tag", "!!binary aGk=", AT + "holds the tag 'tag:yaml.org,2002:binary'; write plain data"),
    ("set tag", "!!set {a, b}", AT + "holds the tag 'tag:yaml.org,2002:set'; write plain data"),
    ("deep tag", "[[[!!python/name:os.system x]]]",
     AT + "holds the tag 'tag:yaml.org,2002:python/name:os.system'; write plain data"),
    ("tag on a key", "{!!python/name:os.system x: 1}",
     AT + "holds the tag 'tag:yaml.org,2002:python/name:os.system'; write plain data"),
    ("anchor", "&a [1]", AT + "holds the anchor '&a'; remove it"),
    ("alias", "*a", AT + "holds the alias '*a'; repeat the value"),
    ("long anchor", "&" + "a" * 500_000 + " x", AT + "holds the anchor '&" + "a" * 59 + "'...; remove it"),
    ("alias bomb", "[&a [x,x,x,x,x,x,x,x,x], &b [*a,*a,*a,*a,*a,*a,*a], &c [*b,*b,*b,*b,*b,*b]]",
     AT + "holds the anchor '&a'; remove it"),
    ("endless alias", "&a [*a]", AT + "holds the anchor '&a'; remove it"),
    ("merge key", "{<<: {a: 1}}", AT + "holds the merge key '<<'; remove it"),
    ("quoted merge key", "{'<<': {a: 1}}", AT + "holds the merge key '<<'; remove it"),
    ("target", "{_target_: os.system, command: touch MARKER}",
     AT + "holds the key '_target_': no key of a recipe begins with '_'; remove it"),
    ("escaped target", '{"\\x5ftarget_": os.system}',
     AT + "holds the key '_target_': no key of a recipe begins with '_'; remove it"),
    ("partial", "{_partial_: true}",
     AT + "holds the key '_partial_': no key of a recipe begins with '_'; remove it"),
    ("environment", "${oc.env:HOME}", AT + "holds '${' in '${oc.env:HOME}'; write the value itself"),
    ("quoted environment", "'x ${oc.env:HOME}'",
     AT + "holds '${' in 'x ${oc.env:HOME}'; write the value itself"),
    ("escaped interpolation", '"\\x24\\x7boc.env:HOME}"',
     AT + "holds '${' in '${oc.env:HOME}'; write the value itself"),
    ("folded interpolation", '"$\\\n      {oc.env:HOME}"',
     AT + "holds '${' in '${oc.env:HOME}'; write the value itself"),
    ("block interpolation", "|\n      ${oc.env:HOME}\n",
     AT + "holds '${' in '${oc.env:HOME}\\n'; write the value itself"),
    ("interpolation in a key", "{'${a}': 1}", AT + "holds '${' in '${a}'; write the value itself"),
    ("same key twice", "{a: 1,\n      b: 2, 'a': 3}",
     "recipe:6: holds the key 'a' again, first in line 5; keep one of them"),
    ("number as key", "{1: a}", AT + "holds the key '1', which is a number; put quotes around it"),
    ("null as key", "{~: a}", AT + "holds the key '~', which is null; put quotes around it"),
    ("truth as key", "{true: a}", AT + "holds the key 'true', which is true; put quotes around it"),
    ("no key", "{? : a}", AT + "holds the key '', which is null; put quotes around it"),
    ("list as key", "{? [a] : b}", AT + "holds a key that is a list or a mapping; use a string as the key"),
    ("mapping as key", "{? {a: b} : c}",
     AT + "holds a key that is a list or a mapping; use a string as the key"),
    ("33 levels", "[" * 30 + "]" * 30, AT + "is more than 32 levels deep; nest less"),
    ("a million brackets", "[" * 1_000_000, AT + "is more than 32 levels deep; nest less"),
    ("a million braces", "{" * 1_000_000,
     AT + "holds a key that is a list or a mapping; use a string as the key"),
    ("half a million mappings", "{a: " * 250_000, AT + "is more than 32 levels deep; nest less"),
    ("half a million dashes", "\n      " + "- " * 500_000, "recipe:6: is more than 32 levels deep; nest less"),
    ("half a million question marks", "\n      " + "? " * 500_000,
     "recipe:6: holds a key that is a list or a mapping; use a string as the key"),
    ("half a million values", "[" + "1," * 500_000 + "]",
     AT + "is past the first 5,000 keys and values; use patterns in place of lists of names"),
    ("many keys", "{" + ",".join(f"a{i}: 1" for i in range(90_000)) + "}",
     AT + "is past the first 5,000 keys and values; use patterns in place of lists of names"),
    ("raw NUL", "a\0b", AT + "holds the character U+0000; remove it, or escape it in double quotes"),
    ("raw escape", "\x1b[31m", AT + "holds the character U+001B; remove it, or escape it in double quotes"),
    ("line separator", "a\u2028b", AT + "holds the character U+2028; remove it, or escape it in double quotes"),
    ("inner byte order mark", "\ufeff",
     AT + "holds the character U+FEFF; remove it, or escape it in double quotes"),
    ("raw surrogate", "\ud800", AT + "holds the character U+D800; remove it, or escape it in double quotes"),
    ("character out of range", '"\\U00110000"',
     AT + "is not YAML: found invalid Unicode character escape code; correct it there"),
    ("huge number", "9" * 1_000_000, AT + "holds '" + "9" * 60 + "'..., which has more than 64 bits; "
     "write it another way, or in quotes if it is text"),
    ("second document", "a\n---\nformat: prepare.recipe",
     "recipe:6: holds a second document; give each recipe a file of its own"),
    ("second empty document", "a\n---\n", "recipe:6: holds a second document; give each recipe a file of its own"),
    ("open bracket", "[a", "recipe:6: is not YAML: did not find expected ',' or ']'; correct it there"),
    ("line break in an error", '"\\\ud7ff"',
     AT + "is not YAML: found unknown escape character; correct it there"),
]  # fmt: skip

LOOKS = "a recipe begins with 'format: prepare.recipe'"
BAD_STEP = "write its options as 'option: value', or null to drop the step"
# (what it is called, the whole file, the message)
HOSTILE_FILES = [
    ("nothing", "", f"recipe: is empty; {LOOKS}"),
    ("only comments", "# a\n# b\n", f"recipe: is empty; {LOOKS}"),
    ("null", "---\n", f"recipe: is null, not a mapping; {LOOKS}"),
    ("a word", "half", f"recipe: is a string, not a mapping; {LOOKS}"),
    ("a list", "- half", f"recipe: is a list, not a mapping; {LOOKS}"),
    ("over 1 MiB", "#" * (1 << 20) + "\n",
     "recipe: is larger than 1,048,576 bytes; use patterns in place of lists of names"),
    ("over 1 MiB of UTF-8", "# " + "é" * (1 << 19),
     "recipe: is larger than 1,048,576 bytes; use patterns in place of lists of names"),
    ("not UTF-8", b"format: x\n\xff\xfe", "recipe:2: is not UTF-8; save it as UTF-8"),
    ("UTF-16", VERSION_1.encode("utf-16"), "recipe:1: is not UTF-8; save it as UTF-8"),
    ("version directive", "%YAML 1.2\n---\n" + VERSION_1, "recipe:1: holds a directive (%); remove it"),
    ("tag directive", "# x\n%TAG !! tag:evil,2000:\n---\n" + VERSION_1,
     "recipe:2: holds a directive (%); remove it"),
    ("unknown directive", "%EVAL x\n---\n" + VERSION_1,
     "recipe:1: is not YAML: found unknown directive name; correct it there"),
    ("huge version directive", "%YAML " + "9" * 5000 + ".1\n---\n" + VERSION_1,
     "recipe:1: is not YAML: found extremely long version number; correct it there"),
    ("no header", "steps: {}",
     ("recipe: the key 'format' is missing; add 'format: prepare.recipe'\n"
     "recipe: the key 'version' is missing; add 'version: 1'")),
    ("no steps", "format: prepare.recipe\nversion: 1\n",
     "recipe: the key 'steps' is missing; add 'steps: {name: {option: value}}'"),
    ("misspelt key", "format: prepare.recipe\nversion: 1\nstep: {}\n",
     "recipe:3: unknown key 'step'; did you mean 'steps'? allowed: format, version, steps"),
    ("further key", VERSION_1 + "hooks: {a: b}\n",
     "recipe:17: unknown key 'hooks'; allowed: format, version, steps"),
    ("other format", "format: prepare.audit\nversion: 1\nsteps: {}\n",
     "recipe:1: the format is 'prepare.audit', not 'prepare.recipe'; write 'format: prepare.recipe'"),
    ("newer version", "format: prepare.recipe\nversion: 2\nstages: []\n",
     "recipe:2: has version 2, and this prepare reads version 1; upgrade prepare"),
    ("version 0", "format: prepare.recipe\nversion: 0\nsteps: {}\n",
     "recipe:2: the version is 0, not 1; write 'version: 1'"),
    ("version as text", "format: prepare.recipe\nversion: '1'\nsteps: {}\n",
     "recipe:2: the version is '1', not 1; write 'version: 1'"),
    ("version as float", "format: prepare.recipe\nversion: 1.0\nsteps: {}\n",
     "recipe:2: the version is 1.0, not 1; write 'version: 1'"),
    ("version true", "format: prepare.recipe\nversion: true\nsteps: {}\n",
     "recipe:2: the version is True, not 1; write 'version: 1'"),
    ("steps null", "format: prepare.recipe\nversion: 1\nsteps:\n",
     "recipe:3: 'steps' is null, not a mapping; write 'steps: {name: {option: value}}'"),
    ("steps a list", "format: prepare.recipe\nversion: 1\nsteps: [half]\n",
     "recipe:3: 'steps' is a list, not a mapping; write 'steps: {name: {option: value}}'"),
    ("steps that are not mappings", HEAD + "  half: bfloat16\n  device: [cpu]\n  x: {}\n",
     f"recipe:4: the step 'half' is a string; {BAD_STEP}\nrecipe:5: the step 'device' is a list; {BAD_STEP}"),
    ("everything wrong", "format: 3\nverison: 1\nsteps: 1\n",
     ("recipe:2: unknown key 'verison'; did you mean 'version'? allowed: format, version, steps\n"
     "recipe:1: the format is 3, not 'prepare.recipe'; write 'format: prepare.recipe'\n"
     "recipe:3: 'steps' is a number, not a mapping; write 'steps: {name: {option: value}}'")),
    ("the same step twice", HEAD + "  half: {}\n  device: {}\n  half: {}\n",
     "recipe:6: holds the key 'half' again, first in line 4; keep one of them"),
    ("a whole configuration", "defaults:\n- _self_\n_target_: os.system\n",
     "recipe:3: holds the key '_target_': no key of a recipe begins with '_'; remove it"),
    ("tabs", "format: prepare.recipe\n\tversion: 1\n",
     "recipe:2: is not YAML: found a tab character that violates indentation; correct it there"),
]  # fmt: skip

HOSTILE = [(name, option(text), message) for name, text, message in HOSTILE_VALUES] + HOSTILE_FILES


def refusal(data: str | bytes) -> RecipeError:
    with pytest.raises(RecipeError) as raised:
        recipe.loads(data)
    return raised.value


@pytest.mark.parametrize(("data", "message"), [c[1:] for c in HOSTILE], ids=[c[0] for c in HOSTILE])
def test_a_hostile_recipe_is_refused_in_plain_words_and_nothing_runs(
    data, message, tmp_path, monkeypatch
):
    (tmp_path / "prepare_hostile.py").write_text("open('MARKER', 'w').close()\nclass Thing: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    modules, environment = set(sys.modules), dict(os.environ)
    with WATCH:
        error = refusal(data)
    assert str(error) == message
    assert isinstance(error, ConfigError)
    assert WATCH.seen == []
    assert set(sys.modules) == modules
    assert dict(os.environ) == environment
    assert not (tmp_path / "MARKER").exists()


def test_the_watch_sees_what_a_careless_loader_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with WATCH:
        yaml.unsafe_load("!!python/object/apply:os.system ['touch MARKER']")
    assert "os.system" in {event for event, _ in WATCH.seen}
    assert (tmp_path / "MARKER").exists()


@pytest.mark.slow
def test_every_hostile_recipe_is_refused_within_50_milliseconds():
    assert len(HOSTILE) >= 40
    too_slow = {}
    for name, data, _ in HOSTILE:
        # The least of several: other processes of the machine must not count.
        best = min(seconds_to_refuse(data) for _ in range(5))
        if best > 0.05:
            too_slow[name] = best
    assert too_slow == {}


def seconds_to_refuse(data: str | bytes) -> float:
    begin = time.process_time()
    refusal(data)
    return time.process_time() - begin


def test_32_levels_are_read_and_written():
    text = option("[" * 29 + "]" * 29)
    steps = recipe.loads(text)
    assert recipe.loads(recipe.dumps(steps)) == steps


def test_5000_keys_and_values_are_read_and_written():
    # The document, three keys with their values, and two more keys with theirs: eleven.
    steps = {"half": {"keep": ["a"] * 4989}}
    assert recipe.loads(recipe.dumps(steps)) == steps
    refusal(option("[" + "a," * 4990 + "]"))


def test_no_more_than_twenty_mistakes_are_listed():
    steps = "".join(f"  step{index}: []\n" for index in range(100))
    assert len(refusal(HEAD + steps).problems) == 20


def test_without_libyaml_the_same_is_read_and_refused(monkeypatch):
    monkeypatch.setattr(plain_yaml, "_FAST", None)
    assert recipe.loads(VERSION_1) == STEPS_1
    for name, data, _ in HOSTILE:
        error = refusal(data)
        assert str(error).startswith("recipe"), name
        assert all(map(str.isprintable, str(error).split("\n"))), name
    with pytest.raises(RecipeError, match="larger than 65,536 bytes; install PyYAML with libyaml"):
        recipe.loads(VERSION_1 + "#" * 65_536)


# ------------------------------------------------------------------------------------------ writing

TEXTS = ["", " ", "a b", "a\n", "\n", "\r\n", "\ttab", "yes", "On", "null", "NaN", "~", "1", "1.5", "-", "- a",
         "a: b", "a #b", "#a", "'", '"', "\\", "\\ud800", "\\\\", "é", "日本", "😀", "\0", "\x1b[31m", "\x7f",
         "\x85", "\u2028", "\ufeff", "\ufffe", "\uffff", "\ud800", "\udc80", "\ud83d\ude00", "%a", "@a", "`a",
         "---", "...", "{a}", "[a]", "&a", "*a", "!a", "|", ">", "?", "? a", ":", "a:", "a" * 5000, "0o17",
         "0x1f", "010", "1e5", ".5", "_a", "<<", "=", "$", "{", "$ {", "re:.*", "type:Conv3d", "=1+1", "[red]",
         "<script>"]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_any_string_comes_back_as_value_as_item_and_as_key(text):
    steps = {
        "a": {"b": text, "c": [text, [text]], "d": {f"k{text}": text, "e": {f"k{text}": [text]}}}
    }
    written = recipe.dumps(steps)
    assert recipe.loads(written) == steps
    assert recipe.loads(written.encode()) == steps
    assert written.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "text", [t for t in TEXTS if not any(0xD800 <= ord(c) < 0xE000 for c in t)], ids=ascii
)
def test_other_readers_of_yaml_find_the_same_strings(text):
    steps = {"a": {"b": text, "c": [text]}}
    assert yaml.safe_load(recipe.dumps(steps))["steps"] == steps


@pytest.mark.parametrize("number", [1e-5, -1e22, 1.5e300, 5e-324, 1e16, 0.1, -0.0, 3.0])
def test_floats_come_back_as_floats_from_here_and_from_other_readers(number):
    text = recipe.dumps({"a": {"b": number}})
    assert repr(recipe.loads(text)["a"]["b"]) == repr(number)
    assert repr(yaml.safe_load(text)["steps"]["a"]["b"]) == repr(number)


def test_an_escaped_backslash_before_u_is_not_a_surrogate():
    steps = {"a": {"b": "\\ud800" * 20_000}}
    assert recipe.loads(recipe.dumps(steps)) == steps


def values() -> st.SearchStrategy:
    text = st.text(st.characters(codec=None)).filter(lambda text: "${" not in text)
    key = text.filter(lambda text: not text.startswith("_") and text != "<<")
    number = st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(
        allow_nan=False, allow_infinity=False
    )
    return st.recursive(
        st.none() | st.booleans() | number | text,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(key, inner, max_size=4),
        max_leaves=20,
    )


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(st.dictionaries(st.text().filter(lambda t: t[:1] != "_" and t != "<<" and "${" not in t),
                       st.none() | st.dictionaries(st.sampled_from("abcdef"), values()), max_size=4))  # fmt: skip
def test_what_is_written_is_read_back_exactly(steps):
    text = recipe.dumps(steps)
    again = recipe.loads(text)
    assert repr(again) == repr(steps)
    assert recipe.dumps(again) == text


class Thing:
    def __repr__(self) -> str:
        raise AssertionError("a value is not to be asked for its text")


ALLOWED = "use null, true, false, finite numbers, strings, lists and dicts"


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (None, "steps: 'steps' is null, not a mapping; write 'steps: {name: {option: value}}'"),
        ([], "steps: 'steps' is a list, not a mapping; write 'steps: {name: {option: value}}'"),
        ({"half": ["a"]}, f"steps.half: the step 'half' is a list; {BAD_STEP}"),
        ({"a b": True}, f"steps.'a b': the step 'a b' is true; {BAD_STEP}"),
        ({3: {}}, "steps: holds a key that is a number; use strings"),
        ({10**5000: []}, "steps: holds a key that is a number; use strings"),
        ({Thing(): []}, "steps: holds a key that is of type Thing; use strings"),
        ({"half": {"keep": ["a", Thing()]}}, f"steps.half.keep[1]: is of type Thing; {ALLOWED}"),
        ({"half": {"keep": ("a",)}}, f"steps.half.keep: is of type tuple; {ALLOWED}"),
        ({"half": {"keep": {"a"}}}, f"steps.half.keep: is of type set; {ALLOWED}"),
        ({"half": {"keep": b"a"}}, f"steps.half.keep: is of type bytes; {ALLOWED}"),
        ({"half": {"keep": 1j}}, f"steps.half.keep: is of type complex; {ALLOWED}"),
        ({"half": {"keep": math.nan}}, f"steps.half.keep: is not finite; {ALLOWED}"),
        ({"half": {"keep": [{"x": -math.inf}]}}, f"steps.half.keep[0].x: is not finite; {ALLOWED}"),
        ({"half": {"keep": 1 << 64}}, f"steps.half.keep: has more than 64 bits; {ALLOWED}"),
        ({"half": {"keep": 10**5000}}, f"steps.half.keep: has more than 64 bits; {ALLOWED}"),
        ({"half": {"keep": "${a}"}}, f"steps.half.keep: holds '${{' in '${{a}}'; {ALLOWED}"),
        ({"half": {"${a}": 1}}, f"steps.half.'${{a}}': holds '${{' in '${{a}}'; {ALLOWED}"),
        ({"half": {"_x": 1}}, "steps.half: holds the key '_x': no key of a recipe begins with '_'; rename it"),
        ({"half": {"<<": {}}}, "steps.half: holds the merge key '<<'; rename it"),
        ({"half": {None: 1}}, "steps.half: holds a key that is null; use strings"),
        ({"half": {"keep": ["a"] * 5000}},
         "steps.half.keep[4989]: is past the first 5,000 keys and values; use patterns in place of lists of names"),
        ({"half": {"keep": "a" * (1 << 20)}},
         "steps: would be larger than 1,048,576 bytes; use patterns in place of lists of names"),
        ({"half": {"keep": "\ud800" * (1 << 14)}},
         "steps: would be larger than 65,536 bytes; remove the escaped surrogates"),
    ],
)  # fmt: skip
def test_what_is_not_plain_data_is_refused_by_its_path(steps, message):
    with pytest.raises(RecipeError) as raised:
        recipe.dumps(steps)
    assert str(raised.value) == message


def test_a_list_that_holds_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(
        RecipeError, match=r"steps\.a\.b\[0\].*: is more than 32 levels deep; nest less"
    ):
        recipe.dumps({"a": {"b": loop}})
    loop *= 3
    with pytest.raises(RecipeError, match="is more than 32 levels deep"):
        recipe.dumps({"a": {"b": loop}})


def test_a_recipe_that_could_not_be_written_again_is_refused():
    text = HEAD + "  a: {b: '" + "\\" * 600_000 + "'}\n"
    assert str(refusal(text)) == (
        "recipe: would be larger than 1,048,576 bytes; use patterns in place of lists of names"
    )


# -------------------------------------------------------------------------------------------- files


def test_a_recipe_is_saved_and_loaded(tmp_path):
    path = tmp_path / "recipe.yaml"
    recipe.save(path, STEPS_1)
    assert path.read_text() == VERSION_1
    assert recipe.load(path) == STEPS_1
    assert recipe.load(str(path)) == STEPS_1


def test_an_error_names_the_file_and_the_line(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(option("*a"))
    with pytest.raises(RecipeError) as raised:
        recipe.load(path)
    assert raised.value.problems[0].where == f"{path}:5"


def test_steps_that_cannot_be_written_leave_the_old_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    recipe.save(path, {})
    with pytest.raises(RecipeError):
        recipe.save(path, {"a": {"b": Thing()}})
    assert path.read_text() == "format: prepare.recipe\nversion: 1\nsteps: {}\n"
    assert [found.name for found in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_missing_recipe_is_an_error_with_the_nearest_name(tmp_path):
    recipe.save(tmp_path / "recipe.yaml", {})
    with pytest.raises(RecipeError) as raised:
        recipe.load(tmp_path / "recpie.yaml")
    assert str(raised.value) == (
        f"{tmp_path}/recpie.yaml: cannot be read: No such file or directory; "
        f"did you mean {tmp_path}/recipe.yaml?"
    )


def test_a_huge_file_is_refused_without_being_read(tmp_path):
    path = tmp_path / "huge.yaml"
    path.touch()
    os.truncate(path, 100_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(
            RecipeError, match="is larger than 1,048,576 bytes; give a smaller file"
        ):
            recipe.load(path)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


# --------------------------------------------------------------------------------------------- fuzz


def fuzz(*arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, str(FUZZ), *arguments], capture_output=True, text=True, check=False,
        cwd=FUZZ.parents[2], env={**os.environ, "PYTHONPATH": str(FUZZ.parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def right(result: dict, cases: int) -> None:
    sys.stdout.write(f"{result}\n")  # `pytest -rP` shows it
    assert result["cases"] >= cases
    assert result["accepted"] > 0.1 * cases
    assert result["refused"] > 0.1 * cases
    assert result["extra_mb"] < 200
    assert result["extra_mb"] > 0 or sys.platform != "linux"  # else it measured nothing


def test_any_bytes_are_refused_or_round_trip():
    right(fuzz("--cases", "3000", "--seed", "1", "--big", "25"), 3000)


def test_any_bytes_are_refused_or_round_trip_without_libyaml():
    right(fuzz("--cases", "400", "--seed", "2", "--big", "60", "--slow-parser"), 400)


@pytest.mark.slow
def test_a_hundred_thousand_cases_are_refused_or_round_trip():
    right(fuzz("--cases", "100000", "--seed", "3"), 100_000)


@pytest.mark.slow
def test_ten_thousand_cases_are_refused_or_round_trip_without_libyaml():
    right(fuzz("--cases", "10000", "--seed", "4", "--slow-parser"), 10_000)
