"""Whole networks after fuse_conv_bn: the number of fused norms and the same output."""

import copy

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from fuse_checks import FUSE, fused, lively
from paths import CONF
from prepare.core.forward.example_input import build_example
from prepare.stages.verify import verify
from prepare.steps._fusion import find_pairs
from small_nets import build

NETWORKS = {
    "resnet2d": (15, 15),
    "transformers_mobilenet_v2": (52, 52),
    "unet2d": (14, 14),
    "unet3d": (14, 14),
    "monai_attentionunet3d": (14, 14),
    "monai_densenet3d": (11, 24),
    "transformers_resnet": (22, 22),
    "transformers_efficientnet": (30, 31),
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


def example_of(name):
    return build_example(
        OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{name}.yaml").input), 0
    )


def test_nnu_net_norms_with_two_names_are_fused():
    model = with_batch_norm("nnunet_plain2d")
    assert len(find_pairs(model)[0]) == len(find_pairs(FUSE.apply(model))[0]) + 14


def with_batch_norm(name):
    pytest.importorskip("dynamic_network_architectures")
    config = OmegaConf.load(CONF / "model" / f"{name}.yaml").model
    config.norm_op.path = config.norm_op.path.replace("Instance", "Batch")
    return instantiate(config, _convert_="all").eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS]
)
def test_a_fused_network_gives_the_same_output(name):
    check_network(build(name), example_of(name), *NETWORKS[name])
