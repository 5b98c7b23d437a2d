"""Every option of every group composes. Hydra stays initialized for it, which no job here may share."""

import pytest

from paths import CONF
from prepare.cli.compose_config import composing
from prepare.job.settings import group_names


@pytest.fixture(scope="module")
def composer():
    with composing() as composer:
        yield composer


@pytest.mark.parametrize(
    ("group", "option"),
    [
        (group, path.stem)
        for group in group_names()
        for path in sorted(CONF.glob(f"{group}/*.yaml"))
    ],
)
def test_every_option_of_every_group_composes_without_a_mistake(composer, group, option):
    overrides = [f"{group}={option}"] if group == "model" else ["model=unet3d", f"{group}={option}"]
    if option == "custom":
        overrides.append("model._target_=my_package.nets.build")
    if group == "export":
        overrides.append("task=export")
    assert composer.examine([overrides]) == []
