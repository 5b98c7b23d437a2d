"""Awkward modules: each is prepared correctly, and unusual tensors are kept."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from awkward_checks import ALL, FLAT, HALF, apply, refused, with_weight
from prepare.audit import audit
from prepare.errors import NothingMatchesError
from prepare.pipeline import Pipeline
from small_nets import clone, same, small_2d

CONVOLUTIONS = {
    "1x1": lambda: nn.Conv2d(4, 6, 1),
    "one input channel": lambda: nn.Conv2d(1, 6, 3),
    "one output channel": lambda: nn.Conv2d(4, 1, 3),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4),
    "grouped": lambda: nn.Conv2d(4, 8, 3, groups=2),
    "transposed": lambda: nn.ConvTranspose2d(4, 8, 3),
    "transposed 3-d, grouped": lambda: nn.ConvTranspose3d(4, 8, 3, groups=2),
    "1x1x1": lambda: nn.Conv3d(4, 6, 1),
    "3-d, one channel": lambda: nn.Conv3d(1, 6, 3),
    "1-d beside": lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.Conv2d(4, 4, 3)),
    "mixed": lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv3d(4, 4, 3), nn.Linear(3, 3)),
    "large": lambda: nn.Conv2d(512, 480, 3, bias=False),
    "large, 3-d": lambda: nn.ConvTranspose3d(96, 512, 3, bias=False),
    "without bias": lambda: nn.Conv2d(4, 4, 3, bias=False),
    "empty": lambda: nn.Conv2d(4, 0, 3, bias=False),
    "frozen": lambda: nn.Conv2d(4, 4, 3).requires_grad_(requires_grad=False),
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


class Modulated(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 4, 3, 3))
        self.position = nn.Parameter(torch.randn(1, 4, 8, 8))

    def forward(self, x):
        return F.conv2d(x + self.position, self.kernel)


def test_a_raw_convolution_parameter_is_named_as_a_candidate():
    with pytest.raises(NothingMatchesError, match="2 4-d or 5-d parameters .kernel, position"):
        apply(Modulated(), FLAT)
    model = nn.Sequential(Modulated(), nn.Conv2d(4, 4, 3))
    apply(model, FLAT)
    assert model[0].kernel.is_contiguous()
    assert model[0].position.is_contiguous()


def test_integer_and_complex_buffers_and_sparse_ones_are_kept():
    model = nn.Linear(2, 2)
    model.register_buffer("ids", torch.arange(5000))
    model.register_buffer("phase", torch.randn(3, dtype=torch.complex64))
    model.register_buffer("edges", torch.eye(3).to_sparse())
    phase = model.phase.clone()
    apply(model, HALF)
    assert model.ids.dtype is torch.int64
    assert torch.equal(model.phase, phase)
    assert model.edges.dtype is torch.float16
    assert torch.equal(model.edges.to_dense(), torch.eye(3).half())
    row = next(row for row in audit(model).rows if row.tensor == "edges")
    assert (row.stride, row.layouts, row.dtype) == (None, (), "float16")


def test_a_parameter_of_ones_own_class_keeps_its_class():
    class Named(nn.Parameter):
        pass

    model = nn.Conv2d(2, 2, 3)
    model.weight = Named(model.weight.data)
    apply(model)
    assert type(model.weight) is Named
    assert (model.weight.dtype, model.weight.stride(1)) == (torch.float16, 1)


def test_a_meta_model_keeps_its_plan_and_lands_in_the_wanted_layout():
    with torch.device("meta"):
        model = small_2d()
    apply(model)
    model.to_empty(device="cpu")
    assert (model[0].weight.dtype, model[0].weight.stride(1)) == (torch.float16, 1)
    assert not Pipeline.from_config(ALL).plan(model)


def test_a_meta_model_is_not_moved_to_a_device():
    with torch.device("meta"):
        model = small_2d()
    said = refused(model, {"device": {"device": "cpu"}})
    assert "prepare.checkpoint.load(path" in said


def test_plain_tensor_attributes_are_reported():
    model = small_2d()
    model.scale = torch.ones(3)
    model[0].tables = {"grid": [torch.zeros(2, 2)], "n": 3}
    found = audit(model).summary["unregistered"]
    assert found == ["0.tables.grid[0]: float32 cpu", "scale: float32 cpu"]


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


def test_a_plan_finds_a_layout_that_a_checkpoint_undid():
    model, state = small_2d(), copy.deepcopy(small_2d().state_dict())
    pipeline = Pipeline.from_config(FLAT)
    pipeline.apply(model)
    model.load_state_dict(state)
    assert not pipeline.plan(model), "a plain load keeps the model's layout"
    model.load_state_dict(state, assign=True)
    drifted = [f"{t.module}.{t.tensor}" for t in pipeline.plan(model).tensors if t.changes]
    assert drifted == ["0.weight", "3.weight", "4.weight"]
    pipeline.apply(model)
    assert not pipeline.plan(model)


def test_autocast_serves_no_stale_weights_after_preparing():
    model = nn.Linear(4, 4, bias=False)
    x = torch.ones(1, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = model(x)
    with torch.no_grad():
        model.weight.zero_()
    apply(model, {"half": {"dtype": "bfloat16"}})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (model(x) == 0).all()
    assert (before != 0).any()
