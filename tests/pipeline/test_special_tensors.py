"""Views with a conjugate or negative bit, sparse forms, and numbers that a new dtype cannot hold."""

import copy
import warnings

import pytest
import torch
from torch import nn

from prepare import checkpoint
from prepare.audit import audit
from prepare.errors import CheckpointError, RefusedError
from prepare.pipeline import Pipeline, like
from random_models import FORMS

BF16 = {"half": {"dtype": "bfloat16"}}
CLAMPED = {"half": {"dtype": "bfloat16", "clamp": True}}
LOWEST = torch.finfo(torch.float32).min
pytestmark = pytest.mark.filterwarnings("ignore:.*(Sparse|nested|quantize).*")


class Holder(nn.Module):
    """A linear layer with buffers."""

    def __init__(self, **buffers):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

    def forward(self, x):
        return self.linear(x)


class Masked(Holder):
    """A softmax over rows, of which the first is masked whole."""

    def forward(self, x):
        return (self.linear(x) + self.mask).softmax(-1)


def masked():
    return Masked(mask=torch.tensor([[LOWEST, LOWEST], [0.0, 0.0]])).eval()


def conjugates():
    weight = torch.randn(2, 3, dtype=torch.complex64)
    return Holder(weight=weight, adjoint=weight.conj())


def form(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FORMS[name]()


def test_a_conjugate_beside_its_tensor_is_saved_as_itself(tmp_path):
    model, path = conjugates(), tmp_path / "weights.safetensors"
    checkpoint.save(model, path)
    loaded = Holder(weight=torch.zeros(2, 3) * 1j, adjoint=torch.zeros(2, 3) * 1j)
    checkpoint.load(path, loaded)
    assert torch.equal(loaded.adjoint, model.adjoint)
    assert torch.equal(loaded.weight, model.weight)


def test_a_negative_view_keeps_its_sign_in_a_cast():
    values = torch.randn(3, dtype=torch.complex64)
    model = Holder(
        imag=values.imag, negative=values.conj().imag, other=torch._neg_view(torch.ones(2))
    )
    expected = copy.deepcopy(model).bfloat16()
    plan = Pipeline.from_config(BF16).plan(model)
    assert [row.shared_with for row in plan.tensors if row.tensor == "imag"] == [()]
    model.imag, model.negative = (t.contiguous().clone() for t in (model.imag, model.negative))
    Pipeline.from_config(BF16).apply(model)
    for name, buffer in expected.named_buffers():
        assert torch.equal(getattr(model, name), buffer), name


@pytest.mark.parametrize("name", [name for name in FORMS if name != "quantized"])
def test_a_form_that_no_cast_reaches_is_refused_by_name(name):
    model = Holder(graph=form(name))
    with pytest.raises(RefusedError, match=r"^graph: is (sparse_\w+|mkldnn|nested), whose parts"):
        Pipeline.from_config(BF16).apply(model)
    assert model.graph.dtype is model.linear.weight.dtype is torch.float32
    Pipeline.from_config({"conv2d_memory_format": {}}).apply(model, strict=False)
    assert all(row.status != "ineffective" for row in audit(model).rows)
    with pytest.raises(RefusedError, match=r"^graph: "):
        reference = Holder(graph=torch.eye(4) if name != "nested" else form(name)).bfloat16()
        like(model, reference)


@pytest.mark.parametrize("name", FORMS)
def test_a_checkpoint_of_such_a_form_is_refused_by_name(name, tmp_path):
    model = Holder(graph=form(name))
    with pytest.raises(CheckpointError, match="graph: is no dense tensor"):
        checkpoint.save(model, tmp_path / "weights.safetensors")
    torch.save(Holder().state_dict(), tmp_path / "without.pt")
    checkpoint.load(tmp_path / "without.pt", model, strict=False)


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(1, 2))])
@pytest.mark.parametrize("step", ["eval_mode", "repair_layout", "fuse_conv_bn", "half"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_is_refused_in_one_line(step, make):
    model = nn.Sequential(make(nn.Sequential(nn.Linear(2, 2)).train()))
    with pytest.raises(RefusedError, match=r"^0: is a \w+: its modules cannot be seen or changed"):
        Pipeline.from_config({step: {}}).apply(model, strict=False)
    with pytest.raises(RefusedError, match=r"^0: is a "):
        like(model, model)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: torch.tensor([0.0, LOWEST]), "bfloat16"),
        (lambda: torch.ones(2**19).index_fill(0, torch.tensor([2**18]), LOWEST), "bfloat16"),
        (lambda: torch.tensor([1e300], dtype=torch.float64), "bfloat16"),
        (lambda: torch.tensor([1e300], dtype=torch.float64), "float16"),
        (lambda: torch.tensor([[0, 7e4]]).to_sparse(), "float16"),
        (lambda: torch.sparse_coo_tensor([[0, 0], [1, 1]], [4e4, 4e4], (2, 2)), "float16"),
    ],
)
def test_a_number_that_would_become_infinite_is_refused(make, dtype):
    tensor = make()
    model = Holder(mask=tensor)
    with pytest.raises(RefusedError, match=r"^mask: 1 of its values would become inf: .*clamp"):
        Pipeline.from_config({"half": {"dtype": dtype}}).apply(model)
    assert model.mask is tensor
    assert tensor.dtype is not getattr(torch, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_clamp_gives_the_largest_number_and_keeps_infinities(dtype):
    values = torch.randn(2**16)
    values[:5] = torch.tensor([LOWEST, -LOWEST, torch.inf, -torch.inf, torch.nan])
    sparse = values[:3].double().mul(1e-3).to_sparse()
    model = Holder(mask=values.clone(), sparse=sparse, plain=torch.randn(3))
    pipeline = Pipeline.from_config({"half": {"dtype": dtype, "clamp": True}})
    pipeline.apply(model)
    largest = torch.finfo(getattr(torch, dtype)).max
    assert model.mask[:4].tolist() == [-largest, largest, torch.inf, -torch.inf]
    assert model.mask[4].isnan()
    assert torch.equal(model.mask[5:], values[5:].to(model.mask.dtype))
    assert model.sparse.to_dense().tolist() == [-largest, largest, torch.inf] or dtype == "bfloat16"
    assert not pipeline.plan(model)
    assert Pipeline.from_config(pipeline.to_config()).steps["half"].clamp


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_load_into_a_narrower_dtype_refuses_or_clamps(suffix, tmp_path):
    path = tmp_path / f"weights{suffix}"
    holder = Holder(mask=torch.tensor([1e300, 1.0], dtype=torch.float64))
    if suffix == ".pt":
        torch.save(holder.state_dict(), path)
    else:
        checkpoint.save(holder, path)
    model = Holder(mask=torch.zeros(2))
    with pytest.raises(RefusedError, match="^mask: 1 of its values .* largest float32 .*float64"):
        checkpoint.load(path, model)
    with pytest.raises(RefusedError, match="^mask: 1 of its values .* largest"):
        checkpoint.load(path, model, pipeline=Pipeline.from_config(BF16))
    assert model.mask.tolist() == [0.0, 0.0]
    checkpoint.load(path, model, pipeline=Pipeline.from_config(CLAMPED))
    assert model.mask.tolist() == [torch.finfo(torch.bfloat16).max, 1.0]


def test_an_expanded_tensor_is_cast_without_being_written_out():
    model = Holder(mask=torch.randn(3, 1).expand(3, 4))
    Pipeline.from_config(BF16).apply(model)
    assert (model.mask.stride(), model.mask.untyped_storage().nbytes()) == ((1, 0), 6)
