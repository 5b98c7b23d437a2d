"""An example input, read and run: what is said of it, and of a forward that fails."""

import pytest
import torch
from torch import nn

from prepare.core.forward.example_input import Example, build_example, read_example
from prepare.core.forward.run_example import run_example
from prepare.errors import ConfigError, ModelError

DEFAULT = dict.fromkeys(("shape", "low", "high", "args", "kwargs")) | {"dtype": "float32"}


# ----------------------------------------------------------------------------------------- forward


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        raise RuntimeError(f"after {self.conv(x).shape[0]}")


def test_a_failing_forward_names_the_innermost_module():
    line = r"tests/core/test_run_example.py:\d+, in forward"
    with pytest.raises(
        ModelError, match=rf"^forward of 1 \(Fails\): .*{line}: RuntimeError: after 2$"
    ):
        run_example(nn.Sequential(nn.Identity(), Fails()), Example((torch.randn(2, 3, 4, 4),)))


# ----------------------------------------------------------------------------------------- example


def build(**config):
    return build_example({**DEFAULT, **config})


def test_the_seed_decides_and_torchs_own_numbers_are_left_alone():
    before, config = torch.get_rng_state(), {**DEFAULT, "shape": [8]}
    first, again, other = (build_example(config, seed).args[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_bounds_hold_and_integers_reach_all_but_the_last():
    (ids,) = build(shape=[1000], dtype="int64", low=3, high=6).args
    assert set(ids.tolist()) == {3, 4, 5}
    (floats,) = build(shape=[1000], low=-2, high=-1.5).args
    assert floats.min() >= -2
    assert floats.max() < -1.5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"shape": 3}, "input.shape: 3 is not allowed; give a list of sizes, as in [2,3,64,64]"),
        ({"shape": [2.0]}, "input.shape: [2.0] is not allowed; give a list of sizes, as in [2,3,64,64]"),
        ({"shape": [True]}, "input.shape: [True] is not allowed; give a list of sizes, as in [2,3,64,64]"),
        ({"shape": [1], "low": "a"}, "input.low: 'a' is not allowed; give a number or null"),
        ({"shape": [1], "low": 2}, "input.high: [2, 1.0) holds no number; values are in [low, high), by default in [0, 1)"),
        ({"shape": [1], "dtype": "int8", "high": 2.5}, "input.high: [0.0, 2.5) has no whole bounds; the dtype is int8"),
        ({"shape": [1], "dtype": "int8", "low": 3}, "input.high: is missing for int8; give the first number that is too high, as in input.high=1000 for 0 to 999"),
        ({"args": {"a": 1}}, "input.args: {'a': 1} is not allowed; give a list, as in [item,item]"),
        ({"kwargs": [1]}, "input.kwargs: [1] is not allowed; give a mapping, as in {name:item}"),
        ({"args": [{}]}, "input.args[0].shape: is missing; give a list of sizes, as in [2,3,64,64]"),
        ({"args": [1, {"shape": [1], "dtype": "flot16"}]}, "input.args[1].dtype: 'flot16' is not allowed; did you mean 'float16'? allowed: "),
        ({"kwargs": {"ids": {"shap": [1]}}}, "input.kwargs.ids.shap: no such key; did you mean 'shape'? keys: shape, dtype, low, high"),
        ({"shape": [1], "args": [1]}, "input.shape: is set together with input.args; drop one of them, with input.shape=null or input.args=null"),
    ],
)  # fmt: skip
def test_a_wrong_example_says_where_and_what_to_do(config, message):
    with pytest.raises(ConfigError) as caught:
        read_example({**DEFAULT, **config})
    assert str(caught.value).startswith(message)
