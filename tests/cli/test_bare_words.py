"""The bare words diff and steps, and the help."""

import re

from prepare.app.cli.commands import COMMANDS
from prepare.app.job.settings import key_names
from prepare.registry import STEPS
from prepare.stages.stage import tasks
from words import NET, SMALL

GROUPS = ("model", "device", "precision", "memfmt", "input")


def test_diff_says_what_differs_between_two_runs(go):
    one = go(NET, SMALL, "memfmt=contiguous").folder
    other = go(NET, SMALL, "memfmt=channels_last").folder
    assert go("diff", str(one), str(one))[:2] == (0, "no difference\n")
    audits = go("diff", str(one / "audit.json"), str(other / "audit.json"))
    assert audits.code == 0
    assert re.search(r"convs\.0\.weight +stride \[27,9,3,1\].* +stride \[27,1,9,3\]", audits.out)
    assert audits.out.endswith("1 difference\n")
    runs = go("diff", str(one), str(other))
    assert runs.code == 0
    assert re.search(r"convs\.0\.weight +stride \[27,9,3,1\].* +stride \[27,1,9,3\]", runs.out)
    assert re.search(r"memfmt +contiguous +channels_last\n", runs.out)


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
