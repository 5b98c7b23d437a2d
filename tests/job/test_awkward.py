"""Awkward modules: each is prepared rightly, or refused in one line that says what to do."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from prepare.audit import audit
from prepare.errors import NothingMatchesError, RefusedError
from prepare.pipeline import Pipeline
from small_nets import Tied, bits, build, clone, facts, same, small_2d, tensors

FLAT = {"conv2d_memory_format": {}}
HALF = {"half": {"keep": []}}
ALL = {**HALF, **FLAT, "conv3d_memory_format": {}}


def apply(model, steps=ALL, **options):
    return Pipeline.from_config(steps).apply(model, **options)


def refused(model, steps=ALL, **options):
    before = facts(model)
    with pytest.raises(RefusedError) as caught:
        apply(model, steps, strict=False, **options)
    assert facts(model) == before
    return str(caught.value)


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
    "strided weight": lambda: _with_weight(torch.randn(6, 8, 3, 3)[:, ::2]),
    "sliced weight": lambda: _with_weight(torch.randn(9, 4, 3, 3)[2:8]),
    "channels-last weight": lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
    "no module at all": lambda: nn.Sequential(),
    "quantized-aware": lambda: _quantization_aware(),
}


def _with_weight(weight):
    conv = nn.Conv2d(4, 6, 3)
    conv.weight = nn.Parameter(weight)
    return conv


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


# Sharing


def test_tied_parameters_stay_tied_and_are_moved_once():
    model = Tied()
    apply(model)
    assert model.encoder.weight is model.decoder.weight
    assert model.encoder.weight.dtype is torch.float16


def test_a_module_that_stands_in_two_places_is_prepared_once():
    conv = nn.Conv2d(4, 4, 3)
    model = nn.ModuleDict({"a": conv, "b": nn.Sequential(conv)})
    apply(model)
    assert model["a"] is model["b"][0]
    found = audit(model)
    assert {row.path for row in found.rows if row.tensor == "weight"} == {"a.weight", "b.0.weight"}
    assert sum(found.summary["convolutions"].values()) == 1


def two_over_one_storage():
    model = nn.ModuleDict({"a": nn.Conv2d(4, 4, 3), "b": nn.Conv2d(4, 4, 3)})
    model["b"].weight = nn.Parameter(model["a"].weight.data)
    return model


def test_two_parameters_over_one_storage_go_on_sharing_it():
    model = two_over_one_storage()
    first, second = model["a"].weight, model["b"].weight
    reference = clone(first.data).half().to(memory_format=torch.channels_last)
    apply(model)
    assert model["a"].weight is first
    assert model["b"].weight is second
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, reference)
    assert first.stride() == second.stride() == reference.stride()
    rows = {row.path: row for row in audit(model).rows}
    assert rows["a.weight"].shared_with == ("b.weight",)


def test_an_exclusion_holds_for_every_parameter_over_one_storage():
    model = two_over_one_storage()
    plan = Pipeline.from_config({"conv2d_memory_format": {"exclude": ["b"]}}).plan(model)
    assert not plan
    assert [t.off for t in plan.tensors if t.module == "a" and t.tensor == "weight"] == [
        {"conv2d_memory_format": "exclude: b (as b.weight)"}
    ]


def flattened():
    """As flat optimizers and old distributed code do it: every weight a view of one buffer."""
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Linear(3, 3))
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    offset = 0
    for parameter in model.parameters():
        parameter.data = flat[offset : offset + parameter.numel()].view(parameter.shape)
        offset += parameter.numel()
    model.register_buffer("flat", flat)
    return model


def test_views_of_a_flat_buffer_are_cast_as_one_and_stay_views():
    model = flattened()
    reference = {name: tensor.detach().clone().half() for name, tensor in tensors(model).items()}
    apply(model, HALF)
    for name, tensor in tensors(model).items():
        assert bits(tensor) == bits(reference[name])
    model.flat.fill_(3)
    assert all((p == 3).all() for p in model.parameters())


def test_views_of_a_flat_buffer_are_not_torn_apart():
    said = refused(flattened(), FLAT)
    assert said.startswith("flat, 0.weight, 0.bias and 2 more: share one storage")
    assert "prepare the model before making them views of it, or exclude them" in said


def test_an_expanded_weight_stays_expanded_when_cast():
    model = nn.Linear(100, 100, bias=False)
    model.weight = nn.Parameter(torch.randn(1, 100).expand(100, 100))
    before = model.weight.detach().clone()
    apply(model, HALF)
    assert model.weight.untyped_storage().nbytes() == 200
    assert torch.equal(model.weight, before.half())


def test_an_expanded_convolution_weight_is_materialised():
    model = _with_weight(torch.randn(1, 4, 1, 1).expand(6, 4, 3, 3))
    reference = clone(model)
    torch.nn.utils.convert_conv2d_weight_memory_format(reference, torch.channels_last)
    same(apply(model, FLAT), reference)


# Modules that cannot be seen into


@pytest.mark.parametrize("kind", ["scripted", "traced"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_and_traced_models_are_refused_with_the_way_out(kind):
    model = nn.Sequential(nn.Conv2d(2, 2, 3)).eval()
    if kind == "scripted":
        model = torch.jit.script(model)
    else:
        model = torch.jit.trace(model, torch.randn(1, 2, 5, 5))
    said = refused(model, HALF)
    assert "ScriptModule" in said or "TracedModule" in said
    assert "prepare the model first, then script or trace it" in said
    with pytest.raises((RefusedError, NothingMatchesError), match="script or trace|no Conv2d"):
        apply(model, FLAT)


def test_an_exported_model_has_no_convolution_modules_and_is_told_so():
    exported = torch.export.export(
        nn.Sequential(nn.Conv2d(2, 2, 3)).eval(), (torch.randn(1, 2, 5, 5),)
    )
    with pytest.raises(NothingMatchesError, match="no Conv2d.*one 4-d or 5-d parameter .0.weight"):
        apply(exported.module(), FLAT)


def test_a_traced_fx_graph_is_prepared_like_the_model_it_was_made_of():
    model = small_2d().eval()
    graph = torch.fx.symbolic_trace(model)
    apply(graph, FLAT)
    x = torch.randn(2, 3, 8, 8)
    assert torch.allclose(graph(x), model(x), atol=1e-5)
    assert graph.get_submodule("0").weight.stride(1) == 1


def test_a_compiled_model_is_refused_unless_there_is_nothing_to_do():
    wrapped = torch.compile(small_2d(), backend="eager")
    assert "prepare first, then compile" in refused(wrapped, FLAT)
    in_place = small_2d()
    in_place.compile(backend="eager")
    assert "prepare first, then compile" in refused(in_place, FLAT)
    prepared = apply(small_2d(), FLAT)
    prepared.compile(backend="eager")
    apply(prepared, FLAT)


@pytest.mark.parametrize(
    "make", [lambda: nn.LazyConv2d(4, 3), lambda: nn.Sequential(nn.LazyLinear(3))]
)
@pytest.mark.parametrize("steps", [HALF, FLAT])
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules_are_refused_until_a_forward_pass_has_run(make, steps):
    model = make()
    pipeline = Pipeline.from_config(steps)
    with pytest.raises(
        RefusedError, match="weight.*not initialised yet.*run one forward pass first"
    ):
        pipeline.apply(model)
    pipeline.plan(model)
    model(torch.randn(1, 3, 8, 8))
    assert pipeline.apply(model, strict=False) is model


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantized_module_has_no_convolution_and_is_told_so():
    from torch.ao.nn.quantized import Conv2d

    with pytest.raises(NothingMatchesError, match="no Conv2d"):
        apply(nn.Sequential(Conv2d(2, 2, 3)), FLAT)


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


# Tensors of other kinds


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


def test_a_tensor_subclass_with_its_own_dispatch_is_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Conv2d(2, 2, 3)
    model.weight = nn.Parameter(TwoTensor(torch.randn(2, 2, 3, 3), torch.randn(2, 2, 3, 3)))
    with pytest.raises(RefusedError, match="weight: TwoTensor defines its own meaning of dtype"):
        apply(model, HALF)


def test_a_parameter_of_ones_own_class_keeps_its_class():
    class Named(nn.Parameter):
        pass

    model = nn.Conv2d(2, 2, 3)
    model.weight = Named(model.weight.data)
    apply(model)
    assert type(model.weight) is Named
    assert (model.weight.dtype, model.weight.stride(1)) == (torch.float16, 1)


def test_tensors_made_in_inference_mode_are_refused():
    with torch.inference_mode():
        model = small_2d()
    assert "made in torch.inference_mode" in refused(model, FLAT)


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
    assert "meta holds no data; load it with prepare.checkpoint.load(path, model)" in said


def test_plain_tensor_attributes_are_reported():
    model = small_2d()
    model.scale = torch.ones(3)
    model[0].tables = {"grid": [torch.zeros(2, 2)], "n": 3}
    found = audit(model).summary["unregistered"]
    assert found == ["0.tables.grid[0]: float32 cpu", "scale: float32 cpu"]


# Surroundings


def test_autocast_and_inference_mode_are_refused():
    model = small_2d()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "prepare before the autocast region" in refused(model, FLAT)
    with torch.inference_mode():
        assert "torch.no_grad is fine" in refused(model, FLAT)
    with torch.no_grad():
        apply(model, FLAT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        apply(model, FLAT)  # nothing to do, so nothing to refuse


def test_parameters_that_hold_a_grad_are_refused():
    model = small_2d()
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert "holds a .grad" in refused(model, FLAT)
    model.zero_grad(set_to_none=True)
    apply(model, FLAT)


def test_a_data_parallel_model_is_refused(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = nn.parallel.DistributedDataParallel(small_2d())
        assert "prepare the module first, then wrap it" in refused(model, FLAT)
        from torch.distributed.fsdp import fully_shard

        sharded = fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=_mesh())
        with pytest.raises(RefusedError, match="prepare the module first, then shard it"):
            apply(sharded, HALF)
    finally:
        torch.distributed.destroy_process_group()


def _mesh():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (1,))


# What a module's own code protects


class Statistics(nn.Module):
    """Keeps its statistics in float32, whatever is asked of it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.mean = self.mean.float()
        return self


class Stubborn(nn.Linear):
    def half(self):
        return self

    def to(self, *args, **kwargs):
        return self


def test_a_tensor_that_module_code_protects_is_kept_and_named():
    model = nn.Sequential(Statistics(), Stubborn(2, 2), nn.Linear(2, 2))
    pipeline = Pipeline.from_config(HALF)
    plan = pipeline.plan(model)
    pipeline.apply(model)
    assert model[0].mean.dtype is torch.float32
    assert model[0].weight.dtype is torch.float16
    assert model[1].weight.dtype is torch.float32
    assert model[2].weight.dtype is torch.float16
    rows = {row.path: row for row in audit(model, plan=plan).rows}
    assert (rows["0.mean"].status, rows["0.mean"].reason) == (
        "skipped",
        "half: Statistics._apply keeps it in float32",
    )
    assert rows["1.weight"].status == "skipped"
    assert rows["0.weight"].status == "converted"
    assert not pipeline.plan(model)


def test_protection_holds_for_every_parameter_of_a_storage():
    class Keeper(nn.Linear):
        def _apply(self, fn, recurse=True):
            bias = self.bias.data
            super()._apply(fn, recurse)
            self.bias.data = bias
            return self

    model = nn.Sequential(Keeper(2, 3), nn.Linear(2, 3))
    model[1].bias = nn.Parameter(model[0].bias.data)
    apply(model, HALF)
    assert model[0].bias.dtype is model[1].bias.dtype is torch.float32
    assert model[1].weight.dtype is torch.float16


def test_an_override_that_forbids_the_cast_is_refused_and_quoted():
    class Quantized(nn.Linear):
        def half(self):
            raise ValueError("half is not supported for quantized models")

    said = refused(nn.Sequential(Quantized(2, 2)), HALF)
    assert "0: its own half() raises ValueError: half is not supported for quantized models" in said


def test_a_kornia_module_that_overrides_apply_is_prepared():
    kornia = pytest.importorskip("kornia")
    model = nn.Sequential(kornia.augmentation.RandomAffine(10.0), nn.Conv2d(3, 3, 3))
    apply(model)
    assert model[1].weight.dtype is torch.float16


def test_a_transformers_model_that_overrides_half_is_cast_whole():
    model = build("transformers_resnet")
    apply(model)
    assert {p.dtype for p in model.parameters()} == {torch.float16}


# Values


def test_a_value_beyond_float16_is_refused_and_its_tensor_named():
    model = small_2d()
    with torch.no_grad():
        model[3].weight[0, 0] = 7e4
    said = refused(model, HALF)
    assert said == (
        "3.weight: 1 of its values would become inf: it holds 70000, and the largest float16 is 65504; "
        '"half": {"dtype": "bfloat16"}, or keep it: "half": {"keep": ["norms", "3"]}'
    )
    apply(model, {"half": {"keep": ["norms", "3"]}})
    assert model[0].weight.dtype is torch.float16


def test_an_infinity_that_was_there_already_is_no_reason_to_refuse():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = float("inf")
        model.weight[1, 0] = float("nan")
    apply(model, HALF)
    assert model.weight[0, 0].isinf()


# Flags of torch's own


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
