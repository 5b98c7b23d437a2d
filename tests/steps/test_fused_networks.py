"""Whole networks after fuse_conv_bn: the number of fused norms and the same output."""

import copy

import pytest
from omegaconf import OmegaConf
from torch import nn

from fuse_checks import FUSE, fused, lively
from paths import CONF
from prepare.core.forward.example_input import build_example
from prepare.stages.verify import verify
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


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_fused_network_gives_the_same_output(name):
    check_network(build(name), example_of(name), *NETWORKS[name])
