"""Rows of a made-up sweep, and the texts that a terminal shows of them."""

import pytest

from prepare.app.report.terminal.sweep import show_summary


def row(*overrides, **found):
    return {"overrides": ["model=unet3d", *overrides], **found}


def out_of(capsys, summary, width=200):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        show_summary(summary)
    return capsys.readouterr().out
