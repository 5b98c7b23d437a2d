"""The tensors that steps change: kept norms, dtypes, patterns, formats."""

import pytest
import torch
from torch import nn

from prepare.errors import NothingMatchesError, PatternError
from prepare.pipeline import Pipeline
from small_nets import bits, facts, mixed, small_2d, small_3d


def test_half_keeps_batch_and_instance_norms_in_float32():
    model = nn.ModuleDict({"flat": small_2d(), "deep": small_3d()})
    Pipeline.from_config({"half": {}}).apply(model)
    kept = {name for name, t in model.state_dict().items() if t.dtype is torch.float32}
    assert kept == {
        "flat.1.weight", "flat.1.bias", "flat.1.running_mean", "flat.1.running_var",
        "deep.1.weight", "deep.1.bias",
    }  # fmt: skip
    assert all(b.dtype is torch.float32 for n, b in model.named_buffers() if "running" in n)
    assert model["flat"].eval()(torch.randn(1, 3, 8, 8).half()).isfinite().all()


def test_integers_booleans_and_complex_tensors_are_never_cast():
    model = mixed()
    model.register_buffer("ids", torch.arange(4096))
    before = {name: (t.dtype, bits(t)) for name, t in model.state_dict().items()}
    Pipeline.from_config({"half": {"keep": []}}).apply(model)
    for name in ("ids", "count", "mask", "phase"):
        assert (model.state_dict()[name].dtype, bits(model.state_dict()[name])) == before[name]
    assert model.ids.unique().numel() == 4096
    assert model.phase.imag.abs().max() > 0


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("flat.*", {"flat.0", "flat.3", "flat.4"}),
        ("*.0", {"flat.0"}),
        ("type:ConvTranspose2d", {"flat.4"}),
        ("type:_ConvNd", {"flat.0", "flat.3", "flat.4", "tied.encoder", "tied.decoder"}),
        ("re:flat\\.[03]|tied\\.enc", {"flat.0", "flat.3"}),  # the whole name
        ("tied.encoder", {"tied.encoder", "tied.decoder"}),
    ],
)
def test_an_exclusion_covers_its_matches_and_tensors_tied_to_them(pattern, meant):
    model = mixed()
    plan = Pipeline.from_config({"conv2d_memory_format": {"exclude": [pattern]}}).plan(model)
    off = {t.module for t in plan.tensors if t.off}
    assert off == meant
    assert not any(t.changes for t in plan.tensors if t.module in meant)


def test_a_pattern_does_not_match_a_substring():
    model = nn.Sequential(*(nn.Conv2d(2, 2, 3) for _ in range(12)))
    Pipeline.from_config({"conv2d_memory_format": {"exclude": ["1"]}}).apply(model)
    left = [n for n, m in model.named_children() if m.weight.is_contiguous()]
    assert left == ["1"]


def test_include_narrows_and_exclude_wins():
    model = mixed()
    options = {"include": ["flat.*"], "exclude": ["flat.3"]}
    Pipeline.from_config({"conv2d_memory_format": options}).apply(model)
    assert model["flat"][0].weight.stride(1) == 1
    assert model["flat"][3].weight.stride() == (8, 1, 1, 1)
    assert model["tied"].encoder.weight.is_contiguous()


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("flatt.*", "'flat.*'"),
        ("flat", "'flat.*'"),
        ("type:Conv2", "'type:Conv2d'"),
        ("tied.encodr", "'tied.encoder'"),
        ("type:BatchNorm2d", "'type:"),
    ],
)
def test_an_unmatched_pattern_is_an_error_with_near_misses(pattern, near):
    model = mixed()
    before = facts(model)
    pipeline = Pipeline.from_config({"conv2d_memory_format": {"exclude": [pattern]}})
    with pytest.raises(PatternError, match="matches no module that conv2d_memory_format") as caught:
        pipeline.apply(model)
    assert f"did you mean {near}" in str(caught.value)
    assert facts(model) == before
    pipeline.apply(model, strict=False)
    assert model["flat"][0].weight.stride(1) == 1


def test_a_format_without_any_match_is_an_error_with_a_suggestion():
    from prepare.models.unet import UNet3d

    model = UNet3d(in_channels=1, out_channels=2, width=2)
    with pytest.raises(NothingMatchesError) as caught:
        Pipeline.from_config({"half": {}, "conv2d_memory_format": {}}).apply(model)
    assert str(caught.value) == (
        "steps.conv2d_memory_format: UNet3d has no Conv2d and 18 Conv3d; "
        "did you mean the step conv3d_memory_format (memfmt=channels_last_3d)?"
    )
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "and nothing is half done"


@pytest.mark.parametrize("partitioned", ["all", "one"])
def test_weights_that_hold_no_data_are_named(partitioned):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3))
    for module in model if partitioned == "all" else model[1:]:
        module.weight.data = torch.empty(0)  # as DeepSpeed's ZeRO-3 leaves it
    pipeline = Pipeline.from_config({"conv2d_memory_format": {}})
    if partitioned == "all":
        with pytest.raises(NothingMatchesError, match="has 2 Conv2d, and 0.weight and 1 more hold"):
            pipeline.apply(model)
        return
    (warning,) = pipeline.plan(model).warnings
    assert "1.weight holds" in str(warning)
    assert pipeline.apply(model)[0].weight.stride(1) == 1
