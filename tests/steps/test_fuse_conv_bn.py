"""The step fuse_conv_bn: which batch norms it fuses, which it must not fuse, and how exactly."""

import copy

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from failing_operations import FailAt, interrupt_at
from paths import CONF
from prepare.audit import audit
from prepare.core.forward.example_input import build_example
from prepare.errors import ConfigError, PatternError, RefusedError
from prepare.pipeline import Pipeline
from prepare.recipe import load
from prepare.steps.fusion.conv_bn import find_pairs
from prepare.steps.repairs.conv3d import KeepingConv3d
from prepare.verify import verify
from small_nets import build, facts

FUSE = Pipeline.from_config({"fuse_conv_bn": {}})


def lively(model):
    """As after training: a fresh norm's statistics would be 0 and 1, and a wrong formula would pass."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            with torch.no_grad():
                for tensor in (module.running_mean, module.weight, module.bias):
                    if tensor is not None:
                        tensor.add_(torch.randn_like(tensor) * 0.3)
                if module.running_var is not None:
                    module.running_var.uniform_(0.5, 2)
    return model.eval()


def fused(model):
    return [name for name, module in model.named_modules() if type(module) is nn.Identity]


def planned(model):
    return [name for action in FUSE.plan(model).actions for name in action.modules]


def why(model):
    return " ".join(map(str, FUSE.plan(model).warnings))


class Net(nn.Module):
    """A convolution and a norm, called as `call` says."""

    def __init__(self, call=lambda net, x: net.bn(net.conv(x)), conv=None, bn=None):
        super().__init__()
        self.conv, self.bn = conv or nn.Conv2d(3, 4, 3), bn or nn.BatchNorm2d(4)
        self.call = call

    def forward(self, x):
        return self.call(self, x)


# ------------------------------------------------------------------------------------- what is fused

PAIRS = {
    "conv1d": (nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), (2, 3, 9)),
    "conv2d": (nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), (2, 3, 9, 9)),
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


def test_modules_that_cannot_be_traced_are_searched_by_parts():
    net = Net(lambda net, x: net.block(x) if x.sum() > 0 else net.block(-x))
    net.block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert planned(lively(net)) == ["block.1", "block.0"]


def test_neighbours_in_an_untraceable_sequential_are_found():
    steps = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Net(lambda net, x: x if x.sum() > 0 else -x)
    )
    assert planned(lively(steps)) == ["1", "0"]


def padded(net, x):
    height = int(x.shape[-2])
    return net.bn(net.conv(nn.functional.pad(x, (0, 1) if height % 2 else (1, 1))))


def test_a_forward_that_reads_a_size_can_be_traced():
    assert planned(lively(Net(padded))) == ["bn", "conv"]


# --------------------------------------------------------------------------------- what must not be

NOT_ALONE = {
    "its output is added": lambda net, x: net.bn(y := net.conv(x)) + y,
    "its output is given out": lambda net, x: (net.bn(y := net.conv(x)), y),
    "called twice": lambda net, x: net.bn(net.conv(x)) + net.conv(x),
    "norm called twice": lambda net, x: net.bn(net.bn(net.conv(x))),
    "something between": lambda net, x: net.bn(net.conv(x).relu()),
    "changed in place": lambda net, x: net.bn(net.conv(x).mul_(2)),
    "its weight is used": lambda net, x: net.bn(net.conv(x)) * net.conv.weight.mean(),
    "the norm's weight is used": lambda net, x: net.bn(net.conv(x)) * net.bn.weight.mean(),
    "put aside": lambda net, x: net.bn(setattr(net, "seen", y := net.conv(x)) or y),
    "put aside in a list": lambda net, x: net.bn(net.seen.append(y := net.conv(x)) or y),
    "a branch": lambda net, x: net.bn(net.conv(x)) if x.sum() > 0 else net.conv(x),
    "for odd sizes only": lambda net, x: net.bn(y := net.conv(x)) + (y if int(x.shape[2]) % 2 else 0),
}  # fmt: skip


@pytest.mark.parametrize("call", NOT_ALONE.values(), ids=NOT_ALONE)
def test_a_convolution_with_a_second_consumer_is_not_fused(call):
    net = lively(Net(call))
    net.seen = []
    before = facts(net), sorted(vars(net)), list(net.seen)
    assert planned(net) == []
    assert "1 batch norm not fused (bn): no convolution was found" in why(net)
    assert (facts(net), sorted(vars(net)), net.seen) == before


class Optional(Net):
    """An argument decides whether the convolution's output goes only to the norm."""

    def forward(self, x, skip=None):
        y = self.conv(x)
        return self.bn(y) if skip is None else self.bn(y) + y


def test_pairs_that_depend_on_an_optional_argument_are_not_fused():
    assert planned(lively(Optional())) == []


def without_statistics(net):
    net.bn = nn.BatchNorm2d(4, track_running_stats=False).eval()


def shared_weight(net):
    net.other = nn.Conv2d(3, 4, 3).eval()
    net.other.weight = net.conv.weight


def backward_pass(net):
    net(torch.ones(1, 3, 5, 5)).sum().backward()


UNFIT = {
    "training mode": lambda net: net.bn.train(),
    "convolution before it is in training mode": lambda net: net.conv.train(),
    "has no running statistics": without_statistics,
    "has hooks": lambda net: net.conv.register_forward_hook(lambda *_: None),
    "before it, has hooks": lambda net: net.bn.register_forward_pre_hook(lambda *_: None),
    "parametrized": lambda net: nn.utils.parametrizations.weight_norm(net.conv),
    "shares a tensor": shared_weight,
    "holds a gradient": backward_pass,
    "gradient or a hook": lambda net: net.conv.weight.register_hook(lambda g: g),
    "different devices": lambda net: net.bn.to("meta"),
}


@pytest.mark.parametrize("reason", UNFIT)
def test_the_plan_gives_the_reason_for_each_unfused_norm(reason):
    net = lively(Net())
    UNFIT[reason](net)
    assert planned(net) == []
    assert reason in why(net)


class Scaled(nn.BatchNorm2d):
    """A norm with another forward."""

    def forward(self, x):
        return super().forward(x) * 2


OTHERS = {
    "a norm of one's own": (nn.Conv2d(3, 4, 3), Scaled(4)),
    "grouped and transposed": (nn.ConvTranspose2d(4, 4, 2, groups=4), nn.BatchNorm2d(4)),
    # Of an input (batch, 4, 4) the norm's channels are not the layer's features.
    "linear": (nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "an instance norm": (nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True)),
}


@pytest.mark.parametrize(("conv", "bn"), OTHERS.values(), ids=OTHERS)
def test_other_kinds_of_modules_are_not_fused(conv, bn):
    assert planned(Net(conv=conv, bn=bn).eval()) == []


def test_a_norm_that_is_also_outside_the_traced_part_is_not_fused():
    net = lively(Net(lambda net, x: net.bn(x) if x.sum() > 0 else net.part(x)))
    net.part = nn.Sequential(net.conv, net.bn)
    assert planned(net) == []


def test_hooks_do_not_run_in_a_plan():
    net, ran = lively(Net()), []
    outer = nn.Sequential(net, nn.ReLU())
    net.register_forward_hook(lambda *_: ran.append(1))
    outer.register_forward_pre_hook(lambda *_: ran.append(1))
    assert planned(outer) == ["0.bn", "0.conv"]
    assert ran == []


class Counting(Net):
    """Counts its calls in a buffer, and draws a random number."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.plain = torch.zeros(())

    def forward(self, x):
        self.calls += 1
        self.plain += 1
        return self.bn(self.conv(x)) + torch.rand(())


def test_a_plan_changes_no_tensor_and_no_random_state():
    net, state = lively(Counting()), torch.get_rng_state()
    FUSE.plan(net)
    assert net.calls == net.plain == 0
    assert torch.equal(torch.get_rng_state(), state)


# -------------------------------------------------------------------------------- the step in a pipeline


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


def test_an_interrupt_leaves_all_pairs_unfused_or_all_fused():
    FUSE.apply(lively(Net()))  # fill the caches first
    with interrupt_at(-1) as count:
        FUSE.apply(lively(Net()))
    for line in range(1, count(), count() // 30):
        net = lively(Net())
        before, calls = facts(net), nn.Module.__call__
        with pytest.raises(KeyboardInterrupt), interrupt_at(line):
            FUSE.apply(net)
        assert facts(net) == before or not FUSE.plan(net), f"line {line}"
        assert nn.Module.__call__ is calls


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


def test_a_recipe_with_fusion_gives_the_same_model(tmp_path):
    net = lively(Net())
    other = copy.deepcopy(net)
    FUSE.save(tmp_path / "recipe.yaml")
    assert load(tmp_path / "recipe.yaml") == {"fuse_conv_bn": {"include": [], "exclude": []}}
    FUSE.apply(net)
    Pipeline.load(tmp_path / "recipe.yaml").apply(other)
    assert torch.equal(net.conv.weight, other.conv.weight)


def test_fusion_is_an_error_in_training():
    from prepare.job.settings import read_settings

    config = {
        "model": {"_target_": "torch.nn.Identity"},
        "steps": {"fuse_conv_bn": {}},
        "mode": "train",
    }
    with pytest.raises(
        ConfigError, match="^steps.fuse_conv_bn: is for inference.*steps.fuse_conv_bn=null$"
    ):
        read_settings(config, choices={})


def test_verification_finds_a_wrong_fused_weight():
    net = lively(Net())
    prepared = FUSE.apply(copy.deepcopy(net))
    x = torch.randn(2, 3, 9, 9)
    assert verify(net, prepared, x, pipeline=FUSE).status == "pass"
    prepared.conv.weight.data[0] *= 1.01
    assert verify(net, prepared, x, pipeline=FUSE).status == "fail"


# --------------------------------------------------------------------------------------- real networks


NETWORKS = {
    "resnet2d": (15, 15),
    "transformers_mobilenet_v2": (52, 52),
    "unet2d": (14, 14),
    "unet3d": (14, 14),
    "monai_attentionunet3d": (14, 14),
    "monai_densenet3d": (11, 24),
    "transformers_resnet": (22, 22),
    "transformers_efficientnet": (31, 31),
}
QUICK = ("resnet2d", "transformers_resnet")


def check_network(model, example, pairs, norms):
    norm_count = sum(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()
    )
    reference = lively(model)
    prepared = FUSE.apply(copy.deepcopy(reference))
    assert (len(fused(prepared)) - len(fused(reference)), norm_count) == (pairs, norms)
    assert not FUSE.plan(prepared)
    verification = verify(reference, prepared, example, pipeline=FUSE)
    assert verification.status == "pass", verification.reason


def test_a_padding_that_depends_on_sizes_can_be_traced():
    assert len(find_pairs(build("transformers_mobilenet_v2")).pairs) == 52


def example_of(name):
    return build_example(
        OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{name}.yaml").input), 0
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["nnunet_plain2d", "nnunet_plain3d", "nnunet_resenc2d", "nnunet_resenc3d"]
)
def test_a_fused_nnu_net_gives_the_same_output(name):
    model = with_batch_norm(name)
    norms = sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    check_network(model, example_of(name), norms, norms)


def test_nnu_net_norms_with_two_names_are_fused():
    model = with_batch_norm("nnunet_plain2d")
    assert len(find_pairs(model).pairs) == len(find_pairs(FUSE.apply(model)).pairs) + 14


def with_batch_norm(name):
    pytest.importorskip("dynamic_network_architectures")
    config = OmegaConf.load(CONF / "model" / f"{name}.yaml").model
    config.norm_op.path = config.norm_op.path.replace("Instance", "Batch")
    return instantiate(config, _convert_="all").eval()


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS]
)
def test_a_fused_network_gives_the_same_output(name):
    check_network(build(name), example_of(name), *NETWORKS[name])
