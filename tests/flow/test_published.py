"""Tests of what a flow for a GPU expects from the measurements of others."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from prepare.pipeline import Pipeline
from prepare.stages.flow import predict
from prepare.stages.flow.published import FILE, LIKE, _table, expectations, likeness
from prepare.stages.flow.records import Flow


def flow_of(*blocks: nn.Module, device: str | None = "cuda", shape=(2, 8, 12, 12)) -> Flow:
    model = nn.Sequential(*blocks).eval()
    pipeline = Pipeline.from_config(
        {"conv2d_memory_format": {}, "conv3d_memory_format": {}, "input_format": {}}
    )
    pipeline.apply(model, known_issues="ignore")
    return predict(model, pipeline.format(torch.randn(shape)), device=device)


def convolutions(count: int = 10) -> list[nn.Module]:
    return [nn.Conv2d(8, 8, 3, padding=1) for _ in range(count)]


def test_multiplications_are_counted_by_kind():
    layers = (
        nn.Conv2d(8, 8, 3),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 8, 1, groups=2),
        nn.Linear(8, 5),
    )
    assert flow_of(*layers, device=None).work == {
        "convolution": 2 * 8 * 72 * 100,
        "depthwise": 2 * 8 * 9 * 64,
        "grouped": 2 * 8 * 4 * 64,
        "product": 2 * 8 * 8 * 8 * 5,
    }


def test_a_convolution_that_runs_as_a_product_stays_one():
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 64, 1), nn.Conv2d(64, 64, 1)).eval()
    x = torch.randn(2, 8, 12, 12)
    before = predict(model, x).work
    Pipeline.from_config({"rewrite_conv": {"pointwise": ["1", "2"]}}).apply(model)
    assert (
        predict(model, x).work == before == {"convolution": 2 * 100 * (8 * 72 + 8 * 64 + 64 * 64)}
    )


def test_attention_counts_as_products():
    class Attention(nn.Module):
        def forward(self, x):
            heads = x.flatten(2).transpose(1, 2).unsqueeze(1)
            return nn.functional.scaled_dot_product_attention(heads, heads, heads)

    flow = flow_of(nn.Conv2d(8, 8, 1), Attention(), device=None)
    assert flow.work["product"] == 2 * 2 * 144 * 144 * 8


def test_a_network_for_a_gpu_is_told_what_others_measured():
    (line,) = expectations(flow_of(*convolutions()))
    newest = _table()["pairs"][3]
    like = newest["kinds"]["no breaks"]
    assert f"RTX 3090 {like['median']:.2f}x as fast" in line
    assert f"{like['networks']} networks, torch {newest['torch']}" in line
    (training,) = expectations(flow_of(*convolutions()), training=True)
    assert "torch 1.12" in training
    (lost,) = expectations(flow_of(*convolutions(), nn.InstanceNorm2d(8)))
    assert "with breaks" in lost
    assert "RTX 4090 too few networks" in lost


def test_grouped_convolutions_are_a_kind_in_training_only():
    work = {"convolution": 8, "grouped": 2}
    assert likeness(0, work, training=True) == likeness(1, work, training=True) == "grouped"
    assert (
        likeness(0, work)
        == likeness(0, {"convolution": 9, "grouped": 2}, training=True)
        == "no breaks"
    )
    grouped = [nn.Conv2d(8, 8, 3, padding=1, groups=2) for _ in range(10)]
    (training,) = expectations(flow_of(*grouped), training=True)
    like = _table()["pairs"][0]["kinds"]["grouped"]
    assert (
        f"networks of grouped convolutions (timm, 2-d, AMP, training): RTX 3090 {like['median']:.2f}x"
        in training
    )


@pytest.mark.parametrize(
    ("breaks", "work", "kind"),
    [(0, {"convolution": 9}, "no breaks"), (1, {"convolution": 9}, "breaks"),
     (1, {"convolution": 8, "product": 2}, "products"), (0, {"convolution": 9, "product": 2}, "no breaks"),
     (0, {}, "no breaks")],
    ids=["kept", "lost", "products", "few products", "unknown"],
)  # fmt: skip
def test_networks_are_sorted_by_breaks_and_products(breaks, work, kind):
    assert likeness(breaks, work) == kind


def test_without_data_nothing_is_said():
    flow = flow_of(*convolutions())
    assert list(expectations(replace(flow, device="cpu"))) == []
    assert list(expectations(replace(flow, device="mps"))) == []
    assert list(expectations(replace(flow, work={}))) == []
    assert list(expectations(replace(flow, wanted={4: "contiguous"}))) == []
    assert list(expectations(flow_of(*convolutions(9)))) == []
    (line,) = expectations(flow_of(*(nn.Conv3d(8, 8, 1) for _ in range(10)), shape=(1, 8, 4, 4, 4)))
    assert "no data of 3-d networks" in line


def test_the_text_of_a_flow_for_a_gpu_has_it():
    text = str(flow_of(*convolutions()))
    assert "measured by others on convolutional networks without breaks" in text
    assert "other cards: no data" in text
    assert "measured by others" not in str(flow_of(*convolutions(), device=None))


def test_each_interval_holds_half_of_the_families_left_out():
    assert {kind for row in _table()["pairs"] for kind in row["kinds"]} == set(LIKE)
    for row in _table()["pairs"]:
        assert row["held"] >= 0.5
        for kind in row["kinds"].values():
            assert kind["low"] <= kind["median"] <= kind["high"]
            assert kind["networks"] >= 8
    assert FILE.read_text().startswith("# Speed in channels-last")
