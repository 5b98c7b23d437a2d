"""Results of each backend of the step compile."""

import copy

import pytest
import torch

from compile_checks import pipeline
from prepare.models.unet import UNet2d
from prepare.pipeline import Pipeline


def same_and_in_the_same_layout(backend, net, x, **options):
    reference = copy.deepcopy(net)
    pipeline(backend=backend, **options).apply(net, known_issues="ignore")
    with torch.no_grad():
        actual, expected = net(x), reference(x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    return actual.stride() == expected.stride()


@pytest.mark.slow
@pytest.mark.parametrize("freezing", [False, True])
@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_inductor_gives_the_same_values_in_the_weights_layout(norm, freezing):
    net = UNet2d(width=4, depth=2, norm=norm).eval()
    Pipeline.from_config({"conv2d_memory_format": {}}).apply(net, known_issues="ignore")
    x = torch.randn(1, 1, 32, 32)
    assert same_and_in_the_same_layout("inductor", net, x, freezing=freezing)


@pytest.mark.heavy
@pytest.mark.parametrize("options", [{"freezing": True}, {"options": {"freezing": True}}, {}])
def test_frozen_weights_are_constants(options):
    for channels in (1, 3):  # the second has other sizes, which torch would take for dynamic ones
        net = torch.nn.Conv2d(channels, channels, 1).eval()
        pipeline(backend="inductor", **options).apply(net, known_issues="ignore")
        x = torch.randn(1, channels, 4, 4)
        with torch.no_grad():
            before = net(x)
            net.weight.data.zero_()
            assert torch.equal(net(x), before) is bool(options)
