"""Awkward modules: each is prepared correctly, and unusual tensors are kept."""

import pytest
import torch
from torch import nn

from awkward_checks import ALL, apply, with_weight
from prepare.pipeline import Pipeline
from small_nets import clone, same, small_2d

CONVOLUTIONS = {
    "depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4),
    "transposed 3-d, grouped": lambda: nn.ConvTranspose3d(4, 8, 3, groups=2),
    "1-d beside": lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.Conv2d(4, 4, 3)),
    "mixed": lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv3d(4, 4, 3), nn.Linear(3, 3)),
    "large": lambda: nn.Conv2d(512, 480, 3, bias=False),
    "large, 3-d": lambda: nn.ConvTranspose3d(96, 512, 3, bias=False),
    "empty": lambda: nn.Conv2d(4, 0, 3, bias=False),
    "strided weight": lambda: with_weight(torch.randn(6, 8, 3, 3)[:, ::2]),
    "sliced weight": lambda: with_weight(torch.randn(9, 4, 3, 3)[2:8]),
    "channels-last weight": lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
    "no module at all": lambda: nn.Sequential(),
    "quantized-aware": lambda: _quantization_aware(),
}


def _quantization_aware():
    from torch.ao.nn.qat import Conv2d
    from torch.ao.quantization import get_default_qat_qconfig

    return Conv2d(4, 6, 3, qconfig=get_default_qat_qconfig("x86"))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("make", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_every_kind_of_convolution_equals_torchs_own_conversion(make):
    model = make()
    reference = clone(model).half()
    torch.nn.utils.convert_conv2d_weight_memory_format(reference, torch.channels_last)
    torch.nn.utils.convert_conv3d_weight_memory_format(reference, torch.channels_last_3d)
    same(apply(model, strict=False), reference)


def test_a_meta_model_keeps_its_plan_and_lands_in_the_wanted_layout():
    with torch.device("meta"):
        model = small_2d()
    apply(model)
    model.to_empty(device="cpu")
    assert (model[0].weight.dtype, model[0].weight.stride(1)) == (torch.float16, 1)
    assert not Pipeline.from_config(ALL).plan(model)


@pytest.mark.parametrize(
    "flag", ["overwrite_module_params_on_conversion", "swap_module_params_on_conversion"]
)
def test_parameters_keep_their_identity_under_any_torch_flag(flag):
    model = small_2d()
    parameters = list(model.parameters())
    set_flag, get_flag = (
        getattr(torch.__future__, f"set_{flag}"),
        getattr(torch.__future__, f"get_{flag}"),
    )
    before = get_flag()
    set_flag(True)
    try:
        apply(model)
    finally:
        set_flag(before)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
