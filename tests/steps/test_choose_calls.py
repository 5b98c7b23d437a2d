"""The calls to replace: those at the lines of the breaks, if the flow is better with them."""

import torch
from torch import nn

from keeping_nets import LAST, Purposeful, chunked, folding, image, video
from prepare.steps.keeping.calls import choose_calls, cost_of
from small_nets import facts


def chosen(model, x=None):
    return choose_calls(model, video() if x is None else x)


def test_the_calls_at_the_breaks_are_chosen_and_remove_them():
    choice = chosen(chunked())
    assert {call.operator for call in choice.calls} == {"pad", "cat"}
    assert choice.before.summary["breaks"] > 0
    assert cost_of(choice.after) == (0, 0)


def test_choosing_changes_nothing():
    model = chunked()
    before = facts(model)
    chosen(model)
    assert facts(model) == before


class Hidden(nn.Module):
    """A break that is there only once another one is mended."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(3, 8, 3, padding=1)

    def forward(self, x):
        x = self.conv(x).contiguous()
        return x.repeat(1, 2, 1, 1, 1)


def test_breaks_behind_others_are_found():
    torch.manual_seed(0)
    choice = chosen(Hidden().to(memory_format=LAST))
    assert [call.operator for call in choice.calls] == ["contiguous", "repeat"]
    assert choice.after.summary["breaks"] == 0


def test_a_contiguous_that_the_code_needs_is_not_chosen():
    torch.manual_seed(0)
    choice = chosen(Purposeful().to(memory_format=LAST))
    assert choice.before.summary["breaks"] == 1
    assert choice.names == ()


def test_a_contiguous_and_the_view_that_needs_it_are_chosen_together():
    choice = chosen(folding(), image())
    assert choice.before.summary["breaks"] == 3
    assert choice.after.summary["breaks"] == 0
    operators = [call.operator for call in choice.calls]
    assert sorted(operators) == ["contiguous", "flatten", "rearrange", "view", "view"]


def test_a_flow_that_cannot_be_predicted_chooses_nothing():
    class Branching(nn.Module):
        def forward(self, x):
            return x if x.max() > 0 else torch.cat([x])

    choice = chosen(Branching())
    assert choice.names == ()
    assert choice.before.status == "cannot predict"
