"""Every option of every group composes."""

import pytest

from paths import CONF
from prepare.app.cli.hydra_app import problems_of
from prepare.app.job.settings import ADDED_GROUP, group_names
from words import composing


@pytest.fixture(scope="module")
def compose():
    with composing() as compose:
        yield compose


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
