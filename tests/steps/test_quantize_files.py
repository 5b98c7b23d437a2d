"""Copies, files, undo, export and compilers of a model in 8 bits."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

from prepare.checkpoint import load, save
from prepare.errors import CheckpointError, RefusedError, StepError
from prepare.pipeline import Pipeline
from prepare.stages import contract
from prepare.stages.bench import compare
from prepare.stages.export import export
from prepare.stages.flow import observe, predict
from prepare.steps import quantize
from quantize_checks import IMAGE, NEEDS_TORCHAO, prepared, quantized, relative_error
from small_nets import Perceptron, perceptron

pytestmark = NEEDS_TORCHAO


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
    from prepare.steps import _quantizing

    model, reference = perceptron(), perceptron()
    calls = []

    def fails(weight, grid, path):
        calls.append(weight)
        if len(calls) > 1:
            raise StepError("steps.quantize", "fails at the second weight")
        return original(weight, grid, path)

    original = _quantizing.quantized
    monkeypatch.setattr(_quantizing, "quantized", fails)
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
