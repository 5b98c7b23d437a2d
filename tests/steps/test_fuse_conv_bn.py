"""The step fuse_conv_bn: fused pairs, other steps, failures, recipes and verification."""

import copy

import pytest
import torch
from torch import nn

from failing_operations import FailAt
from fuse_checks import FUSE, Net, fused, lively
from prepare.audit import audit
from prepare.errors import PatternError, RefusedError
from prepare.pipeline import Pipeline
from prepare.steps.repairs.convolutions import KeepingConv3d
from small_nets import facts

PAIRS = {
    "conv1d": (nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), (2, 3, 9)),
    "conv2d": (nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, eps=0.1), (2, 3, 9, 9)),
    "grouped": (nn.Conv2d(4, 8, 3, groups=2, padding_mode="reflect", padding=1), nn.BatchNorm2d(8), (2, 4, 9, 9)),
    "conv3d": (nn.Conv3d(3, 4, 3), nn.BatchNorm3d(4, affine=False), (2, 3, 5, 5, 5)),
    "transposed": (nn.ConvTranspose2d(3, 4, 2, stride=2), nn.BatchNorm2d(4), (2, 3, 5, 5)),
    "transposed 3-d": (nn.ConvTranspose3d(3, 4, 2, bias=False), nn.BatchNorm3d(4), (1, 3, 4, 4, 4)),
    "sync": (nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4), (2, 3, 9, 9)),
    "repaired": (KeepingConv3d(3, 4, 3), nn.BatchNorm3d(4), (1, 3, 5, 5, 5)),
}  # fmt: skip


@pytest.mark.parametrize(("conv", "bn", "shape"), PAIRS.values(), ids=PAIRS)
def test_a_fused_pair_gives_the_same_output_in_the_same_module(conv, bn, shape):
    net, x = lively(Net(conv=copy.deepcopy(conv), bn=copy.deepcopy(bn))), torch.randn(shape)
    # SyncBatchNorm computes on an accelerator only.
    plain = nn.BatchNorm2d(4).eval() if isinstance(bn, nn.SyncBatchNorm) else net.bn
    plain.load_state_dict(net.bn.state_dict())
    module, expected = net.conv, plain(net.conv(x))
    FUSE.apply(net)
    assert net.conv is module
    assert type(net.bn) is nn.Identity
    assert not net.bn.training
    torch.testing.assert_close(net(x), expected, rtol=2e-5, atol=2e-6)


def test_new_parameters_keep_dtype_strides_and_requires_grad():
    net = lively(Net()).bfloat16()
    net.conv.to(memory_format=torch.channels_last).requires_grad_(False)
    stride = net.conv.weight.stride()
    FUSE.apply(net)
    for tensor in net.conv.parameters():
        assert type(tensor) is nn.Parameter
        assert (tensor.dtype, tensor.requires_grad) == (torch.bfloat16, False)
    assert net.conv.weight.stride() == stride


def test_other_steps_of_the_pipeline_act_on_the_fused_weights():
    net, steps = (
        lively(Net()),
        {"half": {"dtype": "bfloat16"}, "conv2d_memory_format": {}, "fuse_conv_bn": {}},
    )
    pipeline = Pipeline.from_config(steps)
    plan = pipeline.plan(net)
    pipeline.apply(net)
    assert not pipeline.plan(net)
    assert {t.dtype for t in net.parameters()} == {torch.bfloat16}
    assert net.conv.weight.is_contiguous(memory_format=torch.channels_last)
    report = audit(net, plan=plan)
    assert {row.status for row in report.rows} == {"converted"}
    assert [row.tensor for row in report.rows] == ["bias", "weight"]


def test_a_norm_with_several_names_is_replaced_under_all_of_them():
    net = lively(Net(lambda net, x: net.both(x)))
    net.both = nn.Sequential(net.conv, net.bn)
    FUSE.apply(net)
    assert net.bn is net.both[1]
    assert fused(net) == ["bn"]
    assert not FUSE.plan(net)


def test_patterns_select_norms():
    net = lively(nn.Sequential(*Net().children(), *Net(conv=nn.Conv2d(4, 4, 3)).children()))
    some = Pipeline.from_config({"fuse_conv_bn": {"exclude": ["1"]}})
    some.apply(net)
    assert fused(net) == ["3"]
    with pytest.raises(PatternError, match="'0' matches no module that fuse_conv_bn prepares"):
        Pipeline.from_config({"fuse_conv_bn": {"include": ["0"]}}).apply(net)


@pytest.mark.parametrize("steps", [{"fuse_conv_bn": {}, "half": {}}, {"fuse_conv_bn": {}}])
def test_a_failure_anywhere_restores_the_unfused_modules(steps):
    pipeline, net = Pipeline.from_config(steps), lively(Net())
    before, number = facts(net), 0
    while True:
        number += 1
        try:
            with FailAt(number, RuntimeError("no")):
                pipeline.apply(net)
        except Exception:
            assert facts(net) == before, f"after operation {number}"
            continue
        break
    assert number > 10
    assert fused(net) == ["bn"]


def test_an_optimizer_that_holds_fused_parameters_is_refused():
    net = lively(Net())
    before = facts(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(
        RefusedError, match="^optimizer: holds conv.weight and 3 more, which a step replaces"
    ):
        FUSE.apply(net, optimizer=optimizer)
    assert facts(net) == before
    FUSE.apply(net)
    assert FUSE.apply(net, optimizer=torch.optim.SGD(net.parameters(), 0.1)) is net
