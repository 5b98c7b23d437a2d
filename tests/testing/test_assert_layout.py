"""`assert_layout`: it names what loses the layout, at which line, and the step that keeps it."""

import copy
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from prepare.pipeline import Pipeline
from prepare.testing import assert_layout

FORMAT = {"conv2d_memory_format": {}}
KEPT = FORMAT | {"keep_layout": {}}


class Net(nn.Module):
    """Loses the layout once, at the marked line, if it is told to."""

    def __init__(self, loses: bool = True) -> None:
        super().__init__()
        self.first, self.last, self.loses = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), loses

    def forward(self, x, scale=1.0):
        x = self.first(x) * scale
        if self.loses:
            x = x.contiguous()  # the line
        return self.last(x)


class Needy(Net):
    """Asks for a value after it lost the layout."""

    def forward(self, x):
        x = super().forward(x)
        return x if x.sum() > 0 else -x


def line() -> str:
    """Return `test_assert_layout.py:NUMBER` of the marked line."""
    lines = Path(__file__).read_text().splitlines()
    number = next(n for n, text in enumerate(lines, 1) if text.endswith("# the line"))
    return f"{Path(__file__).name}:{number}"


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (2, 3, 34, 34))


def prepared(model: nn.Module, steps: dict = FORMAT) -> nn.Module:
    return Pipeline.from_config(steps).apply(model.eval(), example=batch())


def told(model: nn.Module, given: object, **options: object) -> list[str]:
    with pytest.raises(AssertionError) as raised:
        assert_layout(model, given, **options)
    return str(raised.value).splitlines()


def test_a_loss_has_its_line_its_bytes_and_the_step_that_keeps_it():
    found, advice = told(prepared(Net()), batch())
    assert found.startswith("forward: clone (")
    assert f"{line()}) " in found
    assert "64.0 KiB" in found  # 2 samples of 8 channels of 32 x 32 float32
    assert "the step keep_layout" in advice
    assert "1 of 1 place" in advice


def test_a_network_that_keeps_the_layout_passes():
    assert_layout(prepared(Net(loses=False)), batch())


@pytest.mark.parametrize("given", [{"x": batch(), "scale": 2.0}, (batch(), 2.0), (batch(),)])
def test_a_batch_is_a_mapping_or_a_tuple_of_arguments(given):
    assert_layout(prepared(Net(loses=False)), given)
    assert line() in told(prepared(Net()), given)[0]


def test_the_step_that_was_advised_passes_prepared_or_not():
    pipeline = Pipeline.from_config(KEPT)
    assert_layout(Net().eval(), batch(), pipeline=pipeline)
    model = pipeline.apply(Net().eval(), example=batch())
    assert_layout(model, batch())
    assert_layout(model, batch(), pipeline=pipeline)


def test_an_unprepared_model_is_judged_as_it_would_be_prepared():
    pipeline = Pipeline.from_config(FORMAT)
    assert line() in told(Net().eval(), batch(), pipeline=pipeline)[0]
    assert_layout(Net(loses=False).eval(), batch(), pipeline=pipeline)
    half = Pipeline.from_config(FORMAT | {"half": {"dtype": "bfloat16"}, "input_format": {}})
    assert "32.0 KiB" in told(Net().eval(), batch(), pipeline=half)[0]


def test_a_forward_that_cannot_be_predicted_does_not_pass():
    found, why, *_ = told(prepared(Needy()), batch())
    assert line() in found
    assert "value" in why


class Before(NamedTuple):
    """The state that a check must leave as it was."""

    layouts: list
    classes: list[type]
    values: list[torch.Tensor]
    hooks: list[int]
    options: dict

    @classmethod
    def of(cls, model: nn.Module, pipeline: Pipeline) -> "Before":
        hooks = [len(each._forward_pre_hooks) for each in model.modules()]
        values = copy.deepcopy(list(model.state_dict().values()))
        layouts = [(name, t.stride(), t.dtype) for name, t in model.state_dict().items()]
        return cls(layouts, [*map(type, model.modules())], values, hooks,
                   pipeline.to_config())  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
def test_model_batch_and_pipeline_stay_as_they_were(training):
    model, given = Net().train(training), batch()
    pipeline = Pipeline.from_config(KEPT | {"half": {}, "input_format": {"attach": True}})
    before, numbers, random = Before.of(model, pipeline), given.clone(), torch.get_rng_state()
    assert_layout(model, given, pipeline=pipeline)
    after = Before.of(model, pipeline)
    assert after._replace(values=[]) == before._replace(values=[])
    assert all(map(torch.equal, after.values, before.values))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(given, numbers)
    assert torch.equal(torch.get_rng_state(), random)
    assert given.is_contiguous()
    assert model.training == training
