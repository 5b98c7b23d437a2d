"""Known issues in a plan: errors, warnings, and the repairs that they name."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from issue_checks import FLAT, is_last, last, with_norm
from prepare.errors import ConfigError, KnownIssueError, KnownIssueWarning, Problem
from prepare.pipeline import Pipeline

REPAIRED = Pipeline.from_config({"conv2d_memory_format": {}, "repair_layout": {}})


@pytest.mark.parametrize("strict", [True, False])
def test_wrong_gradients_are_an_error_in_training_only(strict):
    model = with_norm(nn.InstanceNorm2d(8))
    before = [p.stride() for p in model.parameters()]
    with pytest.raises(KnownIssueError, match=r"InstanceNorm2d \(1\).*wrong gradients") as raised:
        FLAT.apply(model, strict=strict)
    remedy = raised.value.problems[0].remedy
    assert remedy.startswith("add the step repair_layout, ")
    assert "known_issues=warn" in remedy
    assert "model.eval()" in remedy
    assert [p.stride() for p in model.parameters()] == before
    (error,) = FLAT.plan(model).errors
    assert isinstance(error, KnownIssueError)
    with pytest.warns(KnownIssueWarning, match="wrong gradients"):
        FLAT.apply(model.eval())


def test_warn_warns_ignore_says_nothing_and_another_word_is_an_error():
    model = with_norm(nn.InstanceNorm2d(8))
    with pytest.warns(KnownIssueWarning):
        FLAT.apply(model, known_issues="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FLAT.apply(with_norm(nn.InstanceNorm2d(8)), known_issues="ignore")
    plan = FLAT.plan(model, known_issues="ignore")
    assert not plan.errors
    assert not plan.warnings
    for act in (FLAT.plan, FLAT.apply):
        with pytest.raises(
            ConfigError, match="known_issues: 'wran' is not allowed; did you mean 'warn'"
        ):
            act(model, known_issues="wran")


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, given):
        return F.instance_norm(self.conv(given))


@pytest.mark.parametrize(
    ("model", "memory_format"),
    [
        (with_norm(nn.InstanceNorm2d(8)), "contiguous"),
        (with_norm(nn.BatchNorm2d(8)), "channels_last"),
        (Functional(), "channels_last"),  # a plan sees modules only
    ],
    ids=["contiguous", "batch norm", "functional"],
)
def test_other_networks_have_no_known_issue(model, memory_format):
    steps = {"conv2d_memory_format": {"memory_format": memory_format}}
    plan = Pipeline.from_config(steps).plan(model)
    assert not plan.errors
    assert not plan.warnings


def test_what_is_slow_is_a_warning_of_the_plan_that_names_the_repair():
    model = nn.Sequential(nn.Conv3d(4, 8, 3), nn.AvgPool3d(2))
    plan = Pipeline.from_config({"conv3d_memory_format": {}}).plan(model)
    said = [str(warning) for warning in plan.warnings]
    assert any("AvgPool3d (1)" in one and "add the step repair_layout" in one for one in said)
    assert not any("Conv3d" in one for one in said)  # slow at batch 1 only: no plan knows it
    assert [str(Problem(**each)) for each in plan.to_dict()["warnings"]] == said


@pytest.mark.parametrize(
    ("batch", "formatted"), [((2,), False), ((2,), True), ((), False)], ids=str
)
def test_repaired_it_has_the_right_gradients_and_is_no_error(batch, formatted):
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose3d(64, 64, 7, stride=2, padding=3, groups=64))
    repairing = {"conv3d_memory_format": {}, "repair_layout": {}}
    assert not Pipeline.from_config(repairing).plan(model).errors
    given = torch.randn(*batch, 64, 4, 4, 4)
    loss = model.double()(given.double()).square().mean()
    (exact,) = torch.autograd.grad(loss, model[0].weight)
    Pipeline.from_config(repairing).apply(model.float())
    out = model(last(given) if formatted else given)
    (found,) = torch.autograd.grad(out.square().mean(), model[0].weight)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-6)
    assert is_last(out) == formatted


def frozen():
    return nn.Sequential(nn.Conv2d(3, 8, 3).requires_grad_(False), nn.GroupNorm(2, 8))


def narrow():
    return nn.Sequential(nn.Conv2d(3, 8, 1, stride=2), nn.SiLU())


@pytest.mark.parametrize(
    ("build", "name"),
    [(frozen, "group_norm_frozen_input_cpu"), (narrow, "conv2d_strided_kernel_1_cpu")],
    ids=["group norm", "convolution"],
)
def test_what_may_end_the_process_is_an_error_with_warn_too(build, name):
    if name.startswith("group") and torch.__version__ >= "2.14":
        pytest.skip("torch 2.14 has corrected it")
    for known_issues in ("error", "warn"):
        with pytest.raises(KnownIssueError, match=rf"{name}.*known_issues=ignore"):
            FLAT.apply(build(), known_issues=known_issues)
    in_eval = build().eval()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        FLAT.apply(in_eval, known_issues="warn")
    assert any(name in str(each.message) for each in said)
    assert [type(module) for module in in_eval] == [type(module) for module in build()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        REPAIRED.apply(build())


def test_the_batch_of_an_example_decides_what_apply_refuses():
    with pytest.raises(KnownIssueError, match="instance_norm_gradients_cpu"):
        FLAT.apply(with_norm(nn.InstanceNorm2d(8)), example=torch.randn(1, 3, 8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FLAT.apply(with_norm(nn.InstanceNorm2d(8)), example=torch.randn(4, 3, 8, 8))
