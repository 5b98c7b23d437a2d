"""Configurations of a pipeline: those that are accepted, and the mistakes in the others."""

import pytest
import torch
from torch import nn

from prepare.errors import ConfigError, RefusedError
from prepare.pipeline import Pipeline
from small_nets import facts

BOTH = {"half": {}, "conv2d_memory_format": {}}


def test_null_drops_a_step_and_an_empty_mapping_takes_its_defaults():
    pipeline = Pipeline.from_config({"half": None, "conv2d_memory_format": {}})
    assert pipeline.to_config() == {
        "conv2d_memory_format": {"memory_format": "channels_last", "include": [], "exclude": []}
    }


def test_a_configuration_round_trips():
    declared = {"half": {"dtype": "bf16", "keep": ["type:LayerNorm", "norms"]}, "input_format": {}}
    config = Pipeline.from_config(declared).to_config()
    assert Pipeline.from_config(config).to_config() == config
    kept = ["type:LayerNorm", "norms"]
    assert config["half"] == {"dtype": "bfloat16", "keep": kept, "clamp": False}


def test_a_recipe_gives_the_same_pipeline_without_hydra(tmp_path):
    pipeline = Pipeline.from_config({"device": {}, **BOTH, "input_format": {"attach": True}})
    pipeline.save(tmp_path / "recipe.yaml")
    assert Pipeline.load(tmp_path / "recipe.yaml").to_config() == pipeline.to_config()
    assert "keep: norms" in (tmp_path / "recipe.yaml").read_text()
    moved = Pipeline.load(tmp_path / "recipe.yaml", device="meta").to_config()
    assert moved == pipeline.to_config() | {"device": {"device": "meta"}}


def test_a_batch_gets_the_dtype_of_the_weights_without_a_step_for_it():
    pipeline = Pipeline.from_config({"half": {"dtype": "bfloat16"}, "conv2d_memory_format": {}})
    model, batch = pipeline.apply(nn.Sequential(nn.Conv2d(3, 4, 3))), torch.randn(2, 3, 6, 6)
    given = pipeline.format({"x": batch, "at": torch.tensor([1])})
    assert (given["x"].dtype, given["at"].dtype) == (torch.bfloat16, torch.int64)
    assert given["x"].stride() == batch.stride()
    assert model(given["x"]).dtype is torch.bfloat16
    as_given = Pipeline.from_config({"conv2d_memory_format": {}})
    assert as_given.format(batch) is batch


def test_a_format_of_the_weights_is_for_batches_of_its_own_rank():
    pipeline = Pipeline.from_config({"conv2d_memory_format": {}, "input_format": {}})
    pipeline = pipeline.apply(nn.Conv2d(3, 4, 3)) and pipeline
    images, volumes = torch.randn(2, 3, 6, 6), torch.randn(2, 3, 6, 6, 6)
    assert pipeline.format(images).is_contiguous(memory_format=torch.channels_last)
    assert pipeline.format(volumes) is volumes


@pytest.mark.parametrize(
    "word", ["float16", "half", "fp16", "FP16", "torch.float16", torch.float16]
)
def test_dtypes_accept_torch_objects_and_common_spellings(word):
    assert Pipeline.from_config({"half": {"dtype": word}}).to_config()["half"]["dtype"] == "float16"


@pytest.mark.parametrize(
    ("steps", "where", "remedy"),
    [
        ([], "steps", "{name: options}"),
        ({"hlaf": {}}, "steps.hlaf", "did you mean 'half'?"),
        ({"half": 3}, "steps.half", "null to drop the step"),
        ({"half": {"dtpye": "float16"}}, "steps.half.dtpye", "did you mean 'dtype'?"),
        ({"half": {"dtype": "flaot16"}}, "steps.half.dtype", "did you mean 'float16'?"),
        ({"half": {"dtype": 10**10_000}}, "steps.half.dtype", "limit"),
        ({"half": {"keep": 3}}, "steps.half.keep", "a list of patterns"),
        ({"half": {"keep": ["re:("]}}, "steps.half.keep", "regular expression"),
        ({"half": {"keep": [""]}}, "steps.half.keep", "empty pattern"),
        ({"device": {"device": "cudaa"}}, "steps.device.device", "did you mean 'cuda'?"),
        ({"input_format": {"attach": "yes"}}, "steps.input_format.attach", "true or false"),
        (
            {"conv3d_memory_format": {"memory_format": "channels_last"}},
            "steps.conv3d_memory_format.memory_format",
            "did you mean 'channels_last_3d'?",
        ),
    ],
)
def test_a_configuration_error_says_where_what_and_the_remedy(steps, where, remedy):
    with pytest.raises(ConfigError) as caught:
        Pipeline.from_config(steps)
    assert caught.value.problems[0].where == where
    assert remedy in str(caught.value)


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        Pipeline.from_config({"half": {"dtype": 1, "x": 2}, "nothing": {}, "device": {"device": 3}})
    assert [problem.where for problem in caught.value.problems] == [
        "steps.half.dtype",
        "steps.half.x",
        "steps.nothing",
        "steps.device.device",
    ]


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:99", "cuda:99 is not available here; available: cpu"),
        ("meta", "meta holds no data; build the model there"),
    ],
)
def test_an_unavailable_device_is_refused(device, message):
    model = nn.Linear(2, 2)
    before = facts(model)
    with pytest.raises(RefusedError, match=message):
        Pipeline.from_config({"device": {"device": device}}).apply(model)
    assert facts(model) == before
