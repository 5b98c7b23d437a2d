"""Known issues in a plan: errors, warnings, and the repairs that they name."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from issue_checks import FLAT, gradient, is_last, last, with_norm
from prepare.app.report.sections import issues
from prepare.core.model.known_issues import standing
from prepare.core.utils.wording import command_line_words
from prepare.errors import ConfigError, KnownIssueError, KnownIssueWarning, Problem
from prepare.pipeline import Pipeline

REPAIRED = Pipeline.from_config({"conv2d_memory_format": {}, "repair_layout": {}})


@pytest.mark.parametrize("strict", [True, False])
def test_wrong_gradients_are_an_error_in_training_only(strict):
    model = with_norm(nn.InstanceNorm2d(8))
    before = [p.stride() for p in model.parameters()]
    with pytest.raises(KnownIssueError, match=r"InstanceNorm2d \(1\).*wrong gradients") as raised:
        FLAT.apply(model, strict=strict)
    assert str(raised.value).endswith(
        'and the model is in training mode; add the step "repair_layout": {}, '
        'or go on without it: known_issues="warn", or model.eval() if it is not trained'
    )
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


@pytest.mark.parametrize("norm", [nn.InstanceNorm2d(8), nn.GroupNorm(4, 8)], ids=["in", "gn"])
def test_with_the_repair_nothing_is_wrong_and_nothing_is_said(norm):
    model = with_norm(norm)
    reference = gradient(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        REPAIRED.apply(model)
    assert not [w for w in REPAIRED.plan(model).warnings if "Norm" in str(w)]
    torch.testing.assert_close(gradient(model), reference, rtol=1e-4, atol=1e-4)


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
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.LayerNorm(10)), "channels_last"),
        (Functional(), "channels_last"),  # a plan sees modules only
    ],
    ids=["contiguous", "batch norm", "layer norm over the last dimension", "functional"],
)
def test_other_networks_have_no_known_issue(model, memory_format):
    steps = {"conv2d_memory_format": {"memory_format": memory_format}}
    plan = Pipeline.from_config(steps).plan(model)
    assert not plan.errors
    assert not plan.warnings


def test_a_model_that_is_channels_last_already_meets_the_same():
    model = with_norm(nn.InstanceNorm2d(8))
    FLAT.apply(model, known_issues="ignore")
    assert Pipeline.from_config({"half": {"dtype": "bfloat16"}}).plan(model).errors


def test_what_is_slow_is_a_warning_of_the_plan_that_names_the_repair():
    model = nn.Sequential(nn.Conv3d(4, 8, 3), nn.AvgPool3d(2))
    plan = Pipeline.from_config({"conv3d_memory_format": {}}).plan(model)
    said = [str(warning) for warning in plan.warnings]
    assert any("AvgPool3d (1)" in one and 'add the step "repair_layout": {}' in one for one in said)
    assert not any("Conv3d" in one for one in said)  # slow at batch 1 only: no plan knows it
    assert [str(Problem(**each)) for each in plan.to_dict()["warnings"]] == said


def test_issues_at_some_sizes_only_are_repaired_without_a_warning():
    model = nn.Sequential(nn.Conv2d(512, 512, 3))
    assert not FLAT.plan(model).warnings
    repaired = REPAIRED.plan(model)
    assert [action.modules for action in repaired.actions if action.step == "repair_layout"] == [
        ("0",)
    ]


def test_only_a_depthwise_transposed_conv_is_an_error_in_training():
    pipeline = Pipeline.from_config({"conv3d_memory_format": {}})
    (error,) = pipeline.plan(nn.Sequential(nn.ConvTranspose3d(8, 8, 3, groups=8))).errors
    assert "garbage" in str(error)
    assert 'add the step "repair_layout": {}' in str(error)
    assert not pipeline.plan(nn.Sequential(nn.ConvTranspose3d(8, 8, 3))).errors


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


def test_a_repaired_module_still_meets_what_its_repair_does_not_mend():
    steps = {"half": {}, "conv3d_memory_format": {}, "repair_layout": {}}
    model = nn.Sequential(nn.Conv3d(2, 2, 3), nn.AvgPool3d(2))
    (warning,) = Pipeline.from_config(steps).plan(model).warnings
    assert "conv3d_float16_cpu" in str(warning)
    repaired = Pipeline.from_config(steps).apply(model, known_issues="ignore")
    assert type(repaired[0]) is not nn.Conv3d
    (again,) = Pipeline.from_config({"half": {}}).plan(repaired).warnings
    assert str(again) == str(warning)


@pytest.mark.parametrize("flat", [True, False], ids=["channels_last_3d", "contiguous"])
def test_a_plan_names_the_repair_options_that_cure_an_issue(flat):
    steps = {"half": {"dtype": "bfloat16"}} | ({"conv3d_memory_format": {}} if flat else {})
    model = nn.Sequential(nn.Conv3d(2, 2, 3))
    (warning,) = told("conv3d_bfloat16_small_cpu", steps, model)
    options = "" if flat else '"force": True'
    assert f'"repair_layout": {{{options}}}' in str(warning)
    steps["repair_layout"] = {} if flat else {"force": True}
    assert not told("conv3d_bfloat16_small_cpu", steps, model)


def told(name, steps, model):
    """Return the plan's warnings of one known issue."""
    return [w for w in Pipeline.from_config(steps).plan(model).warnings if name in str(w)]


def test_a_risk_is_a_warning_of_the_plan_in_training_too():
    for dtype, conv, words in (
        ("bfloat16", nn.Conv3d(2, 2, 3), "smaller than the kernel"),
        ("float16", nn.Conv2d(3, 8, 3), "float16"),
    ):
        plan = Pipeline.from_config({"half": {"dtype": dtype}}).plan(nn.Sequential(conv))
        assert not plan.errors
        assert any(words in str(warning) for warning in plan.warnings)


def test_the_same_module_under_two_names_is_named_once():
    norm = nn.InstanceNorm2d(8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, norm)
    (problem,) = FLAT.plan(model).errors[0].problems
    assert problem.where == "InstanceNorm2d (1)"


def test_what_a_backward_meets_is_no_warning_in_eval_mode():
    plan = FLAT.plan(with_norm(nn.InstanceNorm2d(8)).eval())
    assert "; in training code this is an error; add the step" in str(plan.training_errors[0])
    assert not any("backward" in str(each) for each in plan.warnings)
    with command_line_words():
        plan = FLAT.plan(with_norm(nn.InstanceNorm2d(8)).eval())
    (error,) = map(str, plan.training_errors)
    assert "; in training code this is an error; " in error
    assert "+steps.repair_layout={}" in error
    (items,) = [each for each in issues(plan.to_dict()) if each.title == "In training"]
    assert (items.text, items.where) == ((error,), "page")


def test_a_training_batch_of_two_names_the_fault_of_batch_one():
    model = with_norm(nn.InstanceNorm2d(8)).train()
    plan = FLAT.plan(model, batch=2)
    assert not plan.errors
    assert "the last batch of an epoch may have one" in str(plan.warnings[0])
    assert FLAT.plan(model, batch=1).errors
    assert FLAT.plan(model).errors


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_a_plan_names_the_steps_that_training_needs(mode):
    model = with_norm(nn.InstanceNorm2d(8)).train(mode)
    plan = FLAT.plan(model)
    assert plan.training_steps == {"repair_layout": {}}
    assert len(plan.training_errors) == 1
    assert REPAIRED.plan(model).training_steps == {}
    assert not REPAIRED.plan(model).training_errors


def test_a_recipe_for_inference_has_no_steps_for_training():
    for steps in ({"half": {}}, {"eval_mode": {}}, {"fuse_conv_bn": {}}):
        plan = Pipeline.from_config(steps).plan(nn.Sequential(nn.Conv2d(2, 2, 3)).eval())
        assert plan.training_steps is None
        assert plan.training_errors


def frozen():
    return nn.Sequential(nn.Conv2d(3, 8, 3).requires_grad_(False), nn.GroupNorm(2, 8))


def narrow():
    return nn.Sequential(nn.Conv2d(3, 8, 1, stride=2), nn.SiLU())


@pytest.mark.parametrize(
    ("build", "name"),
    [(frozen, "group_norm_frozen_input_cpu"), (narrow, "conv2d_strided_kernel_1_cpu")],
    ids=["group norm", "convolution"],
)
def test_what_ends_the_process_is_repaired_where_a_user_goes_on(build, name):
    with pytest.raises(KnownIssueError, match=name):
        FLAT.apply(build())
    plan = FLAT.plan(build(), known_issues="warn")
    assert not plan.errors
    assert "it is repaired nevertheless" in str(plan.warnings[0])
    assert {action.step for action in plan.actions} == {"repair_layout"}
    model = build()
    with pytest.warns(KnownIssueWarning, match=name):
        FLAT.apply(model, known_issues="warn")
    model(last(torch.randn(2, 3, 16, 16))).square().mean().backward()
    assert not FLAT.check(model)
    in_eval = build().eval()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        FLAT.apply(in_eval, known_issues="warn")
    assert any(name in str(each.message) for each in said)
    assert [type(module) for module in in_eval] == [type(module) for module in build()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        REPAIRED.apply(build())


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 8, 1),
        nn.Conv2d(3, 8, 3, stride=2),
        nn.Conv2d(16, 8, 1, stride=2),
        nn.Conv2d(4, 8, 1, stride=2, groups=2),
        nn.Conv2d(3, 8, 1, stride=2, padding=1),
    ],
    ids=["no stride", "kernel 3", "16 channels", "groups", "padding"],
)
def test_another_convolution_writes_inside_its_memory(conv):
    assert not FLAT.plan(nn.Sequential(conv)).errors


@pytest.mark.parametrize(("batch", "is_error"), [(None, True), (1, True), (2, False)])
def test_what_is_wrong_at_batch_1_is_an_error_there_only(batch, is_error):
    plan = FLAT.plan(with_norm(nn.InstanceNorm2d(8)), batch=batch)
    assert bool(plan.errors) is is_error
    said = [str(w) for w in plan.warnings if "instance_norm_gradients_cpu" in str(w)]
    assert bool(said) is not is_error
    if said:
        assert "this batch has 2 samples, the last batch of an epoch may have one" in said[0]


def test_the_batch_of_an_example_decides_what_apply_refuses():
    with pytest.raises(KnownIssueError, match="instance_norm_gradients_cpu"):
        FLAT.apply(with_norm(nn.InstanceNorm2d(8)), example=torch.randn(1, 3, 8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FLAT.apply(with_norm(nn.InstanceNorm2d(8)), example=torch.randn(4, 3, 8, 8))


@pytest.fixture
def processor(monkeypatch):
    def become(capability, *, bfloat16):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: bfloat16)

    return become


def slow_in_bfloat16(model, steps, amp="none"):
    warned = Pipeline.from_config(steps).plan(model, amp=amp).warnings
    return [str(each) for each in warned if "[conv_bfloat16_avx2_cpu]" in str(each)]


@pytest.mark.parametrize(
    ("capability", "bfloat16", "slow"),
    [("AVX2", False, True), ("AVX2", True, False), ("AVX512", True, False), ("DEFAULT", False, False)],
)  # fmt: skip
def test_bfloat16_convolutions_are_slow_where_onednn_has_none(
    capability, bfloat16, slow, processor
):
    processor(capability, bfloat16=bfloat16)
    steps = {"half": {"dtype": "bfloat16"}}
    found = slow_in_bfloat16(nn.Sequential(nn.Conv2d(2, 2, 3)), steps)
    assert len(found) == slow
    assert all("float32 is several times faster" in text for text in found)
    assert "conv_bfloat16_avx2_cpu" not in {each.name for each in standing("cpu", "2.11.0")}


def test_only_convolutions_in_that_dtype_are_named(processor):
    processor("AVX2", bfloat16=False)
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
    (one,) = slow_in_bfloat16(model, {"half": {"dtype": "bfloat16", "keep": ["0"]}})
    assert "Conv2d (1)" in one
    (both,) = slow_in_bfloat16(model, {}, amp="bfloat16")
    assert "Conv2d (0 and 1 more)" in both
    assert not slow_in_bfloat16(model, {"conv2d_memory_format": {}})
    assert not slow_in_bfloat16(model, {"half": {"dtype": "float16"}}, amp="bfloat16")
