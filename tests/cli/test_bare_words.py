"""The bare words diff and steps, and the help."""

import re

from prepare.app.cli.commands import COMMANDS
from prepare.app.job.settings import key_names
from prepare.registry import STEPS
from prepare.stages.stage import tasks

GROUPS = ("model", "device", "precision", "memfmt", "input")


def test_steps_lists_every_step_with_its_options_and_its_card(go):
    ran = go("steps")
    assert ran.code == 0
    for name in STEPS:
        assert re.search(rf"^{name}  \(", ran.out, re.MULTILINE)
        for option in STEPS[name].from_options({}).to_options():
            assert f"steps.{name}.{option}=" in ran.out
    assert "Helps: half" in ran.out


def test_the_help_is_one_screen_with_every_group_and_every_task(go):
    ran = go("--help")
    assert ran.code == 0
    assert 30 <= len(ran.out.splitlines()) <= 40
    assert max(map(len, ran.out.splitlines())) <= 110
    words = (*GROUPS, *(f"task={word}" for word in tasks()), *COMMANDS, "--multirun", "unet3d")
    assert [word for word in words if word not in ran.out] == []
    assert "monai_* (6)" in ran.out


def test_the_help_of_every_key_task_and_step_says_something(go):
    for topic in {*key_names(), *tasks(), *STEPS} - {"hydra"}:
        ran = go("--help", topic)
        assert (ran.code, ran.err) == (0, ""), topic
        assert topic in ran.out
        assert "Examples" not in ran.out


def test_the_help_of_one_group_lists_its_options(go):
    ran = go("--help", "memfmt")
    assert ran.code == 0
    assert ran.out.startswith("memfmt: choose one with memfmt=OPTION\n  by_rank ")
    wrong = go("--help", "modle")
    assert wrong.code == 2
    assert wrong.err.startswith(
        "modle: is not a group, task, key or step; did you mean --help model?"
    )
