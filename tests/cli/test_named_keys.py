"""Every option composes, and every key that a message names exists, on the command line or in Python.

Hydra stays initialized for it, which no job here may share.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch

import prepare
from paths import CONF
from prepare import checkpoint
from prepare.app.cli.configuration import problems_of
from prepare.app.job.settings import ADDED_GROUP, group_names
from prepare.pipeline import Pipeline
from prepare.registry import STEPS
from prepare.stages import bench, tune, verify
from words import composing

PACKAGE = Path(prepare.__file__).parent
NAMED = re.compile(r"(?<![\w.$-])[+~]?([a-z_]+(?:[./][A-Za-z_]+)*)=(?!=)")
# Words that stand for any key, and words that are not ours.
ANY = {"key", "steps.NAME", "steps.NAME.OPTION", "hydra.callbacks.NAME"}
# Words of HTML, the shell, Hydra, a regular expression and torch.
OTHERS = {"class", "type", "install", "_target_", "bmodel", "bias"}
# Arguments of prepare.frameworks, whose packages may be missing.
OTHERS |= {"module", "network"}
# An argument of torch.load, whose signature has it by position only.
OTHERS |= {"weights_only"}
# Our group in another Hydra application.
OTHERS |= {"prepare/steps"}
# Python functions whose arguments messages name.
FUNCTIONS = (
    *(checkpoint.load, checkpoint.save, verify.verify, tune.tune, bench.compare, Pipeline.apply),
    *(Pipeline.load, torch.nn.Module.load_state_dict, torch.optim.Optimizer.zero_grad),
)


@pytest.fixture(scope="module")
def compose():
    with composing() as compose:
        yield compose


@pytest.fixture(scope="module")
def keys(compose):
    """Every key of a configuration, with those of a step that may be added."""
    found = {f"steps.{name}" for name in STEPS}
    found |= {
        f"steps.{name}.{key}" for name in STEPS for key in STEPS[name].from_options({}).to_options()
    }
    nested(compose("model=unet3d", "memfmt=channels_last"), "", found)
    more = {
        "experiment",
        "memfmt",
        "precision",
        "device",
        "model._target_",
        "hydra/launcher",
        "hydra/sweeper",
    }
    return found | more


def nested(node, path, found):
    for key in node:
        where = f"{path}{key}"
        found.add(where)
        value = node._get_node(key)
        if hasattr(value, "_get_node") and hasattr(value, "keys") and not value._is_none():
            nested(value, f"{where}.", found)


@pytest.fixture(scope="module")
def arguments():
    return {name for function in FUNCTIONS for name in inspect.signature(function).parameters}


def texts():
    """Every text of the package that is not a docstring: its place, and whether it is Python's only."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings, in_python, in_cli = set(), set(), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                docstrings.add(id(node.value))
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "words":
                for keyword in node.keywords:
                    inner = {id(child) for child in ast.walk(keyword.value)}
                    (in_python if keyword.arg == "python" else in_cli).update(inner)
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and id(node) not in docstrings:
                caller = "python" if id(node) in in_python else "cli" if id(node) in in_cli else ""
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", caller, node.value


def unknown(key, caller, keys, arguments):
    if key in ANY or key in OTHERS:
        return False
    deeper_only = any(each.rpartition(".")[2] == key for each in keys) and key not in keys
    if caller == "python":
        return key not in arguments
    if caller == "cli" or deeper_only:
        return key not in keys
    return key not in keys and key not in arguments


def test_every_key_that_a_text_names_exists(keys, arguments):
    named = [(place, caller, key) for place, caller, text in texts() for key in NAMED.findall(text)]
    assert len(named) > 60
    wrong = [row for row in named if unknown(row[2], row[1], keys, arguments)]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize(
    ("key", "caller"),
    [
        ("budget", ""),
        ("budget", "cli"),
        ("tune.budget", "python"),
        ("tune.seconds", ""),
        ("high", ""),
    ],
)
def test_a_key_that_its_caller_cannot_give_is_found(key, caller, keys, arguments):
    assert unknown(key, caller, keys, arguments)


# Models are many and alike: the quick tier has a few of them.
OPTIONS = [
    pytest.param(
        group, path.stem, marks=[pytest.mark.slow] * (group == "model" and bool(number % 6))
    )
    for group in group_names()
    for number, path in enumerate(sorted(CONF.glob(f"{group}/*.yaml")))
]


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_of_every_group_composes_without_a_mistake(compose, group, option):
    added = "+" if group == ADDED_GROUP else ""
    overrides = [f"{added}{group}={option}"]
    if group not in ("model", ADDED_GROUP):
        overrides.insert(0, "model=unet3d")
    if option == "custom":
        overrides.append("model._target_=my_package.nets.build")
    assert problems_of(compose(*overrides)) == []
