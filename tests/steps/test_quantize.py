"""The step quantize: weights of Linear modules in 8 bits, and what is said of all others."""

import copy
import importlib.util
import io
import logging
import pickle
import warnings

import pytest
import torch
from torch import nn

from prepare import contract
from prepare.audit import audit
from prepare.bench import compare
from prepare.checkpoint import load, save
from prepare.core.model.quantized import quantized_weight
from prepare.errors import (
    CheckpointError,
    ConfigError,
    NothingMatchesError,
    PatternError,
    RefusedError,
    StepError,
)
from prepare.export import export
from prepare.flow import observe, predict
from prepare.pipeline import Pipeline, like
from prepare.steps import quantize
from small_nets import Perceptron, perceptron

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def prepared(model=None, *, strict=True, steps=None, **options):
    """The network with weights in 8 bits, and its plan."""
    model = perceptron() if model is None else model
    pipeline = Pipeline.from_config({**(steps or {}), "quantize": options})
    plan = pipeline.plan(model)
    return pipeline.apply(model, strict=strict), plan, pipeline


def quantized(model):
    """The names of the modules whose weights are quantized."""
    return [name for name, m in model.named_modules() if quantized_weight(m) is not None]


def reasons(model, plan):
    """The reason for each tensor that has one."""
    return {row.path: row.reason for row in audit(model, plan=plan).rows if row.reason}


def relative_error(model, reference):
    with torch.no_grad():
        exact = reference(IMAGE)
        return float((model(IMAGE) - exact).abs().max() / exact.abs().max())


def test_weights_of_linear_modules_are_in_8_bits():
    reference = perceptron()
    model, _, pipeline = prepared()
    assert quantized(model) == ["first", "second", "third"]
    assert model.second.weight is model.third.weight
    assert model.first.weight.qdata.dtype is torch.int8
    assert 0 < relative_error(model, reference) < 0.02
    assert not pipeline.plan(model)


def test_scheme_int8_dynamic_rounds_the_inputs_as_well():
    model, _, _ = prepared(scheme="int8_dynamic")
    assert model.first.weight.act_quant_kwargs is not None
    assert prepared()[0].first.weight.act_quant_kwargs is None
    assert 0 < relative_error(model, perceptron()) < 0.02


def test_group_size_gives_each_group_a_scale():
    assert prepared()[0].first.weight.scale.shape == (128, 1)
    model, plan, _ = prepared(group_size=32)
    assert model.first.weight.scale.shape == (128, 2)
    rows = {row.path: row for row in audit(model, plan=plan).rows}
    assert rows["first.weight"].dtype == "int8 per 32 values"


def test_include_and_exclude_select_linear_modules():
    assert quantized(prepared(include=["first"])[0]) == ["first"]
    model, plan, _ = prepared(exclude=["second"])
    assert quantized(model) == ["first"]
    rows = {row.path: row for row in audit(model, plan=plan).rows}
    assert (rows["second.weight"].status, rows["second.weight"].reason) == (
        "skipped",
        "quantize: exclude: second",
    )
    assert rows["third.weight"].reason == "quantize: exclude: second (as second.weight)"


def test_the_audit_says_of_each_weight_what_it_is_and_why():
    model, plan, _ = prepared()
    rows = {row.path: row for row in audit(model, plan=plan).rows}
    first, convolution = rows["first.weight"], rows["patches.weight"]
    assert (first.dtype, first.status, first.before["dtype"]) == (
        "int8 per row",
        "converted",
        "float32",
    )
    assert (convolution.status, convolution.dtype) == ("untouched", "float32")
    only = "quantize: torchao quantizes weights of Linear only"
    assert reasons(model, plan) == {
        "patches.weight": only,
        "embedding.weight": only,
        "head.weight": f"{only} (as embedding.weight)",
    }


def test_plan_and_audit_count_the_same_bytes():
    for options in ({}, {"group_size": 16}, {"scheme": "int8_dynamic"}):
        reference = perceptron()
        model, plan, _ = prepared(reference, **options)
        summary = audit(model, plan=plan).summary
        counted = plan.summary()
        assert summary["bytes_before"] == counted["bytes_before"] == 72488
        assert summary["bytes_after"] == counted["bytes_after"] < 30000
    again = Pipeline.from_config({"quantize": {"scheme": "int8_dynamic"}}).plan(model).summary()
    assert again["bytes_before"] == again["bytes_after"] == counted["bytes_after"]


def test_an_audit_finds_a_weight_that_is_float_again():
    model, plan, pipeline = prepared()
    model.first.weight = nn.Parameter(perceptron().first.weight.detach())
    rows = {row.path: row for row in audit(model, plan=plan).rows}
    assert rows["first.weight"].status == "ineffective"
    assert rows["first.weight"].reason == "dtype is float32, not int8 per row"
    assert any("int8 per row" in str(drift) for drift in pipeline.check(model))


def test_the_guard_finds_a_weight_that_is_float_again():
    model, _, pipeline = prepared()
    guard = pipeline.guard(model)
    guard()
    model.first.weight = nn.Parameter(perceptron().first.weight.detach())
    assert [str(drift) for drift in guard.find_drift()] == [
        "first.weight: dtype is float32, prepared as int8 per row"
    ]


class Scaled(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, x):
        return super().forward(x) * 2


def without_rows(columns, rows):
    """A Linear without rows; torch warns where it draws no values."""
    module = nn.Linear(columns, rows)
    module.weight = nn.Parameter(torch.empty(0, columns))
    return module


@pytest.mark.parametrize(
    ("module", "options", "reason"),
    [
        (Scaled(8, 8), {}, "Scaled has a forward of its own"),
        (nn.Linear(8, 8).double(), {}, "torchao quantizes no float64"),
        (nn.Linear(10, 8), {"group_size": 4}, "group_size 4 does not divide its 10 columns"),
        (without_rows(8, 8), {}, "holds no values"),
        (nn.Embedding(8, 8), {}, "torchao quantizes weights of Linear only"),
        (
            nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
            {},
            "ParametrizedLinear computes its weight from it",
        ),
        (nn.MultiheadAttention(8, 2).out_proj, {}, "MultiheadAttention reads it itself"),
    ],
)
def test_a_weight_that_stays_has_a_reason(module, options, reason):
    model = nn.Sequential(nn.Linear(8, 8), module).eval()
    model, plan, _ = prepared(model, **options)
    assert quantized(model) == ["0"]
    assert f"quantize: {reason}" in reasons(model, plan).values()


def test_odd_sizes_stay_in_float_where_cublas_would_refuse_them():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 10)).eval()
    steps = {"device": {"device": "cuda"}, "quantize": {"scheme": "int8_dynamic"}}
    plan = Pipeline.from_config(steps).plan(model)
    left = {t.path: t.left for t in plan.tensors if t.left}
    assert left == {
        "1.weight": {
            "quantize": "cuBLAS needs multiples of 8 as sizes, and torchao would use the CPU"
        }
    }


def test_a_weight_quantized_in_another_way_is_named():
    model, _, _ = prepared()
    wrong = r"quantizes no weight of Perceptron"
    with pytest.raises(NothingMatchesError, match=wrong):
        prepared(model, group_size=32)
    plan = Pipeline.from_config({"quantize": {"group_size": 32}}).plan(model)
    left = {t.path: t.left["quantize"] for t in plan.tensors if t.left}
    assert left["first.weight"] == "is int8 per row already, and not int8 per 32 values"


def test_a_model_without_linear_modules_is_an_error():
    with pytest.raises(NothingMatchesError) as caught:
        prepared(nn.Sequential(nn.Conv2d(3, 8, 3)).eval())
    only = "torchao quantizes weights of Linear only"
    assert str(caught.value) == f"steps.quantize: quantizes no weight of Sequential: {only}"
    with pytest.raises(NothingMatchesError, match="no weight of Sequential: it has none"):
        prepared(nn.Sequential().eval())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"scheme": "int8_dynamc"},
            "steps.quantize.scheme: 'int8_dynamc' is not a scheme; did you mean 'int8_dynamic'?",
        ),
        (
            {"schem": "int8_dynamic"},
            "steps.quantize.schem: no such option; did you mean 'scheme'?",
        ),
        (
            {"scheme": "int8_static"},
            "steps.quantize.scheme: 'int8_static' is not a scheme; PT2E quantizes an exported program",
        ),
        (
            {"group_size": 0},
            "steps.quantize.group_size: 0 is not a number of values; give one from 1 on, as in 32",
        ),
        (
            {"group_size": 32, "scheme": "int8_dynamic"},
            "steps.quantize.group_size: is for int8_weight_only: integers are multiplied along whole "
            "rows; drop one of the two",
        ),
    ],
)
def test_a_wrong_option_is_one_clear_line(options, message):
    with pytest.raises(ConfigError) as caught:
        Pipeline.from_config({"quantize": options})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_names_the_nearest(option):
    with pytest.raises(PatternError) as caught:
        prepared(**{option: ["frist"]})
    message = f"steps.quantize.{option}: 'frist' matches no Linear; did you mean 'first'?"
    assert str(caught.value) == message


def test_a_model_in_training_mode_is_refused():
    model = perceptron().train()
    with pytest.raises(RefusedError) as caught:
        prepared(model)
    assert str(caught.value) == (
        "steps.quantize: is for inference: weights in 8 bits cannot be trained; "
        'call model.eval() first, or drop it with "quantize": None'
    )
    assert not quantized(model)


def test_an_optimizer_of_quantized_weights_is_refused():
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters())
    wrong = "optimizer: holds first.weight and 1 more, which a step replaces with new parameters"
    with pytest.raises(RefusedError, match=wrong):
        Pipeline.from_config({"quantize": {}}).apply(model, optimizer=optimizer)
    assert not quantized(model)


def test_without_torchao_one_line_names_the_extra(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(quantize, "find_spec", lambda n: None if n == "torchao" else find(n))
    with pytest.raises(RefusedError) as caught:
        prepared()
    assert str(caught.value) == (
        "steps.quantize: needs the package torchao, which is not installed; "
        "install the extra: pip install 'torch-prepare[quantize]'"
    )


def test_layout_and_precision_come_first_in_any_order():
    first = {"conv2d_memory_format": {}, "half": {"dtype": "bfloat16"}, "input_format": {}}
    models = [
        Pipeline.from_config(steps).apply(perceptron())
        for steps in ({**first, "quantize": {}}, {"quantize": {}, **first})
    ]
    for model in models:
        assert model.patches.weight.is_contiguous(memory_format=torch.channels_last)
        assert (model.first.weight.dtype, model.first.bias.dtype) == (torch.bfloat16,) * 2
        assert torch.equal(model.first.weight.qdata, models[0].first.weight.qdata)
    output = models[0](IMAGE.bfloat16())
    assert output.dtype is torch.bfloat16


def test_a_cast_of_quantized_weights_is_refused():
    model, _, _ = prepared()
    with pytest.raises(RefusedError, match="prepare before sharding or quantizing"):
        Pipeline.from_config({"half": {"dtype": "bfloat16"}}).apply(model)


def test_norms_are_fused_before_weights_are_quantized():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4))
    reference = copy.deepcopy(model.eval())
    model, _, _ = prepared(model, steps={"fuse_conv_bn": {}})
    assert isinstance(model[1], nn.Identity)
    assert relative_error(model, reference) < 0.02


def test_quantizing_changes_no_setting_of_inductor_or_logging(caplog):
    from torch._inductor import config

    before = config.coordinate_descent_tuning, config.force_fuse_int_mm_with_mul
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.DEBUG):
        warnings.simplefilter("always")
        prepared()
    assert (config.coordinate_descent_tuning, config.force_fuse_int_mm_with_mul) == before
    assert not caught
    assert logging.root.manager.disable == logging.NOTSET


def test_a_cpu_without_vnni_gets_one_bit_less(monkeypatch):
    from torchao import utils

    monkeypatch.setattr(utils, "_cpu_is_vnni_supported", lambda: False)
    model, _, _ = prepared(scheme="int8_dynamic")
    assert int(model.first.weight.qdata.abs().max()) <= 64
    assert relative_error(model, perceptron()) < 0.04


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = perceptron()
    assert Pipeline.from_config({"quantize": {}}).plan(model).summary()["to_change"] == 2
    with pytest.raises(RefusedError) as caught:
        prepared(model)
    assert str(caught.value) == (
        "first.weight: meta holds no data to quantize; "
        "load the weights first, with prepare.checkpoint.load(path, model)"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(value):
    model = perceptron()
    model.second.weight.data[3, 4] = value
    with pytest.raises(RefusedError) as caught:
        prepared(model)
    assert str(caught.value) == (
        "second.weight: holds NaN or infinity, which would make NaN of all values with the same scale; "
        '"quantize": {"exclude": ["second"]}'
    )
    assert not quantized(model)


def test_a_float_copy_does_not_take_the_layout_of_8_bits():
    model, _, _ = prepared()
    for copied, reference in ((perceptron(), model), (model, perceptron())):
        wrong = (
            "first.weight: is in 8 bits in one of the two models only; give the copy the same steps"
        )
        with pytest.raises(RefusedError, match=wrong):
            like(copied, reference)


def test_copies_and_pickles_stay_quantized():
    model, _, pipeline = prepared()
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not pipeline.plan(duplicate)
        assert torch.equal(duplicate(IMAGE), model(IMAGE))


def test_a_state_dict_of_8_bits_can_be_saved_and_loaded():
    model, _, _ = prepared()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other, _, _ = prepared(Perceptron().eval())
    assert not torch.equal(other(IMAGE), model(IMAGE))
    other.load_state_dict(state)
    assert torch.equal(other(IMAGE), model(IMAGE))


def test_a_float_state_dict_is_refused_by_a_quantized_weight():
    model, _, _ = prepared()
    with pytest.raises(RefusedError) as caught:
        model.load_state_dict(perceptron().state_dict())
    assert str(caught.value) == (
        "first.weight: is in 8 bits, and the file holds float values; load first, then quantize; "
        "or prepare.steps.quantize.undo(model, weights) first"
    )
    assert quantized(model) == ["first", "second", "third"]


def test_undo_gives_the_exact_weights_back():
    reference = perceptron()
    weights = copy.deepcopy(reference.state_dict())
    model, _, _ = prepared()
    quantize.undo(model, weights)
    assert not quantized(model)
    assert model.second.weight is model.third.weight
    assert model.first.weight.requires_grad
    assert torch.equal(model(IMAGE), reference(IMAGE))
    model.load_state_dict(weights)  # no longer refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("first.weight"), "first.weight: is not in the weights"),
        (
            lambda state: state.update({"first.weight": torch.ones(2, 3)}),
            "first.weight: has the shape [2, 3] in the weights, and [128, 64] in the model",
        ),
        (
            lambda state: state.update({"first.weight": prepared()[0].first.weight}),
            "first.weight: is quantized in the weights, too",
        ),
    ],
)
def test_undo_without_the_float_weights_changes_nothing(change, message):
    model, _, _ = prepared()
    state = dict(perceptron().state_dict())
    change(state)
    with pytest.raises(RefusedError) as caught:
        quantize.undo(model, state)
    assert str(caught.value).startswith(message)
    assert quantized(model) == ["first", "second", "third"]


def test_a_failure_of_torchao_leaves_the_exact_weights(monkeypatch):
    from prepare.steps.quantizing import torchao_weights

    model, reference = perceptron(), perceptron()
    calls = []

    def fails(weight, grid, path):
        calls.append(weight)
        if len(calls) > 1:
            raise StepError("steps.quantize", "fails at the second weight")
        return original(weight, grid, path)

    original = torchao_weights.quantized
    monkeypatch.setattr(torchao_weights, "quantized", fails)
    with pytest.raises(StepError, match="second weight"):
        prepared(model)
    assert not quantized(model)
    assert torch.equal(model(IMAGE), reference(IMAGE))
    model.load_state_dict(reference.state_dict())


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_a_file_of_weights_neither_takes_nor_gives_8_bits(name, tmp_path):
    save(perceptron(), tmp_path / name)
    model, _, _ = prepared()
    with pytest.raises(RefusedError) as refused:
        load(tmp_path / name, model)
    words = "first.weight and 2 more: in 8 bits, and a file of weights holds float values; "
    assert str(refused.value) == words + "load before the step quantize"
    with pytest.raises(CheckpointError) as caught:
        save(model, tmp_path / name)
    remedy = "save before the step quantize, or with torch.save(model.state_dict())"
    assert str(caught.value).endswith(f", {words}{remedy}")


def test_a_file_is_loaded_before_weights_are_quantized(tmp_path):
    torch.manual_seed(1)
    other = Perceptron().eval()
    save(other, tmp_path / "w.safetensors")
    pipeline = Pipeline.from_config({"quantize": {}})
    model = perceptron()
    load(tmp_path / "w.safetensors", model, pipeline=pipeline)
    assert quantized(model) == ["first", "second", "third"]
    assert relative_error(model, other) < 0.02


def test_analyses_run_on_a_quantized_model():
    model, _, pipeline = prepared(steps={"conv2d_memory_format": {}})
    assert predict(model, IMAGE).status == observe(model, IMAGE).status == "ok"
    assert [row.name for row in compare({"a": perceptron(), "b": model}, IMAGE, budget=0.05).rows]
    recorded = contract.record(model, IMAGE)
    assert contract.check(model, IMAGE, recorded).status == "kept"
    assert not pipeline.check(model)


@pytest.mark.slow
@pytest.mark.parametrize("format_", ["torch_export", "onnx"])
def test_a_quantized_model_is_exported(format_, tmp_path):
    pipeline = Pipeline.from_config({"quantize": {}})
    done = export(perceptron(), IMAGE, to=format_, folder=tmp_path, pipeline=pipeline)
    assert done.status == "pass", done.reason


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8_weight_only", "int8_dynamic"])
def test_inductor_computes_the_same_values(scheme):
    model, _, _ = prepared(steps={"compile": {}}, scheme=scheme)
    eager, _, _ = prepared(scheme=scheme)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's cache and its C++ compiler
        torch.testing.assert_close(model(IMAGE), eager(IMAGE))


@pytest.mark.slow
def test_pt2e_gives_another_object_of_one_batch_size():
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    model = nn.Sequential(nn.Conv2d(3, 8, 3)).eval()
    Pipeline.from_config({"conv2d_memory_format": {}}).apply(model)
    image = torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        observed = prepare_pt2e(torch.export.export(model, (image,)).module(), quantizer)
        observed(image)
        converted = convert_pt2e(observed)
    assert type(converted) is not type(model)
    assert converted(image).is_contiguous(memory_format=torch.channels_last)
    assert any(t.dtype is torch.int8 for t in converted.buffers())
    for call in (converted.eval, converted.train):
        with pytest.raises(NotImplementedError):
            call()
    with pytest.raises(AssertionError, match=r"size\(\)\[0\] == 2"):
        converted(image[:1])
