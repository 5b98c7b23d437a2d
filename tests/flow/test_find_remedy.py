"""Advice is tried by prediction before it is given: the steps that remove breaks, and how many remain."""

import torch
from torch import nn

from keeping_nets import Purposeful, chunked, video
from prepare.pipeline import Pipeline
from prepare.stages.flow import predict
from prepare.stages.flow.find_remedy import find_remedy


def remedy(model, x, present=()):
    flow = predict(model, x)
    return find_remedy(model, x, flow, present)


def last(model, rank=3):
    Pipeline.from_config({f"conv{rank}d_memory_format": {}}).apply(model, known_issues="ignore")
    return model.eval()


def normed():
    layers = [nn.Conv3d(3, 8, 3, padding=1), nn.InstanceNorm3d(8), nn.Conv3d(8, 8, 1)]
    return last(nn.Sequential(*layers))


def test_a_norm_is_mended_by_repairs():
    found = remedy(normed(), video())
    assert (found.steps, found.breaks) == (("repair_layout",), 0)


def test_the_code_of_the_model_is_mended_by_rewritten_calls():
    assert remedy(chunked(), video()).steps == ("keep_layout",)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.normed, self.chunked = normed(), chunked()

    def forward(self, x):
        return self.normed(x).sum() + self.chunked(x).sum()


def test_steps_are_added_as_long_as_each_removes_breaks():
    found = remedy(Both().eval(), video())
    assert set(found.steps) == {"repair_layout", "keep_layout"}
    assert found.breaks == 0


def test_nothing_is_advised_that_removes_no_break():
    assert remedy(last(Purposeful()), video()) is None
    assert remedy(normed(), video(), ["repair_layout"]) is None
    assert remedy(nn.Conv3d(3, 8, 3), torch.randn(1, 3, 5, 5, 5)) is None
