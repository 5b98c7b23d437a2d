"""Recipes that are written: read back exactly, what is not plain data, files."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prepare import recipe
from prepare.errors import RecipeError
from recipe_checks import option

TEXTS = ["", " ", "a b", "a\n", "\n", "\r\n", "\ttab", "yes", "On", "null", "NaN", "~", "1", "1.5", "-", "- a",
         "a: b", "a #b", "#a", "'", '"', "\\", "\\ud800", "\\\\", "é", "日本", "😀", "\0", "\x1b[31m", "\x7f",
         "\x85", "\u2028", "\ufeff", "\ufffe", "\uffff", "%a", "@a", "`a",
         "---", "...", "{a}", "[a]", "&a", "*a", "!a", "|", ">", "?", "? a", ":", "a:", "a" * 5000, "0o17",
         "0x1f", "010", "1e5", ".5", "_a", "<<", "=", "$", "{", "$ {", "re:.*", "type:Conv3d", "=1+1", "[red]",
         "<script>"]  # fmt: skip


def values() -> st.SearchStrategy:
    text = st.text(st.characters(codec="utf-8")).filter(lambda text: "${" not in text)
    text |= st.sampled_from(TEXTS)
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
@given(st.dictionaries(st.text(st.characters(codec="utf-8")).filter(lambda t: t[:1] != "_" and t != "<<" and "${" not in t),
                       st.none() | st.dictionaries(st.sampled_from("abcdef"), values()), max_size=4))  # fmt: skip
def test_what_is_written_is_read_back_exactly(steps):
    text = recipe.dumps(steps)
    again = recipe.loads(text)
    assert repr(again) == repr(steps)
    assert recipe.dumps(again) == text


class Thing:
    def __repr__(self) -> str:
        raise AssertionError("a value is not to be asked for its text")


@pytest.mark.parametrize(
    ("steps", "where", "wrong"),
    [
        (None, "steps", "null"),
        ({"half": ["a"]}, "steps.half", "list"),
        ({"a b": True}, "steps.'a b'", "true"),
        ({10**5000: []}, "steps", "plain data"),
        ({Thing(): []}, "steps", "plain data"),
        ({"half": {"keep": ["a", Thing()]}}, "steps", "plain data"),
        ({"half": {"keep": ("a",)}}, "steps", "plain data"),
        ({"half": {"keep": [{"x": -math.inf}]}}, "steps.half.keep[0].x", "inf"),
        ({"half": {"keep": 1 << 64}}, "steps.half.keep", "64 bits"),
        ({"half": {"keep": "${a}"}}, "steps.half.keep", "'${'"),
        ({"half": {"${a}": 1}}, "steps.half", "'${'"),
        ({"half": {"_x": 1}}, "steps.half", "'_x'"),
        ({"half": {"<<": {}}}, "steps.half", "merge key"),
        ({"half": {None: 1}}, "steps.half", "null"),
        ({"half": {"keep": "a" * (1 << 20)}}, "steps", "1,048,576 bytes"),
    ],
)
def test_what_is_not_plain_data_is_refused_by_its_path(steps, where, wrong):
    with pytest.raises(RecipeError) as raised:
        recipe.dumps(steps)
    (problem,) = raised.value.problems
    assert problem.where == where
    assert wrong in problem.wrong


def test_a_list_that_holds_itself_is_refused():
    loop = []
    loop.append(loop)
    loop *= 3
    with pytest.raises(RecipeError, match="plain data"):
        recipe.dumps({"a": {"b": loop}})


def test_an_error_names_the_file_and_the_line(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(option("*a"))
    with pytest.raises(RecipeError) as raised:
        recipe.load(path)
    assert raised.value.problems[0].where == f"{path}:5"
