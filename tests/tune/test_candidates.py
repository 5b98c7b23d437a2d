"""The candidates of a tuning: which recipes are tried for a model."""

import json

import pytest
import torch
from torch import nn

from keeping_nets import chunked
from prepare.pipeline import Pipeline
from prepare.registry import STEPS
from prepare.stages.tune.candidates import AS_DECLARED, candidates
from prepare.stages.tune.records import UNPREPARED
from sample_nets import small, wrong_in_training


def names(model, *, declared=None, allow=(), mode="eval"):
    model.train(mode == "train")
    found = candidates(model, declared=declared or {}, allow=allow, mode=mode)
    assert len({each.name for each in found}) == len(found)
    assert len({json.dumps(each.steps) for each in found}) == len(found)
    return [each.name for each in found]


def test_formats_match_the_ranks_of_the_convolutions():
    convs = nn.Conv2d(3, 8, 3), nn.Conv3d(3, 8, 3)
    assert names(convs[0]) == [
        UNPREPARED,
        "channels_last + input + packed",
        "channels_last + input",
        "channels_last",
    ]
    kept = [n for n in names(convs[1]) if "repair" not in n]
    inputs = "channels_last_3d + input"
    assert kept == [UNPREPARED, f"{inputs} + packed", inputs, "channels_last_3d"]
    assert not any("packed" in name for name in names(convs[0], mode="train"))
    assert [n for n in names(nn.Sequential(*convs)) if not {"input", "repair"} & {*n.split()}] == [
        UNPREPARED, "by_rank", "channels_last", "channels_last_3d"]  # fmt: skip
    assert names(nn.Linear(3, 3)) == [UNPREPARED]


def test_repairs_are_tried_where_they_have_an_effect():
    found = names(wrong_in_training(), mode="train")
    assert "channels_last + repair" in found
    assert not any("repair" in name for name in names(small()))


def test_calls_are_replaced_where_inputs_are_formatted():
    model = chunked().to(memory_format=torch.contiguous_format)
    found = candidates(model, declared={}, allow=("compile",), mode="eval")
    kept = [each for each in found if "keep_layout" in each.steps]
    assert "channels_last_3d + input + keep" in [each.name for each in kept]
    assert not any("keep" in each.name for each in found if "compile" in each.steps)
    assert all("input_format" in each.steps for each in kept)
    without = [each for each in found if each.name == "channels_last_3d + input"]
    assert kept[0].cost > without[0].cost
    assert not any("keep" in name for name in names(small()))


def test_bfloat16_training_in_3d_is_tried_only_with_repairs():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv3d(3, 8, 3))
    allow = ("bfloat16", "compile")
    found = candidates(model.train(), declared={}, allow=allow, mode="train")
    low = {each.name: each for each in found if "half" in each.steps}
    assert {"bfloat16 + repair", "bfloat16 + channels_last + repair"} < set(low)
    assert {"compile" in each.steps for each in low.values()} == {False, True}
    for each in low.values():
        pipeline = Pipeline.from_config(each.steps)
        said = [str(warning) for warning in pipeline.plan(model).warnings]
        assert not any("conv3d_bfloat16_small_cpu" in warning for warning in said)
    for kind, mode in ((nn.Conv2d, "train"), (nn.Conv3d, "eval")):
        assert "bfloat16" in names(kind(3, 8, 3), allow=allow, mode=mode)


@pytest.mark.skipif("fuse_conv_bn" not in STEPS, reason="there is no such step")
def test_norms_are_fused_only_in_inference():
    assert "fuse" in names(small())
    assert "channels_last + fuse" in names(small())
    assert not any("fuse" in name for name in names(small(), mode="train"))
    assert not any("fuse" in name for name in names(nn.Conv2d(3, 8, 3)))


@pytest.mark.parametrize("word", ["bfloat16", "half"])
def test_16_bit_recipes_are_tried_where_allowed(word):
    assert not any(word in name for name in names(small()))
    model = small().eval()
    found = candidates(model, declared={}, allow=(word,), mode="eval")
    low = [each for each in found if word in each.name]
    assert {"half", "input_format"} < {name for each in low for name in each.steps}
    assert all(each.steps["input_format"]["attach"] for each in low)
    assert {each.steps["half"]["dtype"] for each in low} == {"float16" if word == "half" else word}


@pytest.mark.skipif("compile" not in STEPS, reason="there is no such step")
def test_compilers_are_tried_where_allowed_frozen_in_inference():
    assert not any("compile" in name for name in names(small()))
    found = names(nn.Conv2d(3, 8, 3), allow=("compile",))
    assert [name for name in found if "channels" not in name] == [
        UNPREPARED, "frozen compile", "compile"]  # fmt: skip
    assert "channels_last + input + compile" in found
    low = names(nn.Conv2d(3, 8, 3), allow=("bfloat16", "compile"))
    assert [name for name in low if "bfloat16" in name and "channels" not in name] == [
        "bfloat16",
        *(f"bfloat16 + {each}" for each in ("frozen compile", "compile")),
    ]
    assert not any("frozen" in name for name in names(small(), allow=("compile",), mode="train"))


def test_the_declared_pipeline_is_a_candidate_and_sets_the_device():
    declared = {"device": {"device": "cpu"}, "half": {"dtype": "bfloat16"}}
    found = candidates(small().eval(), declared=declared, allow=(), mode="eval")
    assert [each.name for each in found[:2]] == [UNPREPARED, AS_DECLARED]
    assert found[0].steps == {"device": {"device": "cpu"}}
    assert found[1].steps == Pipeline.from_config(declared).to_config()
    assert all("device" in each.steps for each in found)
    assert AS_DECLARED not in names(small(), declared={"device": {}, "half": None})
