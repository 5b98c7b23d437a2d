"""The words of steps, options and arguments: those of the command line, and those of Python."""

import pytest

from prepare.core.utils import wording

WORDS = [
    (lambda: wording.step("half"), "+steps.half={}", '"half": {}'),
    (
        lambda: wording.step("repair_layout", force=True, include=["a"]),
        "+steps.repair_layout={force:true,include:[a]}",
        '"repair_layout": {"force": True, "include": ["a"]}',
    ),
    (
        lambda: wording.option("half", "keep", ["norms", "head"]),
        "steps.half.keep=[norms,head]",
        '"half": {"keep": ["norms", "head"]}',
    ),
    (
        lambda: wording.option("half", "keep", [...]),
        "steps.half.keep=[...]",
        '"half": {"keep": [...]}',
    ),
    (lambda: wording.dropped("compile"), "steps.compile=null", '"compile": None'),
    (lambda: wording.argument("verify", None), "verify=null", "verify=None"),
    (lambda: wording.argument("bench", "full"), "bench=full", 'bench="full"'),
    (wording.inference_mode, "choose mode=eval", "call model.eval() first"),
    (wording.in_training, " (mode=train)", ""),
]


@pytest.mark.parametrize(("write", "cli", "python"), WORDS, ids=[python for *_, python in WORDS])
def test_a_setting_is_written_for_its_user(write, cli, python):
    assert write() == python
    with wording.command_line_words():
        assert write() == cli
    assert write() == python
