"""Test where the flow finds breaks, in a forward."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flow_checks import BOTH, Net, breaks, cl
from flow_nets import converted
from prepare.errors import RefusedError
from prepare.stages.flow import observe, predict
from processor import BFLOAT16

# ------------------------------------------------------------------------------ breaks


@BOTH
def test_an_instance_norm_is_exactly_one_break(flow_of):
    net = Net(lambda net, x: net.norm(x), norm=nn.InstanceNorm2d(4))
    flow = flow_of(net, cl(2, 4, 8, 8))
    assert breaks(flow) == [("norm", "aten.clone", "instance_norm")]
    (lost,) = flow.events
    assert (lost.type, lost.bytes, lost.count) == ("InstanceNorm2d", 2 * 4 * 8 * 8 * 4, 1)
    assert (lost.before, lost.after) == ((256, 1, 32, 4), (256, 64, 8, 1))


@BOTH
def test_copies_by_an_instance_norm_and_the_next_conv_are_counted(flow_of):
    flow = flow_of(Net(lambda net, x: net.norm(x), norm=nn.InstanceNorm2d(4)), cl(2, 4, 8, 8))
    each = 2 * 4 * 8 * 8 * 4
    assert [(c.module, c.operation, c.bytes, c.count) for c in flow.copies] == [
        ("norm", "aten.clone", each, 1),
        ("last", "aten.convolution", each, 1),
    ]
    assert flow.copies[0].why == "instance_norm: channels_last to contiguous"
    assert flow.copies[1].why == "input is contiguous, and the kernel works on channels_last"
    assert flow.summary["copied_bytes"] == 2 * each


@BOTH
@pytest.mark.parametrize(
    ("inside", "cause"),
    [
        (lambda net, x: x.softmax(1), "softmax"),
        (lambda net, x: F.layer_norm(x, x.shape[1:]), "layer_norm"),
        (lambda net, x: F.instance_norm(x), "instance_norm"),
        (lambda net, x: x.contiguous(), "clone"),
        (lambda net, x: x.repeat(1, 1, 1, 1), "repeat"),
        (lambda net, x: F.pad(x, (1, 1, 1, 1), mode="circular"), "pad"),
        (lambda net, x: x.cumsum(1), "cumsum"),
        (lambda net, x: x.index_select(2, torch.arange(8)), "index"),
        (lambda net, x: F.grid_sample(x, x.new_zeros(2, 8, 8, 2), align_corners=False),
         "grid_sample"),
    ],
)  # fmt: skip
def test_a_break_in_a_function_call_has_its_source_line(flow_of, inside, cause):
    flow = flow_of(Net(inside), cl(2, 4, 8, 8))
    (lost,) = flow.events
    assert (lost.module, lost.type, lost.cause) == ("", "Net", cause)
    file, line = lost.source.rsplit(":", 1)
    assert file.endswith("tests/flow/test_flow.py")
    assert int(line) == inside.__code__.co_firstlineno


@BOTH
@pytest.mark.parametrize(
    "inside",
    [
        lambda net, x: F.group_norm(x, 2),
        lambda net, x: F.batch_norm(x, None, None, training=True),
        lambda net, x: F.interpolate(F.max_pool2d(x, 2), scale_factor=2, mode="bilinear"),
        lambda net, x: F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 2),
        lambda net, x: F.gelu(x) * x.mean((2, 3), keepdim=True),
        lambda net, x: x.permute(0, 2, 3, 1).mul(2).permute(0, 3, 1, 2),
        lambda net, x: x.flatten(2).transpose(1, 2).relu().transpose(1, 2).reshape(x.shape),
        lambda net, x: torch.cat(list(x.chunk(2, 1)), 1),
        lambda net, x: x[:, :, 1:-1],
        lambda net, x: x.clone(),
    ],
)
def test_an_operation_that_keeps_the_layout_is_not_a_break(flow_of, inside):
    flow = flow_of(Net(inside), cl(2, 4, 8, 8))
    assert flow.events == ()
    assert {each.operation for each in flow.copies} <= {"aten.convolution"}


@BOTH
@pytest.mark.parametrize(
    "pool", [nn.AvgPool3d(2), nn.AdaptiveAvgPool3d(3), nn.AdaptiveMaxPool3d(3)]
)
def test_a_pool_in_3d_loses_the_layout(flow_of, pool):
    flow = flow_of(Net(lambda net, x: net.pool(x), 5, pool=pool), cl(2, 4, 6, 6, 6))
    assert [(module, cause) for module, _, cause in breaks(flow)] == [("pool", "pool3d")]


@BOTH
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_cat_loses_the_layout_in_either_order(flow_of, order):
    def inside(net, x):
        pair = (x, x.softmax(1))
        return torch.cat([pair[i] for i in order], 1)[:, :4]

    flow = flow_of(Net(inside), cl(2, 4, 8, 8))
    assert [cause for *_, cause in breaks(flow)] == ["softmax", "cat"]
    operand = flow.events[1].operand
    assert operand.endswith(f"; tensors[{order.index(1)}] decides")
    assert "contiguous (from Net: aten._softmax)" in operand


@BOTH
def test_the_first_operand_of_add_decides(flow_of):
    kept = flow_of(Net(lambda net, x: x + x.softmax(1)), cl(2, 4, 8, 8))
    lost = flow_of(Net(lambda net, x: x.softmax(1) + x), cl(2, 4, 8, 8))
    assert [cause for *_, cause in breaks(kept)] == ["softmax"]
    assert [cause for *_, cause in breaks(lost)] == ["softmax", "add"]
    assert lost.events[1].operand == (
        "self contiguous (from Net: aten._softmax), other channels_last; self decides"
    )


class Branch(nn.Module):
    """Every module returns channels-last, but the input of `b` is contiguous because of `cat`."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(8, 4, 3)
        converted(self)

    def forward(self, x):
        x = self.a(x)
        return self.b(torch.cat([x, torch.zeros(x.shape)], 1))


@BOTH
def test_a_break_between_channels_last_modules_is_found(flow_of):
    flow = flow_of(Branch(), cl(2, 4, 8, 8))
    assert breaks(flow) == [("", "aten.cat", "cat")]
    assert {c.module: c.input for c in flow.convolutions} == {
        "a": "channels_last",
        "b": "contiguous",
    }


@BOTH
def test_conv3d_of_one_float32_sample_is_slow_and_loses_the_layout(flow_of):
    net = Net(lambda net, x: x, 5)
    flow = flow_of(net, cl(1, 4, 6, 6, 6))
    assert breaks(flow) == [("first", "aten.convolution", "conv3d_reference")]
    assert {(c.module, c.backend, c.output) for c in flow.convolutions} == {
        ("first", "Slow3d", "contiguous"),
        ("last", "Slow3d", "contiguous"),
    }
    two = flow_of(net, cl(2, 4, 6, 6, 6))
    assert {(c.backend, c.output) for c in two.convolutions} == {("Mkldnn", "channels_last_3d")}
    half = flow_of(net.bfloat16(), cl(1, 4, 6, 6, 6, dtype=torch.bfloat16))
    assert {c.backend for c in half.convolutions} == {"Mkldnn" if BFLOAT16 else "Slow3d"}


@BOTH
def test_an_ambiguous_layout_is_never_a_break(flow_of):
    net = converted(nn.Sequential(nn.Conv2d(4, 1, 3), nn.Conv2d(1, 4, 6), nn.Softmax(1)))
    flow = flow_of(net, cl(2, 4, 8, 8))
    assert flow.events == ()
    assert {c.output for c in flow.convolutions} == {"ambiguous"}


@BOTH
def test_a_contiguous_model_has_no_break(flow_of):
    net = Net(lambda net, x: x.relu()).to(memory_format=torch.contiguous_format)
    assert flow_of(net, torch.randn(2, 4, 8, 8)).events == ()
    assert flow_of(net, torch.randn(2, 4, 8, 8)).wanted == {4: "contiguous"}
    flow = flow_of(net, cl(2, 4, 8, 8))  # and the convolution passes the input's layout on
    assert flow.events == ()
    assert {c.output for c in flow.convolutions} == {"channels_last"}
    assert flow.summary["in_layout"] == 0


# ----------------------------------------------------------------------------- modules and examples


@BOTH
def test_a_reused_module_is_one_event_with_a_count(flow_of):
    def inside(net, x):
        for _ in range(3):
            x = net.conv(net.norm(x))
        return x

    net = Net(inside, norm=nn.InstanceNorm2d(4), conv=nn.Conv2d(4, 4, 3, padding=1))
    flow = flow_of(net, cl(2, 4, 8, 8))
    each = 2 * 4 * 8 * 8 * 4
    assert [(e.module, e.count, e.bytes) for e in flow.events] == [("norm", 3, 3 * each)]
    assert {c.module: c.calls for c in flow.convolutions}["conv"] == 3
    assert flow.summary["breaks"] == 3


@dataclasses.dataclass
class Pair:
    one: Any
    two: Any


@BOTH
@pytest.mark.parametrize("pack", [dict, Pair, lambda one, two: (one, [two])])
def test_outputs_in_any_container_are_followed(flow_of, pack):
    class Packs(nn.Module):
        def forward(self, x):
            return pack(one=x.softmax(1), two=x)

    net = Net(lambda net, x: (lambda got: x)(net.packs(x)), packs=Packs())
    flow = flow_of(net, cl(2, 4, 8, 8))
    assert breaks(flow) == [("packs", "aten._softmax", "softmax")]


@BOTH
def test_a_compiled_module_is_one_operation_with_a_note(flow_of):
    net = Net(lambda net, x: net.block(x), block=nn.Sequential(nn.Softmax(1), nn.ReLU()))
    net.block.compile(backend="eager")
    flow = flow_of(net, cl(2, 4, 8, 8))
    assert flow.notes == ("block is compiled: its operations cannot be followed",)
    assert breaks(flow) == [("block", "torch.compile", "other")]


# ------------------------------------------------------------------------------ autocast


@pytest.mark.parametrize("follow", [predict, observe])
def test_casts_of_autocast_keep_the_layout_that_is_followed(follow):
    seen = []

    class Watched(nn.Conv2d):
        def forward(self, x):
            x = super().forward(x)
            seen.append(x.dtype)
            return x

    model = nn.Sequential(Watched(3, 8, 3), nn.ReLU(), Watched(8, 8, 3))
    model.to(memory_format=torch.channels_last)
    batch = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    plain, cast = (follow(model, batch, amp=amp) for amp in ("none", "bfloat16"))
    assert seen == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert cast.summary == plain.summary
    assert cast.summary["in_layout"] == 2


def test_a_flow_refuses_an_unknown_amp():
    with pytest.raises(RefusedError, match="amp: 'hlaf' is not allowed"):
        predict(nn.ReLU(), torch.ones(1), amp="hlaf")
