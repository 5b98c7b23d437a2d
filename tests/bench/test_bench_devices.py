"""A bench on GPUs: the wall clock, from one synchronisation to the next."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prepare.stages.bench.variant import Variant

BATCH = torch.ones(4, 3)


class TwoGpus(nn.Module):
    """Says that its parameters are on two GPUs, which this machine may lack."""

    def parameters(self, recurse=True):
        return iter([SimpleNamespace(device=torch.device("cuda", index)) for index in (0, 1)])

    def forward(self, x):
        self.calls += 1


def two_gpus(monkeypatch, clock):
    happened, module = [], TwoGpus()
    module.calls = 0
    monkeypatch.setattr(torch.cuda, "synchronize", happened.append)
    clocks = (lambda: clock(happened), lambda: 0.0)
    return module, Variant("a", module, None, train=False, amp="none", clocks=clocks)


def test_a_model_on_two_gpus_is_timed_until_both_are_done(monkeypatch):
    seconds = iter([1.0, 1.5])

    def clock(happened):
        assert len(set(happened)) == 2
        happened.clear()
        return next(seconds)

    module, variant = two_gpus(monkeypatch, clock)
    variant.calls, samples = 5, []
    variant.sample(BATCH, samples)
    assert samples[0].wall == pytest.approx(0.1)
    assert module.calls == 5
    assert not variant.is_on_cpu
