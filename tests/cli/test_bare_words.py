"""The bare words diff and steps, and the help."""

import re
import sys

import pytest

from commands import NET, SMALL
from prepare.cli import main as cli
from prepare.cli.commands import COMMANDS
from prepare.registry import STEPS

GROUPS = ("model", "device", "precision", "memfmt", "input", "export")


def test_diff_says_what_differs_between_two_runs(go):
    one = go(NET, SMALL, "memfmt=contiguous").folder
    other = go(NET, SMALL, "memfmt=channels_last").folder
    assert go("diff", str(one), str(one))[:2] == (0, "no difference\n")
    audits = go("diff", str(one / "audit.json"), str(other / "audit.json"))
    assert audits.code == 0
    assert "convs.0.weight: stride [27,9,3,1] -> [27,1,9,3]" in audits.out
    assert audits.out.endswith("1 difference\n")
    runs = go("diff", str(one), str(other))
    assert runs.code == 0
    assert "  convs.0.weight: stride [27,9,3,1] -> [27,1,9,3]" in runs.out
    assert "  memfmt: contiguous -> channels_last" in runs.out


def test_steps_lists_every_step_with_its_options_and_its_card(go):
    ran = go("steps")
    assert ran.code == 0
    for name in STEPS:
        assert re.search(rf"^{name}  \(", ran.out, re.MULTILINE)
        for option in STEPS[name].from_options({}).to_options():
            assert f"steps.{name}.{option}=" in ran.out
    assert "Helps: half the memory" in ran.out


def test_the_help_names_every_group_every_key_and_every_bare_word(go):
    ran = go("--help")
    assert ran.code == 0
    for word in (
        *GROUPS,
        "task=",
        "mode=",
        "amp=",
        "strict=",
        "seed=",
        "plugins=",
        *cli.COMMANDS,
        "unet3d",
        "--multirun",
    ):
        assert word in ran.out
    assert max(map(len, ran.out.splitlines())) <= 110


def test_flags_may_stand_after_the_words(go):
    assert go("model=unet3d", "--cfg", "job", "seed=3").out.count("seed: 3") == 1


def test_the_help_of_one_group_lists_its_options(go):
    ran = go("--help", "memfmt")
    assert ran.code == 0
    assert ran.out.startswith("memfmt: choose one with memfmt=OPTION\n  by_rank ")
    assert "Examples" not in ran.out
    wrong = go("--help", "modle")
    assert wrong.code == 2
    assert "modle: no such group; did you mean 'model'? groups: model, device" in wrong.err


@pytest.mark.parametrize(
    ("called", "command"),
    [
        ("/usr/bin/prepare", "prepare"),
        ("run.py", "python run.py"),
        ("/lib/prepare/__main__.py", "python -m prepare"),
    ],
)
def test_the_help_names_the_command_as_it_was_called(called, command, go, monkeypatch):
    monkeypatch.setattr(sys, "argv", [called])
    out = go("--help").out
    assert f"\n  {command} model=unet3d memfmt=channels_last_3d\n" in out
    commands = [
        row for row in out.splitlines() if row.lstrip().startswith((f"{command} s", f"{command} d"))
    ]
    # Beside the commands stands what each does, in one column.
    assert len({len(row[: row.rindex("  ")]) for row in commands}) == 1, commands


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_is_its_usage(command, go):
    usage, does = go(command, "--help").out.splitlines()
    assert re.match(rf"usage: (python run.py|prepare) {command}\b", usage)
    assert re.match(r"  [A-Z].+\.$", does)
