"""The repair of 3-d convolutions of small inputs: kernels, padding, gradients."""

import copy

import pytest
import torch
from torch import nn

from prepare.steps.repairs import find_repair
from prepare.steps.repairs.base import FORMATS
from processor import BFLOAT16
from repair_errors import errors, laid_out, results
from repaired_modules import NAMES, is_canonical, pair, sample

# Larger than their inputs, and large enough for oneDNN to take its own kernels for bfloat16.
LARGER = {
    "padded": lambda: nn.Conv3d(64, 64, 3, padding=1),
    "same": lambda: nn.Conv3d(64, 64, 5, padding="same"),
    "same, of even kernels": lambda: nn.Conv3d(64, 64, 4, padding="same"),
    "strided": lambda: nn.Conv3d(64, 64, 3, stride=2, padding=(1, 2, 1)),
    "dilated": lambda: nn.Conv3d(64, 64, 3, padding=3, dilation=3),
    "in groups": lambda: nn.Conv3d(64, 64, 5, padding=2, groups=2),
    "transposed": lambda: nn.ConvTranspose3d(64, 64, 3, padding=1),
    "transposed, strided": lambda: nn.ConvTranspose3d(64, 64, 7, 2, 3, (1, 0, 1), bias=False),
    "transposed, dilated": lambda: nn.ConvTranspose3d(64, 64, 3, padding=2, dilation=2),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("name", LARGER)
def test_bfloat16_gradients_of_a_kernel_larger_than_its_input(name):
    torch.manual_seed(0)
    module = LARGER[name]()
    sizes = [copy.deepcopy(module)(torch.zeros(1, 64, size, 6, 2)).shape for size in (2, 3)]
    find_repair("conv3d").repair(module, NAMES)
    assert [module(torch.zeros(1, 64, size, 6, 2)).shape for size in (2, 3)] == sizes
    for shape in ((2, 64, 2, 2, 2), (1, 64, 2, 6, 4), (64, 2, 2, 2)):
        x = torch.randn(shape)
        exact = results(module, x, torch.float64)
        for value in (x, laid_out(x) if x.dim() == 5 else x):
            actual = results(module, value, torch.bfloat16)
            for error, right in zip(errors(actual, exact), exact, strict=True):
                assert error < 0.03 * right.abs().max()
        # The slow kernel of a processor without one for bfloat16 returns contiguous tensors.
        assert is_canonical(actual[0]) or x.dim() == 4 or not BFLOAT16
        with torch.autocast("cpu"):
            (_, _, weight, *_) = results(module, x, torch.float32)
        assert (weight.double() - exact[2]).abs().max() < 0.03 * exact[2].abs().max()


def test_torchs_own_convolution_runs_where_it_is_fast():
    module, repaired = pair("plain")
    x = laid_out(sample(module))
    torch._C._set_mkldnn_enabled(False)
    try:
        assert torch.equal(repaired(x), module(x))
    finally:
        torch._C._set_mkldnn_enabled(True)
    large = laid_out(torch.randn(1, 4, 80, 80, 3))
    assert torch.equal(repaired(large), module(large))
    double = copy.deepcopy(repaired).double()
    assert not is_canonical(double(x.double()))
    grouped = nn.Conv3d(4, 6, 3, groups=2)
    expected = grouped(x)
    find_repair("conv3d").repair(grouped, NAMES)
    assert torch.equal(grouped(x), expected)
    with pytest.raises(RuntimeError, match="to have 4 channels, but got 3"):
        repaired(x[:, :3].to(memory_format=FORMATS[5]))


def test_a_transposed_convolution_gives_the_requested_size():
    module = nn.ConvTranspose3d(4, 16, 3, 2)
    x = sample(module)
    size = [20, 17, 16]
    expected = module(x, size)
    find_repair("conv3d").repair(module, NAMES)
    torch.testing.assert_close(module(laid_out(x), size), expected)
