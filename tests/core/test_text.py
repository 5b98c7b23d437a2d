"""Texts for users, made from others."""

import pytest

from prepare.core.utils.text import capitalized


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("not timed", "Not timed"),
        ("torch_export pass: model.pt2", "torch_export pass: model.pt2"),
        ("memfmt=channels_last is 2x faster", "memfmt=channels_last is 2x faster"),
        ("add +steps.half={}", "Add +steps.half={}"),
        ("", ""),
    ],
)
def test_a_sentence_gets_a_capital_unless_it_begins_with_a_name(text, shown):
    assert capitalized(text) == shown
