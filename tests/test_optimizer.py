"""An optimizer handed over keeps its state in line: the same weights, fused, foreach or plain."""

import copy

import pytest
import torch
from torch import nn

from networks import facts
from prepare.errors import RefusedError
from prepare.pipeline import Pipeline

FLAT = Pipeline.from_config({"conv2d_memory_format": {}})
BACK = Pipeline.from_config({"conv2d_memory_format": {"memory_format": "contiguous"}})
IMPLEMENTATIONS = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
OPTIMIZERS = {
    "Adam": lambda p, **k: torch.optim.Adam(p, lr=1e-2, amsgrad=True, **k),
    "AdamW": lambda p, **k: torch.optim.AdamW(p, lr=1e-2, **k),
    "SGD": lambda p, **k: torch.optim.SGD(p, lr=1e-2, momentum=0.9, **k),
    "Adagrad": lambda p, **k: torch.optim.Adagrad(p, lr=1e-2, **k),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
    ).double()


def train(model, optimizer, steps=3):
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        model(torch.randn(2, 3, 12, 12, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def worst(model, reference):
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def in_line(optimizer):
    for parameter, state in optimizer.state.items():
        for tensor in state.values():
            if torch.is_tensor(tensor) and tensor.shape == parameter.shape:
                assert (tensor.stride(), tensor.dtype) == (parameter.stride(), parameter.dtype)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_preparing_midway_with_the_optimizer_gives_the_same_weights(kind, how):
    model, reference = network(), network()
    optimizer = OPTIMIZERS[kind](model.parameters(), **IMPLEMENTATIONS[how])
    other = OPTIMIZERS[kind](reference.parameters(), **IMPLEMENTATIONS[how])
    train(model, optimizer)
    train(reference, other)
    FLAT.apply(model, optimizer=optimizer)
    in_line(optimizer)
    train(model, optimizer)
    train(reference, other)
    assert worst(model, reference) < 1e-7


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("start", ["contiguous", "channels_last"])
def test_resuming_a_checkpoint_of_the_other_layout_gives_the_same_weights(kind, how, start):
    reference = network()
    other = OPTIMIZERS[kind](reference.parameters(), **IMPLEMENTATIONS[how])
    if start == "channels_last":
        FLAT.apply(reference, optimizer=other)
    train(reference, other)
    saved = copy.deepcopy((reference.state_dict(), other.state_dict()))

    model = network()
    optimizer = OPTIMIZERS[kind](model.parameters(), **IMPLEMENTATIONS[how])
    (BACK if start == "channels_last" else FLAT).apply(model, optimizer=optimizer)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    in_line(optimizer)
    train(model, optimizer)
    train(reference, other)
    assert worst(model, reference) < 1e-7


def test_without_the_optimizer_a_fused_one_corrupts_the_weights():
    """Why `optimizer=` is there: torch says nothing, and the weights are wrong."""
    model, reference = network(), network()
    optimizer, other = (
        torch.optim.Adam(m.parameters(), lr=1e-2, fused=True) for m in (model, reference)
    )
    train(model, optimizer)
    train(reference, other)
    FLAT.apply(model)
    train(model, optimizer)
    train(reference, other)
    assert worst(model, reference) > 1e-3


def test_the_state_follows_a_cast_and_counters_are_left_alone():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    steps = [state["step"].clone() for state in optimizer.state.values()]
    Pipeline.from_config({"half": {"dtype": "bfloat16", "keep": []}}).apply(
        model, optimizer=optimizer
    )
    in_line(optimizer)
    assert [state["step"] for state in optimizer.state.values()] == steps
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


def test_training_in_float16_is_refused_with_advice():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    before = facts(model)
    with pytest.raises(
        RefusedError, match="GradScaler refuses.*use torch.autocast, or take dtype: bfloat16"
    ):
        Pipeline.from_config({"half": {}}).apply(model, optimizer=optimizer)
    assert facts(model) == before


def test_the_hook_is_installed_once_and_a_failure_leaves_the_state_alone():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    before = {id(p): {k: v.stride() for k, v in s.items()} for p, s in optimizer.state.items()}
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    with pytest.raises(RefusedError, match="holds a .grad"):
        FLAT.apply(model, optimizer=optimizer)
    assert {
        id(p): {k: v.stride() for k, v in s.items()} for p, s in optimizer.state.items()
    } == before
    assert not optimizer._optimizer_load_state_dict_post_hooks
    model[0].weight.grad = None
    FLAT.apply(FLAT.apply(model, optimizer=optimizer), optimizer=optimizer)
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == 1


def test_a_state_that_is_out_of_line_is_mended_where_the_model_needs_nothing():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    train(model, optimizer)
    FLAT.apply(model)
    FLAT.apply(model, optimizer=optimizer)
    in_line(optimizer)
