"""The calls to replace: those at the lines of the breaks, if the flow is better with them."""

import torch
from torch import nn

from keeping_nets import (
    LAST,
    CallsKernel,
    Purposeful,
    chunked,
    folding,
    image,
    video,
)
from prepare.pipeline import Pipeline
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


def test_calls_are_chosen_again_in_a_model_that_has_them():
    choice, model = chosen(chunked()), chunked()
    Pipeline.from_config({"keep_layout": {"calls": choice.names}}).apply(model)
    again = chosen(model)
    assert again.names == choice.names
    assert again.before.summary["breaks"] == choice.before.summary["breaks"]


class Hidden(nn.Module):
    """A break that is there only once another one is mended."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(3, 8, 3, padding=1)

    def forward(self, x):
        x = self.conv(x).contiguous()
        return torch.softmax(x, 1)


def test_breaks_behind_others_are_found():
    torch.manual_seed(0)
    choice = chosen(Hidden().to(memory_format=LAST))
    assert [call.operator for call in choice.calls] == ["contiguous", "softmax"]
    assert choice.after.summary["breaks"] == 0


def test_a_contiguous_that_the_code_needs_is_not_chosen():
    torch.manual_seed(0)
    choice = chosen(Purposeful().to(memory_format=LAST))
    assert choice.before.summary["breaks"] == 1
    assert choice.names == ()


def test_a_contiguous_before_a_custom_kernel_is_not_chosen():
    torch.manual_seed(0)
    model = CallsKernel().to(memory_format=LAST)
    choice = chosen(model)
    assert choice.before.summary["breaks"] == 1
    assert choice.names == ()
    expected = model(video())
    Pipeline.from_config({"keep_layout": {}}).apply(model)
    assert torch.equal(model(video()), expected)


def test_a_contiguous_and_the_view_that_needs_it_are_chosen_together():
    choice = chosen(folding(), image())
    assert choice.before.summary["breaks"] == 3
    assert choice.after.summary["breaks"] == 0
    operators = [call.operator for call in choice.calls]
    assert sorted(operators) == ["contiguous", "flatten", "rearrange", "view", "view"]


class Splitting(nn.Module):
    """Sums parts of its channels, and asks for a contiguous tensor, as ResNeSt does."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(8, 3, 1)

    def forward(self, x):
        n, _, h, w = x.shape
        return self.last(self.first(x).reshape(n, 2, 8, h, w).sum(dim=1).contiguous())


def test_a_call_that_only_moves_a_break_is_chosen_with_the_next_one():
    choice = chosen(Splitting().to(memory_format=torch.channels_last), image())
    assert choice.before.summary["breaks"] == 1
    assert [call.operator for call in choice.calls] == ["contiguous", "sum"]
    assert choice.after.summary["breaks"] == 0


class Corners(nn.Module):
    """Repeats an image, then reads it pixel by pixel, and tiles two corners, which loses a format."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 3)

    def forward(self, x):
        x = self.first(x).repeat(1, 1, 2, 2)
        corners = [corner.tile(1, 1, 2, 2) for corner in (x[..., :2, :2], x[..., -2:, -2:])]
        return self.last(x.permute(0, 2, 3, 1).contiguous()), *corners


def test_a_call_that_copies_less_but_breaks_more_often_is_not_chosen():
    choice = chosen(Corners().to(memory_format=torch.channels_last), image())
    assert cost_of(choice.before) == (2 * 16 * 12 * 16 * 4, 1)
    assert choice.names == ()


def test_a_flow_that_cannot_be_predicted_chooses_nothing():
    class Branching(nn.Module):
        def forward(self, x):
            return x if x.max() > 0 else torch.cat([x])

    choice = chosen(Branching())
    assert choice.names == ()
    assert choice.before.status == "cannot predict"
