"""Models that are refused in one line that says what to do."""

import pytest
import torch
from torch import nn

from awkward_checks import FLAT, HALF, apply, refused
from prepare.errors import NothingMatchesError, RefusedError
from small_nets import small_2d


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
    assert "then script" in said
    with pytest.raises((RefusedError, NothingMatchesError), match="script or trace|no Conv2d"):
        apply(model, FLAT)


def test_a_compiled_model_is_refused_unless_there_is_nothing_to_do():
    wrapped = torch.compile(small_2d(), backend="eager")
    assert "prepare first, then compile" in refused(wrapped, FLAT)
    in_place = small_2d()
    in_place.compile(backend="eager")
    assert "prepare first, then compile" in refused(in_place, FLAT)
    prepared = apply(small_2d(), FLAT)
    prepared.compile(backend="eager")
    apply(prepared, FLAT)


def test_a_tensor_subclass_with_its_own_dispatch_is_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Conv2d(2, 2, 3)
    model.weight = nn.Parameter(TwoTensor(torch.randn(2, 2, 3, 3), torch.randn(2, 2, 3, 3)))
    with pytest.raises(RefusedError, match="weight: TwoTensor defines its own meaning of dtype"):
        apply(model, HALF)


def test_tensors_made_in_inference_mode_are_refused():
    with torch.inference_mode():
        model = small_2d()
    assert "made in torch.inference_mode" in refused(model, FLAT)


def test_parameters_that_hold_a_grad_are_refused():
    model = small_2d()
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert "holds a .grad" in refused(model, FLAT)
    model.zero_grad(set_to_none=True)
    apply(model, FLAT)
