"""Examples of several sizes: their names, their keys on the command line, and verdicts in words."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

import prepare
from prepare import Workload
from prepare.core.forward.example_input import build_examples, read_example
from prepare.core.forward.workload import (
    Size,
    for_each_size,
    head_of,
    naming,
    sizes_of,
    verdicts_text,
)
from prepare.errors import ConfigError, ModelError
from prepare.pipeline.shortcut import PLANS


def sized(*shapes, **how):
    return Workload([torch.zeros(shape) for shape in shapes], **how)


@pytest.mark.parametrize(
    ("shapes", "names"),
    [
        ([(1, 3, 8, 8), (4, 3, 8, 8)], ["batch 1", "batch 4"]),
        ([(2, 3, 8, 8), (2, 3, 16, 8)], ["8x8", "16x8"]),
        ([(1, 3, 8, 8), (4, 3, 16, 16)], ["1x3x8x8", "4x3x16x16"]),
        ([(1, 3, 8, 8), (1, 4, 8, 8)], ["1x3x8x8", "1x4x8x8"]),
        ([(8,), (16,)], ["batch 8", "batch 16"]),
        ([(2, 3)], ["batch 2"]),
    ],
)
def test_a_size_has_the_shortest_name_that_tells_it_from_the_others(shapes, names):
    assert [size.name for size in sized(*shapes).sizes] == names


def test_a_second_tensor_or_a_dtype_makes_longer_names():
    first = torch.zeros(1, 3)
    pairs = Workload([(first, torch.zeros(2)), (first, torch.zeros(4))])
    assert [size.name for size in pairs.sizes] == ["1x3, 2", "1x3, 4"]
    dtypes = Workload([first, first.double()])
    assert [size.name for size in dtypes.sizes] == ["1x3 float32", "1x3 float64"]


@pytest.mark.parametrize(
    ("shapes", "weights", "message"),
    [
        ([], None, "input.workload: holds no example; give one for each size"),
        ([(1, 2), (1, 2)], None, "input.workload[1]: has the same shapes as entry 0; give one of them, with the sum of their weights"),
        ([(1, 2), (2, 2)], [1], "input.workload: 1 weights are given for 2 examples; give one for each"),
        ([(1, 2)], [-1], "input.workload[0].weight: -1 is not a weight; give a number of calls, 0 or more"),
        ([(1, 2)], [10**5000], "input.workload[0].weight: a number of so many digits is not a weight; give a number of calls, 0 or more"),
        ([(1, 2)], [0], "input.workload: every weight is 0; give one above 0"),
    ],
)  # fmt: skip
def test_a_wrong_workload_is_one_line(shapes, weights, message):
    with pytest.raises(ConfigError) as wrong:
        sized(*shapes, weights=weights)
    assert str(wrong.value) == message


def test_what_takes_one_size_gets_that_with_the_most_weight():
    workload = sized((1, 3), (4, 3), weights=[1, 5])
    assert head_of(workload).shape == (4, 3)
    assert head_of(workload.examples[0]).shape == (1, 3)
    assert [size.weight for size, _ in sizes_of(workload)] == [1, 5]
    assert len(sizes_of("an example")) == 1
    assert prepare.Workload is Workload


def test_a_function_of_one_example_takes_the_heaviest_size():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    workload = sized((1, 3, 4, 4), (2, 3, 6, 6), weights=[1, 5])
    for follow in (prepare.predict, prepare.observe):
        found, expected = follow(model, workload), follow(model, workload.examples[1])
        assert (found.status, found.convolutions) == ("ok", expected.convolutions)
    named = Workload([{"x": torch.zeros(1, 2)}, {"x": torch.zeros(3, 2)}])
    assert (named.args, named.kwargs["x"].shape) == ((), (1, 2))


def test_a_workload_is_formatted_and_prepared_with():
    pipeline = prepare.Pipeline.from_config({"half": {"dtype": "bfloat16"}, "input_format": {}})
    formatted = pipeline.format(sized((1, 3), (4, 3), weights=[1, 5]))
    assert [each.dtype for each in formatted.examples] == [torch.bfloat16] * 2
    assert [size.weight for size in formatted.sizes] == [1, 5]
    model = prepare.prepare(nn.Conv2d(3, 4, 1).eval(), sized((1, 3, 4, 4), (2, 3, 4, 4)))
    assert list(PLANS[model].steps) == ["rewrite_conv"]


def test_a_function_is_called_for_each_size_with_its_own_values():
    class Total(int):
        @classmethod
        def merged(cls, found):
            return [(size.name, number) for size, number in found]

    @for_each_size("batch", "took")
    def count(batch, took=0):
        return Total(len(batch) + took)

    assert count(torch.zeros(3, 2), 1) == 4
    assert count(sized((1, 2), (4, 2)), took=(10, 20)) == [("batch 1", 11), ("batch 4", 24)]
    assert count(sized((1, 2), (4, 2)), took=1) == [("batch 1", 2), ("batch 4", 5)]
    assert count(sized((5, 2))) == 5


def test_an_error_of_the_model_names_the_size():
    with (
        pytest.raises(ModelError, match=r"^conv: at batch 4: too small$"),
        naming(Size("batch 4", 1, 4)),
    ):
        raise ModelError("conv", "too small")


IMAGE = {"shape": [2, 3, 8, 8], "dtype": "float64", "low": None}


def test_an_entry_inherits_the_keys_that_it_does_not_give():
    entries = [{"weight": 10}, {"shape": [1, 3, 4, 4]}, {"args": [{"shape": [1]}, 0.5]}]
    (first, ten), (second, one), (third, _) = build_examples(IMAGE | {"workload": entries})
    assert (first.args[0].shape, first.args[0].dtype, ten) == ((2, 3, 8, 8), torch.float64, 10.0)
    assert (second.args[0].shape, second.args[0].dtype, one) == ((1, 3, 4, 4), torch.float64, 1.0)
    assert [third.args[0].shape, third.args[1]] == [(1,), 0.5]
    assert first.args[0].equal(build_examples(IMAGE)[0][0].args[0])
    assert read_example({"workload": [{"factory": "my.batch"}]}).factory == "my.batch"


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (3, "input.workload: 3 is not allowed; give a list, as in [{shape: [1,3,64,64], weight: 10}, {shape: [4,3,64,64]}]"),
        ([], "input.workload: holds no entry; give a list, as in [{shape: [1,3,64,64], weight: 10}, {shape: [4,3,64,64]}], or null"),
        ([[1, 2]], "input.workload[0]: [1, 2] is not a mapping; give the keys of an example, as in {shape: [1,3,64,64], weight: 10}"),
        ([{"shpae": [1]}], "input.workload[0].shpae: no such key; did you mean 'shape'? keys: shape, dtype, low, high, args, kwargs, factory, weight"),
        ([{}, {"weight": "x"}], "input.workload[1].weight: 'x' is not allowed; give a number of calls"),
        ([{"weight": -1}], "input.workload[0].weight: -1 is not a weight; give a number of calls, 0 or more"),
        ([{"shape": [0]}], "input.workload[0].shape: [0] holds a size below 1; give a list of sizes, as in [2,3,64,64]"),
        ([{"shape": [1], "args": [2]}], "input.workload[0].shape: is set together with input.workload[0].args; drop one of them, with input.workload[0].shape=null or input.workload[0].args=null"),
        ([{"workload": []}], "input.workload[0].workload: no such key; keys: shape, dtype, low, high, args, kwargs, factory, weight"),
    ],
)  # fmt: skip
def test_a_wrong_entry_is_one_line(workload, message):
    with pytest.raises(ConfigError) as wrong:
        read_example(IMAGE | {"workload": workload})
    assert str(wrong.value) == message


def test_an_entry_without_an_input_is_wrong():
    with pytest.raises(ConfigError, match=r"input\.workload\[0\]: declares no input"):
        read_example({"workload": [{"weight": 2}]})


class Row(NamedTuple):
    verdict: str
    ratio: float | None
    ratio_interval: tuple[float, float] | None = None


FASTER, SLOWER, SAME = ("faster", 0.8), ("slower", 1.08), ("no difference", 1.0)


@pytest.mark.parametrize(
    ("verdicts", "text"),
    [
        ([SLOWER, FASTER, ("faster", 0.5)], "up to 2.0x faster from batch 4 on; 1.08x slower at batch 1"),
        ([FASTER, FASTER, SLOWER], "up to 1.2x faster at batch 4 and below; 1.08x slower at batch 8"),
        ([FASTER, SLOWER, FASTER], "up to 1.2x faster at batch 1, batch 8; 1.08x slower at batch 4"),
        ([SAME, SAME, FASTER], "1.2x faster at batch 8; no difference at batch 4 and below"),
        ([SLOWER, SLOWER, ("faster", 0.02, (0.002, 0.2))], "over 5x faster at batch 8; up to 1.08x slower at batch 4 and below"),
        ([SLOWER, FASTER, ("faster", 0.02, (0.002, 0.2))], "up to 5.0x faster from batch 4 on; 1.08x slower at batch 1"),
        ([("unclear", 1.1), ("failed", None), ("slower", 4.0)], "4.0x slower at batch 8; unclear at batch 1; failed at batch 4"),
    ],
)  # fmt: skip
def test_verdicts_are_told_by_where_they_change(verdicts, text):
    sizes = [Size(f"batch {count}", 1.0, count) for count in (1, 4, 8)]
    rows = [Row(*verdict) for verdict in verdicts]
    found = dict(zip(sizes, rows, strict=True))
    assert verdicts_text(found) == verdicts_text(dict(reversed(found.items()))) == text
