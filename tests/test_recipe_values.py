"""Values of a recipe: what is read, and that it means the same on the command line."""

import json

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from prepare import recipe
from prepare.errors import RecipeError
from recipe_checks import STEPS_1, VERSION_1, option


def read(text: str) -> object:
    return recipe.loads(option(text))["half"]["keep"]


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
