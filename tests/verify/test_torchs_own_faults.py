"""A verification neither dies of torch's own faults nor takes them for the truth."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from prepare.core.model.known_issues import standing
from verify_checks import FLAT, LAST, check

HERE = {issue.name for issue in standing("cpu")}
FROZEN, STRIDED = "group_norm_frozen_input_cpu", "conv2d_strided_kernel_1_cpu"
pytestmark = pytest.mark.skipif(
    not {FROZEN, STRIDED} <= HERE, reason="this torch has mended one of them"
)


class Functional(nn.Module):
    """A frozen encoder, and a group norm that is no module."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Conv2d(3, 8, 3).requires_grad_(False), nn.Conv2d(8, 2, 1)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.head(F.group_norm(self.encoder(x), 2, self.scale))


class NoGradEncoder(nn.Module):
    """An encoder under no_grad: its output needs no gradient, whatever the input does."""

    def __init__(self):
        super().__init__()
        self.encoder, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)

    def forward(self, x):
        with torch.no_grad():
            features = self.encoder(x)
        return self.norm(features)


def frozen():
    return nn.Sequential(nn.Conv2d(3, 8, 3).requires_grad_(False), nn.GroupNorm(2, 8), nn.SiLU())


def strided(kernel=1):
    return nn.Sequential(nn.SiLU(), nn.Conv2d(3, 16, kernel, stride=2), nn.SiLU())


UNSAFE = {
    "a frozen encoder": (frozen, FROZEN, "1"),
    "a first module": (lambda: nn.Sequential(nn.GroupNorm(1, 3), nn.Conv2d(3, 4, 1)), FROZEN, "0"),
    "a function": (Functional, FROZEN, "Functional"),
    "an encoder under no_grad": (NoGradEncoder, FROZEN, "norm"),
    "a strided convolution": (strided, STRIDED, "1"),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_a_backward_that_ends_the_process_is_refused(name):
    build, issue, place = UNSAFE[name]
    result = check(build().train(), FLAT, torch.randn(2, 3, 16, 16), mode="train")
    assert result.status == "fail"
    assert issue in result.reason
    assert f"forward of {place}" in result.reason
    in_eval = check(build().eval(), FLAT, torch.randn(2, 3, 16, 16))
    assert in_eval.status == "pass"


@pytest.mark.parametrize(
    "name", ["a frozen encoder", "an encoder under no_grad", "a strided convolution"]
)
def test_repaired_the_same_backward_runs_and_is_right(name):
    result = check(UNSAFE[name][0]().train(), LAST, torch.randn(2, 3, 16, 16), mode="train")
    assert result.status == "pass"
    assert {c.what for c in result.checks if c.compared} >= {"parameter gradients", "outputs"}
