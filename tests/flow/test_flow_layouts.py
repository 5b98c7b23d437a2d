"""Test target layouts, the layouts of strides, and the tables of facts about kernels."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import convert_conv2d_weight_memory_format, convert_conv3d_weight_memory_format
from torch.profiler import ProfilerActivity, profile

from flow_nets import channels_last, converted
from prepare.stages.flow.layouts import choose_target_layouts
from prepare.stages.flow.torch_operators import backend_of, hidden_copies

# The profiler of torch 2.10 says so at its first use.
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")


def test_target_layouts_follow_the_convolutions_of_each_rank():
    net = nn.ModuleList([nn.Conv2d(4, 4, 3), nn.Conv3d(4, 4, 3), nn.Conv2d(4, 4, 1)])
    assert choose_target_layouts(net) == {4: "contiguous", 5: "contiguous"}
    convert_conv3d_weight_memory_format(net, torch.channels_last_3d)
    assert choose_target_layouts(net) == {4: "contiguous", 5: "channels_last_3d"}
    convert_conv2d_weight_memory_format(net, torch.channels_last)
    assert choose_target_layouts(net) == {4: "channels_last", 5: "channels_last_3d"}


def test_an_ambiguous_weight_votes_only_if_no_other_does():
    last = convert_conv2d_weight_memory_format(nn.Conv2d(4, 4, 1), torch.channels_last)
    assert choose_target_layouts(last) == {4: "channels_last"}
    assert choose_target_layouts(nn.Conv2d(4, 4, 1)) == {4: "contiguous"}
    assert choose_target_layouts(nn.Sequential(last, nn.Conv2d(4, 4, 3))) == {4: "contiguous"}
    left = converted(nn.Conv2d(4, 4, 3))
    tie = nn.Sequential(left, nn.Conv2d(4, 4, 3))
    assert choose_target_layouts(tie) == {4: "channels_last"}
    assert choose_target_layouts(nn.Sequential(left, *[nn.Conv2d(4, 4, 1)] * 2)) == {
        4: "channels_last"
    }


def profiled_copies(call) -> list[list[int]]:
    """Return the shapes of the tensors that a call copies, according to the profiler."""
    call()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        call()
    return sorted(
        event.input_shapes[0]
        for event in seen.events()
        if event.name == "aten::clone" and len(event.input_shapes[0]) > 3
    )


def hidden_copy_shapes(name: str, **arguments: Any) -> list[list[int]]:
    """Return the shapes of the copies that `hidden_copies` lists."""
    _, memory_format = backend_of(arguments) if "convolution" in name else ("", None)
    return sorted(list(t.shape) for _, t, _ in hidden_copies(name, arguments, memory_format))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("weight_last", [False, True])
@pytest.mark.parametrize("input_last", [False, True])
@pytest.mark.parametrize("rank", [4, 5])
def test_hidden_copies_of_convolutions_match_the_profiler(
    rank, input_last, weight_last, transposed, dtype
):
    x, w = torch.randn(2, 3, *[6] * (rank - 2)), torch.randn(3, 3, *[2] * (rank - 2))
    x, w = (channels_last(t) if last else t for t, last in ((x, input_last), (w, weight_last)))
    ones, zeros = [1] * (rank - 2), [0] * (rank - 2)
    options = (None, ones, zeros, ones, transposed, zeros, 1)
    names = ("bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
    x, w = x.to(dtype), w.to(dtype)
    with torch.no_grad():
        seen = profiled_copies(lambda: torch.convolution(x, w, *options))
    arguments = dict(zip(names, options, strict=True)) | {"input": x, "weight": w}
    assert hidden_copy_shapes("convolution", **arguments) == seen
