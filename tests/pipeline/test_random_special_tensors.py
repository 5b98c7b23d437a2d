"""Random models with views, sparse tensors and large numbers are exact afterwards, or refused by name."""

import pytest
import torch
from hypothesis import strategies as st

from prepare.audit import audit
from prepare.core.model.tensors import named_tensors, stored_values
from prepare.errors import RefusedError
from prepare.pipeline import Pipeline
from random_models import SPECIAL_SPECS
from small_nets import bits, facts, tensors
from test_random_models import for_all

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(Sparse|nested|quantize).*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize.*:DeprecationWarning"),
]
HALF = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["float16", "bfloat16"]),
        "keep": st.sampled_from([[], "norms"]),
        "clamp": st.booleans(),
    }
)
STEPS = st.one_of(
    st.fixed_dictionaries({"half": HALF}),
    st.fixed_dictionaries({"half": HALF, "conv2d_memory_format": st.just({})}),
    st.fixed_dictionaries({"conv2d_memory_format": st.just({}), "device": st.just({})}),
)


def dense(tensor):
    """The values of a tensor with strides, which no view has in common with another."""
    if tensor.is_nested or tensor.is_quantized:
        return tensor
    tensor = tensor.detach()
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return tensor.resolve_conj().resolve_neg().clone()


def expected(tensor, dtype, *, clamp):
    """The values in `dtype`: as torch casts them, or clamped."""
    if not clamp:
        return dense(tensor.to(dtype))
    before = dense(tensor)  # values of one place are added up before they are clamped
    cast, largest = before.to(dtype), torch.finfo(dtype).max
    lost = before.isfinite() & ~cast.isfinite()
    return torch.where(lost, before.clamp(-largest, largest).to(dtype), cast)


def overflows(tensor, dtype):
    values = dense(tensor)
    return bool((values.isfinite() & ~values.to(dtype).isfinite()).any())


def check_exact(start, model, *, clamp):
    for name, tensor in tensors(model).items():
        assert stored_values(tensor).dtype == tensor.dtype, name
        if tensor.dtype is start[name].dtype:
            assert bits(dense(tensor)) == bits(dense(start[name])), name
            continue
        wanted = expected(start[name], tensor.dtype, clamp=clamp)
        assert bits(dense(tensor)) == bits(wanted), name
        assert clamp or not overflows(start[name], tensor.dtype), name


def check_named(error, model):
    """Every problem names tensors of the model, in one line."""
    paths = {place.path for place in named_tensors(model)}
    for problem in error.problems:
        assert "\n" not in str(problem)
        assert any(path in problem.where for path in paths), problem


@for_all(st.tuples(SPECIAL_SPECS, STEPS))
def test_special_tensors_are_exact_or_refused_by_name(case):
    spec, steps = case
    model, start, pipeline = spec.build(), tensors(spec.build()), Pipeline.from_config(steps)
    before, plan, clamp = facts(model), pipeline.plan(model), steps.get("half", {}).get("clamp")
    assert facts(model) == before
    try:
        pipeline.apply(model, strict=False, known_issues="ignore")
    except RefusedError as error:
        check_named(error, model)
        assert facts(model) == before
        return
    check_exact(start, model, clamp=clamp)
    assert shared(model) == shared(spec.build())
    assert not pipeline.plan(model)
    statuses = {(r.module, r.tensor, r.kind): r.status for r in audit(model, plan=plan).rows}
    for planned in plan.tensors:
        if planned.kind != "computed" and planned.changes:
            assert statuses[planned.module, planned.tensor, planned.kind] == "converted"


def shared(model):
    """The names of the strided tensors in each storage."""
    names = {}
    for name, tensor in tensors(model).items():
        if tensor.layout is torch.strided and not tensor.is_nested and tensor.numel():
            names.setdefault(tensor.untyped_storage().data_ptr(), set()).add(name)
    return sorted(map(sorted, names.values()))
