"""A bench on CUDA: events time one GPU, the wall clock several."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prepare.stages.bench.variant import Variant

BATCH = torch.ones(4, 3)


def test_cuda_is_timed_by_events_between_synchronisations(monkeypatch):
    happened = []

    class Event:
        def __init__(self, *, enable_timing):
            self.timing = enable_timing

        def record(self):
            happened.append("record")

        def synchronize(self):
            happened.append("wait")

        def elapsed_time(self, end):
            assert self.timing
            assert end is not self
            return 30.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: happened.append("idle"))
    variant = Variant("a", lambda x: happened.append("call"), formatter=None, train=False)
    variant._devices.add(torch.device("cuda"))
    took = variant.timed(BATCH, lambda: 1 / 0, calls=3)
    assert took == pytest.approx(0.01)  # 30 ms, three calls
    assert happened == ["idle", "record", "call", "call", "call", "record", "wait"]


class TwoGpus(nn.Module):
    """Says that its parameters are on two GPUs, which this machine may lack."""

    def parameters(self, recurse=True):
        return iter([SimpleNamespace(device=torch.device("cuda", index)) for index in (0, 1)])

    def forward(self, x):
        self.calls += 1


def two_gpus(monkeypatch):
    happened, module = [], TwoGpus()
    module.calls = 0
    monkeypatch.setattr(torch.cuda, "synchronize", happened.append)
    return happened, module, Variant("a", module, formatter=None, train=False)


def test_a_model_on_two_gpus_is_timed_until_both_are_done(monkeypatch):
    happened, module, variant = two_gpus(monkeypatch)
    seconds = iter([1.0, 1.5])

    def clock():
        assert len(set(happened)) == 2
        happened.clear()
        return next(seconds)

    took = variant.timed(BATCH, clock, calls=5)
    assert took == pytest.approx(0.1)
    assert module.calls == 5
    assert variant.timer == "wall clock"
