"""Test the layout flow: known answers on small nets, restored models, prediction equal to observation."""

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import convert_conv2d_weight_memory_format, convert_conv3d_weight_memory_format
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from flow_nets import KNOWN_DIFFERENCES, NETS, channels_last, converted, example_of, network
from prepare.core.forward.example_input import Example
from prepare.core.model.memory_format import FORMATS, canonical_stride
from prepare.errors import ConfigError, FlowError, ModelError, RefusedError
from prepare.flow import Flow, observe, predict
from prepare.flow.layouts import has_odd_strides, layout_of
from prepare.flow.target_layouts import choose_target_layouts
from prepare.flow.torch_operators import backend_of, hidden_copies
from prepare.pipeline import Pipeline
from prepare.report.sentences import flow_sentence
from prepare.report.terminal.flow import show_flow
from small_nets import bits, facts

BOTH = pytest.mark.parametrize("flow_of", [predict, observe])


def cl(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return channels_last(torch.randn(*shape).to(dtype))


class Net(nn.Module):
    """A convolution, the code that a test passes as `inside`, and a convolution that regains the layout."""

    def __init__(self, inside, rank=4, **modules):
        super().__init__()
        conv = nn.Conv2d if rank == 4 else nn.Conv3d
        self.first = conv(4, 4, 3, padding=1)
        for name, module in modules.items():
            self.add_module(name, module)
        self.last = conv(4, 4, 3, padding=1)
        self.inside = inside
        converted(self)

    def forward(self, x):
        return self.last(self.inside(self, self.first(x)))


def breaks(flow: Flow, phase: str = "forward") -> list[tuple[str, str, str]]:
    """Return every break as (module, operation, cause), repeated by its count."""
    events = [e for e in flow.events if e.kind == "break" and e.phase == phase]
    return [(e.module, e.operation, e.cause) for e in events for _ in range(e.count)]


# ------------------------------------------------------------------------------ breaks


@BOTH
def test_an_instance_norm_is_exactly_one_break(flow_of):
    net = Net(lambda net, x: net.norm(x), norm=nn.InstanceNorm2d(4))
    flow = flow_of(net, cl(2, 4, 8, 8))
    assert breaks(flow) == [("norm", "aten.clone", "instance_norm")]
    (lost, regained) = flow.events
    assert (lost.type, lost.bytes, lost.count) == ("InstanceNorm2d", 2 * 4 * 8 * 8 * 4, 1)
    assert (lost.before, lost.after) == ((256, 1, 32, 4), (256, 64, 8, 1))
    assert (regained.kind, regained.module, regained.operand) == (
        "regain",
        "last",
        "the input is contiguous",
    )


@BOTH
def test_copies_by_an_instance_norm_and_the_next_conv_are_counted(flow_of):
    flow = flow_of(Net(lambda net, x: net.norm(x), norm=nn.InstanceNorm2d(4)), cl(2, 4, 8, 8))
    each = 2 * 4 * 8 * 8 * 4
    assert [(c.module, c.operation, c.bytes, c.count, c.phase) for c in flow.copies] == [
        ("norm", "aten.clone", each, 1, "forward"),
        ("last", "aten.convolution", each, 1, "forward"),
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
    (lost,) = [event for event in flow.events if event.kind == "break"]
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
    ],
)
def test_an_operation_that_keeps_the_layout_is_not_a_break(flow_of, inside):
    flow = flow_of(Net(inside), cl(2, 4, 8, 8))
    assert flow.events == ()


@BOTH
def test_group_norm_keeps_the_layout_in_3d(flow_of):
    flow = flow_of(Net(lambda net, x: net.norm(x), 5, norm=nn.GroupNorm(2, 4)), cl(2, 4, 6, 6, 6))
    assert flow.events == ()


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


@BOTH
def test_a_parameter_added_first_decides_and_is_named(flow_of):
    net = Net(lambda net, x: net.position + x)
    net.position = nn.Parameter(torch.randn(1, 4, 8, 8))
    flow = flow_of(net, cl(2, 4, 8, 8))
    assert [cause for *_, cause in breaks(flow)] == ["add"]


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
    assert {m.layout for m in flow.modules} == {"channels_last"}
    assert breaks(flow) == [("", "aten.cat", "cat")]
    assert {c.module: c.input for c in flow.convolutions} == {
        "a": "channels_last",
        "b": "contiguous",
    }


@BOTH
def test_attention_is_a_break_only_if_it_returns_another_layout(flow_of):
    def inside(net, x):
        n, c, h, w = x.shape
        heads = x.flatten(2).transpose(1, 2).reshape(n, h * w, 2, c // 2).transpose(1, 2)
        heads = F.scaled_dot_product_attention(heads, heads, heads)
        tokens = heads.transpose(1, 2).reshape(n, h * w, c)
        back = tokens.transpose(1, 2)
        return (back.contiguous() if net.copies else back).reshape(n, c, h, w).relu()

    net = Net(inside)
    net.copies = False
    assert flow_of(net, cl(2, 4, 8, 8)).events == ()
    net.copies = True
    assert breaks(flow_of(net, cl(2, 4, 8, 8))) == [("", "aten.view", "reshape")]


@BOTH
def test_attention_heads_over_one_token_are_not_a_regain(flow_of):
    def inside(net, x):
        heads = x.softmax(1).flatten(1).view(2, 64, 1, 4).transpose(1, 3)
        assert heads.is_contiguous(memory_format=torch.channels_last)
        return heads.contiguous().reshape(x.shape)

    flow = flow_of(Net(inside), cl(2, 4, 8, 8))
    assert [(e.kind, e.cause) for e in flow.events] == [
        ("break", "softmax"),
        ("regain", "convolution"),
    ]


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
    assert {c.backend for c in half.convolutions} == {"Mkldnn"}


@BOTH
def test_grouped_and_transposed_convolutions_are_listed(flow_of):
    net = converted(nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.ConvTranspose2d(4, 4, 2)))
    flow = flow_of(net, cl(2, 4, 8, 8))
    rows = {(c.module, c.type, c.input, c.weight, c.output, c.backend, c.calls)
            for c in flow.convolutions}  # fmt: skip
    assert rows == {
        ("0", "Conv2d", "channels_last", "ambiguous", "channels_last", "Mkldnn", 1),
        ("1", "ConvTranspose2d", "channels_last", "channels_last", "channels_last",
         "MkldnnTranspose", 1),
    }  # fmt: skip
    assert flow.summary["in_layout"] == flow.summary["convolutions"] == 2


@BOTH
def test_one_sample_with_an_odd_batch_stride_is_reported(flow_of):
    image = torch.randn(8, 8, 4).permute(2, 0, 1).unsqueeze(0)
    assert image.is_contiguous(memory_format=torch.channels_last)
    flow = flow_of(nn.MaxPool2d(2), image, wanted={4: "channels_last"})
    assert breaks(flow) == [("", "aten.max_pool2d_with_indices", "odd_stride")]
    assert "has strides [4, 1, 32, 4], which can be read as channels_last" in flow.notes[0]
    assert flow_of(nn.MaxPool2d(2), cl(1, 4, 8, 8), wanted={4: "channels_last"}).notes == ()


@BOTH
def test_an_ambiguous_layout_is_never_a_break(flow_of):
    net = converted(nn.Sequential(nn.Conv2d(4, 1, 3), nn.Conv2d(1, 4, 6), nn.Softmax(1)))
    flow = flow_of(net, cl(2, 4, 8, 8))
    assert [e for e in flow.events if e.kind == "break"] == []
    assert [m.layout for m in flow.modules] == ["ambiguous"] * 4


@BOTH
def test_a_contiguous_model_has_no_break(flow_of):
    net = Net(lambda net, x: x.relu()).to(memory_format=torch.contiguous_format)
    assert flow_of(net, torch.randn(2, 4, 8, 8)).events == ()
    assert flow_of(net, torch.randn(2, 4, 8, 8)).wanted == {4: "contiguous"}
    flow = flow_of(net, cl(2, 4, 8, 8))  # and the convolution passes the input's layout on
    assert [e.kind for e in flow.events] == []
    assert {c.output for c in flow.convolutions} == {"channels_last"}
    assert flow.summary["in_layout"] == 0


# ------------------------------------------------------------------------------- modules and trees


@BOTH
def test_a_reused_module_is_one_event_with_a_count(flow_of):
    def inside(net, x):
        for _ in range(3):
            x = net.conv(net.norm(x))
        return x

    net = Net(inside, norm=nn.InstanceNorm2d(4), conv=nn.Conv2d(4, 4, 3, padding=1))
    flow = flow_of(net, cl(2, 4, 8, 8))
    assert [(e.module, e.count) for e in flow.events if e.kind == "break"] == [("norm", 3)]
    assert {m.name: m.calls for m in flow.modules} == {
        "": 1,
        "first": 1,
        "norm": 3,
        "conv": 3,
        "last": 1,
    }
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
    assert {m.name: m.layout for m in flow.modules}["packs"] == "contiguous"
    assert breaks(flow) == [("packs", "aten._softmax", "softmax")]


@BOTH
def test_an_example_may_be_a_tensor_a_tuple_a_mapping_or_an_example(flow_of):
    net, x = Net(lambda net, x: x.softmax(1)), cl(2, 4, 8, 8)
    flows = [flow_of(net, given) for given in (x, (x,), {"x": x}, Example((x,)))]
    assert len({flow.events for flow in flows}) == 1


@BOTH
def test_modules_are_in_the_order_of_the_tree(flow_of):
    net = converted(nn.Sequential(nn.Sequential(nn.Conv2d(4, 4, 3)), nn.InstanceNorm2d(4)))
    net.add_module("unused", nn.ReLU())
    net.forward = lambda x: net[1](net[0](x))
    rows = [(m.name, m.depth, m.layout, m.calls) for m in flow_of(net, cl(2, 4, 8, 8)).modules]
    assert rows == [
        ("", 0, "contiguous", 1),
        ("0", 1, "channels_last", 1),
        ("0.0", 2, "channels_last", 1),
        ("1", 1, "contiguous", 1),
        ("unused", 1, "none", 0),
    ]


class Raises(nn.Module):
    def forward(self, x):
        raise ValueError("not this way")


@BOTH
def test_a_module_that_raised_is_not_blamed_for_later_breaks(flow_of):
    def inside(net, x):
        try:
            return net.raises(x)
        except ValueError:
            return x.softmax(1)

    flow = flow_of(Net(inside, raises=Raises()), cl(2, 4, 8, 8))
    assert breaks(flow) == [("", "aten._softmax", "softmax")]


@BOTH
def test_a_compiled_module_is_one_operation_with_a_note(flow_of):
    net = Net(lambda net, x: net.block(x), block=nn.Sequential(nn.Softmax(1), nn.ReLU()))
    net.block.compile(backend="eager")
    flow = flow_of(net, cl(2, 4, 8, 8))
    assert flow.notes == ("block is compiled: its operations cannot be followed",)
    assert breaks(flow) == [("block", "torch.compile", "other")]


@BOTH
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
def test_a_scripted_module_is_one_call_site(flow_of):
    block = torch.jit.script(nn.Sequential(nn.BatchNorm2d(4), nn.Softmax(1)))
    net = Net(lambda net, x: net.block(x), block=block)
    before = bits(block.state_dict()["0.running_mean"])
    flow = flow_of(net.train(), cl(2, 4, 8, 8))
    assert breaks(flow) == [("block", "aten._softmax", "softmax")]
    assert flow.notes[0].startswith("block is scripted")
    assert bits(block.state_dict()["0.running_mean"]) == before


# ------------------------------------------------------------------------------------- backward


@BOTH
def test_the_gradient_of_an_instance_norm_is_followed_in_backward(flow_of):
    net = Net(lambda net, x: net.norm(x), norm=nn.InstanceNorm2d(4))
    flow = flow_of(net, cl(2, 4, 8, 8), backward=True)
    assert [module for module, *_ in breaks(flow, "backward")] == ["norm"]
    assert breaks(flow) == breaks(flow_of(net, cl(2, 4, 8, 8)))
    assert flow.summary["backward"]["copied_bytes"] > 0


@BOTH
def test_wrong_gradients_of_one_normed_sample_are_reported(flow_of):
    net = Net(lambda net, x: F.silu(net.norm(x)), norm=nn.InstanceNorm2d(4))
    flow = flow_of(net, cl(1, 4, 8, 8), backward=True)
    assert any(
        note.startswith("norm: grad_out of aten.native_batch_norm_backward has strides")
        and note.endswith("torch is known to compute wrong gradients there")
        for note in flow.notes
    )
    assert flow_of(net, cl(2, 4, 8, 8), backward=True).notes == ()


@BOTH
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_checkpoint_adds_no_break_to_forward(flow_of, reentrant):
    def inside(net, x):
        if not net.is_checkpointed:
            return net.norm(x)
        return checkpoint(net.norm, x, use_reentrant=reentrant)

    net = Net(inside, norm=nn.InstanceNorm2d(4))
    net.is_checkpointed = False
    direct = flow_of(net, cl(2, 4, 8, 8), backward=True)
    net.is_checkpointed = True
    flow = flow_of(net, cl(2, 4, 8, 8), backward=True)
    assert breaks(flow) == breaks(direct) == [("norm", "aten.clone", "instance_norm")]
    assert breaks(flow, "backward") == breaks(direct, "backward")
    assert {event.phase for event in flow.events} == {"forward", "backward"}
    assert [m.calls for m in flow.modules] == [1, 1, 1, 1]
    # The copy is made once more, and in backward.
    copies = [sum(c.count for c in f.copies if (c.module, c.phase) == ("norm", "backward"))
              for f in (direct, flow)]  # fmt: skip
    assert copies == [1, 2]


@BOTH
def test_a_model_without_gradients_notes_the_missing_backward(flow_of):
    net = Net(lambda net, x: x).requires_grad_(requires_grad=False)
    flow = flow_of(net, cl(2, 4, 8, 8), backward=True)
    assert flow.notes == ("no output requires a gradient, so no backward was followed",)


# ------------------------------------------------------------------------- everything restored


class Busy(nn.Module):
    """Changes everything that a forward can change about its module and the global state."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=0.5)
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.register_buffer("seen", torch.zeros(4))
        self.plain, self.calls, self.log = torch.zeros(4), 0, []
        self.fails = False

    def forward(self, x):
        x.mul_(2)
        self.calls += 1
        self.log.append(self.calls)
        self.seen = self.seen + 1
        self.plain.add_(1)
        self.eval()
        self.norm.train()
        x = F.dropout(self.norm(self.conv(x)), training=True)
        if self.fails:
            raise RuntimeError("halfway")
        return self.rnn(x.flatten(2).transpose(1, 2))[0] + torch.rand(1)


@BOTH
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_example_and_random_state_are_restored(flow_of, backward, fails):
    net, x = converted(Busy()).train(), cl(2, 4, 8, 8)
    net.fails = fails
    for hook in (net.conv.register_forward_hook, net.norm.register_forward_pre_hook):
        hook(lambda *_: None)
    net.conv.weight.register_hook(lambda grad: 1 / 0)
    net.conv.bias.grad = torch.ones(4)
    before, state, given = facts(net), torch.get_rng_state(), bits(x)
    grads = {name: id(p.grad) for name, p in net.named_parameters()}
    world = set(vars(nn.modules.module)["_global_forward_hooks"])
    try:
        flow_of(net, x, backward=backward)
    except ModelError as error:
        assert fails
        assert "halfway" in str(error)
    assert facts(net) == before
    assert {name: id(p.grad) for name, p in net.named_parameters()} == grads
    assert net.conv.bias.grad.eq(1).all()
    assert torch.equal(torch.get_rng_state(), state)
    assert (bits(x), net.calls, net.log, net.plain.any().item()) == (given, 0, [], False)
    assert all(module.training for module in net.modules())
    assert set(vars(nn.modules.module)["_global_forward_hooks"]) == world
    assert torch.is_grad_enabled()
    assert [id(w) for w in net.rnn._flat_weights] == [id(p) for p in net.rnn.parameters()]


class Frozen(dict):
    def update(self, *_):
        raise TypeError("this dictionary is frozen")


@BOTH
def test_an_attribute_that_refuses_changes_is_left_alone(flow_of):
    net = Net(lambda net, x: x)
    net.config = Frozen(width=4)
    before = net.config
    assert flow_of(net, cl(2, 4, 8, 8)).status == "ok"
    assert net.config is before
    assert net.config == {"width": 4}


def test_an_observed_forward_computes_the_same_outputs():
    net = Net(
        lambda net, x: net.keep.append(net.norm(x)) or net.keep[-1], norm=nn.InstanceNorm2d(4)
    )
    kept = net.keep = []
    x = cl(2, 4, 8, 8)
    expected = net(x).clone(), kept.pop()
    outputs = []
    net.register_forward_hook(lambda module, args, output: outputs.append(output))
    observe(net, x)
    assert torch.equal(outputs[0], expected[0])


# ------------------------------------------------------------------------- failed predictions


class Chooses(nn.Module):
    def __init__(self, choose):
        super().__init__()
        self.conv, self.choose = nn.Conv2d(4, 4, 3), choose

    def forward(self, x):
        return self.choose(self.conv(x))


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda x: x if x.sum() > 0 else -x, "needs the value of a tensor"),
        (lambda x: x * x.mean().item(), "needs the value of a tensor"),
        (lambda x: x[x > 0], "gives a tensor whose shape depends on the data"),
        (lambda x: torch.from_numpy(x.detach().numpy()), "observe a real forward instead"),
    ],
)
def test_data_dependent_code_is_observed_but_not_predicted(choose, message):
    net = converted(Chooses(choose))
    flow = predict(net, cl(2, 4, 8, 8))
    assert flow.status == "cannot predict"
    assert message in flow.reason
    assert "Traceback" not in flow.reason
    assert [c.module for c in flow.convolutions] == ["conv"]
    assert observe(net, cl(2, 4, 8, 8)).status == "ok"
    assert flow_sentence(flow).startswith("cannot predict: forward of Chooses")


def test_a_forward_that_raises_names_the_module():
    net = Net(lambda net, x: net.first(x[:, :2]))
    with pytest.raises(ModelError, match="forward of first"):
        observe(net, cl(2, 4, 8, 8))
    assert "forward of first" in predict(net, cl(2, 4, 8, 8)).reason


def test_an_error_of_the_watcher_is_not_reported_as_the_models(monkeypatch):
    monkeypatch.setattr("prepare.flow.operator_watcher.is_convolution", lambda name: 1 / 0)
    for flow_of in (predict, observe):
        with pytest.raises(ZeroDivisionError):
            flow_of(Net(lambda net, x: x), cl(2, 4, 8, 8))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_a_lazy_module_must_run_once_first():
    net = nn.Sequential(nn.LazyConv2d(4, 3))
    assert predict(net, cl(2, 4, 8, 8)).reason == "0.weight has no shape yet; run one forward first"
    with pytest.raises(RefusedError, match="run one forward first"):
        observe(net, cl(2, 4, 8, 8))


# ----------------------------------------------------------------------------------- target layouts


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
    assert choose_target_layouts(nn.Sequential(left, *[nn.Conv2d(4, 4, 1)] * 2)) == {
        4: "channels_last"
    }


def test_without_votes_the_target_layout_is_contiguous():
    assert choose_target_layouts(converted(nn.Conv2d(1, 1, 1))) == {4: "contiguous"}
    assert choose_target_layouts(nn.Linear(2, 2)) == {4: "contiguous", 5: "contiguous"}


def test_a_wrong_target_layout_is_refused_with_the_allowed_ones():
    for wanted, message in [
        ({3: "contiguous"}, "use 4 or 5"),
        ({4: "channels_last_3d"}, "channels_last"),
    ]:
        with pytest.raises(ConfigError, match=message):
            predict(nn.Identity(), torch.ones(1), wanted=wanted)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 4, 5), (2, 3, 4, 5, 6), (2, 3, 4, 5, 1)])
def test_the_layout_of_canonical_strides_is_their_format(shape, name):
    rank = {"channels_last": 4, "channels_last_3d": 5}.get(name, len(shape))
    if rank == len(shape):
        tensor = torch.empty_strided(shape, canonical_stride(shape, name))
        assert layout_of(tensor) == name
        assert not has_odd_strides(tensor)


# ----------------------------------------------------------------------- facts about kernels


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


@pytest.mark.parametrize(
    ("name", "rank"),
    [*product(["_softmax", "_log_softmax", "native_layer_norm"], [4, 5]), ("avg_pool3d", 5)],
)
def test_hidden_copies_of_kernels_match_the_profiler(name, rank):
    x = cl(2, 3, 4, 5, *[6] * (rank - 4))
    calls = {
        "_softmax": lambda: x.softmax(1),
        "_log_softmax": lambda: x.log_softmax(1),
        "native_layer_norm": lambda: F.layer_norm(x, x.shape[1:]),
        "avg_pool3d": lambda: F.avg_pool3d(x, 2),
    }
    with torch.no_grad():
        assert (
            hidden_copy_shapes(name, self=x, input=x)
            == profiled_copies(calls[name])
            == [list(x.shape)]
        )


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


# -------------------------------------------------------------------------------- records and texts


def test_a_flow_round_trips_through_its_file_byte_by_byte(tmp_path):
    net = Net(lambda net, x: net.norm(x), norm=nn.InstanceNorm2d(4))
    flow = observe(net, cl(2, 4, 8, 8), backward=True)
    paths = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    flow.save(paths[0])
    Flow.load(paths[0]).save(paths[1])
    observe(net, cl(2, 4, 8, 8), backward=True).save(paths[2])
    assert Flow.load(paths[0]) == flow
    assert len({path.read_bytes() for path in paths}) == 1
    data = json.loads(paths[0].read_text())
    assert (data["format"], data["version"], data["summary"]) == ("prepare.flow", 1, flow.summary)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "prepare.audit", "version": 1}',
     '{"format": "prepare.flow", "version": 2}',
     '{"format": "prepare.flow", "version": 1, "wanted": {}, "notes": [], "mode": "", "status": "",'
     ' "reason": "", "events": [{"kind": "break"}], "copies": [], "convolutions": [], "modules": []}'],
)  # fmt: skip
def test_a_file_that_is_not_a_flow_is_refused(tmp_path, text):
    path = tmp_path / "flow.json"
    path.write_text(text)
    with pytest.raises(FlowError):
        Flow.load(path)


def test_loading_and_showing_a_flow_needs_no_torch(tmp_path):
    path = tmp_path / "flow.json"
    predict(Net(lambda net, x: x.softmax(1)), cl(2, 4, 8, 8)).save(path)
    code = (
        "import sys; from prepare.flow.records import Flow; from prepare.report.terminal.flow import show_flow;"
        f"show_flow(Flow.load({str(path)!r})); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_the_sentence_gives_breaks_cost_and_remedy():
    norms = {"norm": nn.InstanceNorm2d(4), "more": nn.InstanceNorm2d(4)}
    net = Net(lambda net, x: net.more(net.first(net.norm(x))), **norms)
    assert flow_sentence(predict(net, cl(2, 4, 8, 8))) == (
        "2 breaks, all InstanceNorm2d, 8.0 KiB copied per forward: try +steps.repair_layout={}"
    )
    assert flow_sentence(predict(Net(lambda net, x: x), cl(2, 4, 8, 8))) == (
        "no breaks, 0 bytes copied per forward"
    )


def test_the_table_names_call_sites_lines_and_the_file(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    net = Net(lambda net, x: net.norm(x) + x, norm=nn.InstanceNorm2d(4))
    show_flow(observe(net, cl(2, 4, 8, 8)), "runs/flow.json")
    text = capsys.readouterr().out
    for part in ("2 breaks (1 InstanceNorm2d, 1 Net)", "wanted: channels_last for 4-d tensors",
                 "2 of 2 convolutions returned it (Mkldnn 2)", "instance_norm", "self decides",
                 "details are in runs/flow.json"):  # fmt: skip
        assert part in text


# --------------------------------------------------------------- prediction against observation


def differences(name: str, *, backward: bool = False) -> list[str]:
    """Return the parts in which the predicted and the observed flow of a network differ."""
    model, example = network(name), example_of(name)
    flows = [flow_of(model, example, backward=backward) for flow_of in (predict, observe)]
    assert flows[0].status == "ok", flows[0].reason
    parts = ("events", "copies", "convolutions", "modules", "notes")
    return [part for part in parts if getattr(flows[0], part) != getattr(flows[1], part)]


QUICK = ["diffusers_autoencoder_kl", "diffusers_unet2d_condition",
         "monai_densenet3d", "monai_segresnet3d", "monai_unet2d",
         "monai_unet3d", "nnunet_plain2d", "resnet2d", "transformers_convnext",
         "transformers_resnet", "transformers_segformer", "unet3d"]  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_a_predicted_flow_equals_the_observed_one(name):
    assert differences(name) == []


REPAIRED = ["monai_dynunet3d", "monai_unet2d", "monai_unet3d", "nnunet_plain2d", "nnunet_plain3d",
            "nnunet_resenc2d", "nnunet_resenc3d", "unet3d"]  # fmt: skip


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", REPAIRED)
def test_a_repaired_network_has_no_break(name, batch):
    formats = {"conv2d_memory_format": {}, "conv3d_memory_format": {}}
    pipeline = Pipeline.from_config({**formats, "repair_layout": {}, "input_format": {}})
    model = pipeline.apply(network(name), strict=False)
    example = example_of(name)
    args = tuple(pipeline.format(tensor[:batch]) for tensor in example.args)
    flows = [flow_of(model, args, backward=True) for flow_of in (predict, observe)]
    for flow in flows:
        assert flow.status == "ok", flow.reason
        assert (flow.summary["breaks"], flow.summary["backward"]["breaks"]) == (0, 0)
    assert flows[0].copies == flows[1].copies
    assert flows[0].convolutions == flows[1].convolutions


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_every_network_is_predicted_or_listed_as_different(name):
    assert differences(name) == list(KNOWN_DIFFERENCES.get(name, ()))


def gradient_events(flow: Flow) -> Counter:
    counts = Counter()
    for event in flow.events:
        if event.phase == "backward":
            counts[event.kind, event.module] += event.count
    return counts


@pytest.mark.parametrize("name", ["monai_unet3d", "nnunet_plain2d", "resnet2d"])
def test_breaks_of_gradients_are_predicted(name):
    model, example = network(name), example_of(name)
    lost = [
        gradient_events(flow_of(model, example, backward=True)) for flow_of in (predict, observe)
    ]
    assert lost[0] == lost[1]
