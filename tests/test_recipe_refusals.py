"""Recipes that are refused: the messages, and that nothing of them runs."""

import os
import sys

import pytest
import yaml

from fuzz_recipe import HEAD, Watch
from prepare import recipe
from prepare.core.utils import plain_yaml
from prepare.errors import ConfigError
from recipe_checks import BAD_STEP, STEPS_1, VERSION_1, option, refusal

WATCH = Watch()


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


def test_32_levels_are_read_and_written():
    text = option("[" * 29 + "]" * 29)
    steps = recipe.loads(text)
    assert recipe.loads(recipe.dumps(steps)) == steps


def test_no_more_than_twenty_mistakes_are_listed():
    steps = "".join(f"  step{index}: []\n" for index in range(100))
    assert len(refusal(HEAD + steps).problems) == 20


def test_without_libyaml_the_same_is_read_and_refused(monkeypatch):
    monkeypatch.setattr(plain_yaml, "_FAST", plain_yaml._SLOW)
    assert recipe.loads(VERSION_1) == STEPS_1
    for name, data, _ in HOSTILE:
        if name == "unknown directive":  # only libyaml refuses it; it does nothing
            continue
        error = refusal(data)
        assert str(error).startswith("recipe"), name
        assert all(map(str.isprintable, str(error).split("\n"))), name
    assert recipe.loads(VERSION_1 + "#" * 65_536) == STEPS_1
