"""The audit reads the model itself, judges it against a plan, and loads from its file unchanged."""

import dataclasses
import json
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from prepare.audit import STATUSES, Audit, AuditRow, audit
from prepare.core.model.memory_format import canonical_stride, satisfied
from prepare.pipeline import Pipeline
from small_nets import Tied, facts, mixed, small_2d

FLAT = {"conv2d_memory_format": {}}


def prepared(model, steps=None, **options):
    pipeline = Pipeline.from_config(steps or {"conv2d_memory_format": options})
    plan = pipeline.plan(model)
    pipeline.apply(model)
    return audit(model, plan=plan)


def row(report, path):
    return next(row for row in report.rows if row.path == path)


def test_every_parameter_and_buffer_of_every_module_has_one_row():
    model = mixed()
    named = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    named += [n for n, _ in model.named_buffers(remove_duplicate=False)]
    assert sorted(r.path for r in audit(model).rows) == sorted(named)


def test_an_audit_changes_nothing():
    model = mixed().train()
    model["weighted"] = nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 3))
    before, random = facts(model), torch.get_rng_state()
    audit(model)
    assert facts(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in model["weighted"].modules())


def test_converted_1x1_weights_are_distinguished_by_their_strides():
    model = nn.ModuleDict({"one": nn.Conv3d(8, 4, 1), "first": nn.Conv3d(1, 8, 3)})
    before = audit(model)
    for name in model:
        assert row(before, f"{name}.weight").layouts == ("contiguous", "channels_last_3d")
    after = prepared(model, {"conv3d_memory_format": {}})
    for name, module in model.items():
        weight = row(after, f"{name}.weight")
        assert weight.layouts == ("contiguous", "channels_last_3d")
        assert weight.stride == canonical_stride(module.weight.shape, "channels_last_3d")
        assert weight.before["stride"] == row(before, f"{name}.weight").stride != weight.stride
        assert weight.status == "converted"


def test_strides_that_only_look_channels_last_are_ineffective():
    odd = torch.empty_strided((1, 3, 3, 3), (5, 1, 9, 3))
    assert satisfied(odd.shape, odd.stride()) == ("channels_last",)
    model = nn.Conv2d(3, 1, 3)
    plan = Pipeline.from_config(FLAT).plan(model)
    model.weight.data = odd.copy_(model.weight.data)
    weight = row(audit(model, plan=plan), "weight")
    assert weight.layouts == ("channels_last",)
    assert weight.status == "ineffective"
    assert "strides (5, 1, 9, 3)" in weight.reason


def test_the_statuses_are_converted_already_skipped_untouched():
    model = small_2d()
    model[3].to(memory_format=torch.channels_last)
    report = prepared(
        model, {"conv2d_memory_format": {"exclude": ["4"]}, "half": {"keep": "norms"}}
    )
    assert row(report, "0.weight").status == "converted"
    assert row(report, "0.weight").steps == ("conv2d_memory_format", "half")
    assert row(report, "1.running_mean").status == "skipped"
    assert row(report, "1.running_mean").reason == "half: keep: norms"
    assert row(report, "1.num_batches_tracked").status == "untouched"
    assert row(report, "4.weight").status == "skipped"
    assert row(report, "4.weight").steps == ("half",)
    again = prepared(model, {"conv2d_memory_format": {"exclude": ["4"]}, "half": {}})
    assert row(again, "0.weight").status == "already"
    assert report.summary["convolutions"] == {
        "ineffective": 0, "skipped": 1, "converted": 2, "already": 0, "untouched": 0,
    }  # fmt: skip


def test_a_step_that_did_not_act_is_ineffective():
    model = small_2d()
    plan = Pipeline.from_config({"half": {"keep": []}, **FLAT}).plan(model)
    report = audit(model, plan=plan)
    assert row(report, "0.weight").status == "ineffective"
    assert "dtype is float32, not float16" in row(report, "0.weight").reason
    assert "memory format is contiguous" in row(report, "0.weight").reason
    assert row(report, "1.weight").reason == "dtype is float32, not float16"


class Standardised(nn.Conv2d):
    """A convolution that rebuilds its weight in forward, as timm's StdConv2d does."""

    def forward(self, x):
        spread, mean = torch.var_mean(self.weight.flatten(1), 1, keepdim=True)
        weight = ((self.weight.flatten(1) - mean) / (spread + 1e-5).sqrt()).view(self.weight.shape)
        return self._conv_forward(x, weight, self.bias)


def legacy(norm):
    def make():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and still in many networks
            return norm(nn.Conv2d(8, 6, 3))

    return make


def pruned():
    conv = nn.Conv2d(8, 6, 3)
    prune.l1_unstructured(conv, "weight", amount=0.3)
    return conv


LOST = {
    "legacy weight_norm": legacy(nn.utils.weight_norm),
    "parametrized weight_norm": lambda: parametrizations.weight_norm(nn.Conv2d(8, 6, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Conv2d(8, 6, 3)),
    "weight rebuilt in forward": lambda: Standardised(8, 6, 3),
}
KEPT = {
    "legacy spectral_norm": legacy(nn.utils.spectral_norm),
    "parametrized spectral_norm": lambda: parametrizations.spectral_norm(nn.Conv2d(8, 6, 3)),
    "pruned": pruned,
}


@pytest.mark.parametrize("make", LOST.values(), ids=LOST)
def test_a_computed_weight_in_another_layout_is_ineffective(make):
    model = nn.Sequential(make())
    report = prepared(model)
    computed = row(report, "0.weight (computed)")
    assert computed.status == "ineffective"
    assert "channels_last" not in computed.layouts
    assert report.summary["convolutions"]["ineffective"] == 1
    assert report.summary["convolutions"]["converted"] == 0
    assert not Pipeline.from_config(FLAT).plan(model), "a computed weight keeps no plan non-empty"


@pytest.mark.parametrize("make", [*LOST.values(), *KEPT.values()], ids=[*LOST, *KEPT])
def test_the_computed_weight_is_the_one_forward_uses(make):
    """Compare with the weight that reaches torch's convolution in a real forward."""
    model = make()
    prepared(model)
    used = []
    real = nn.functional.conv2d

    def spy(x, weight, *args):
        used.append(weight)
        return real(x, weight, *args)

    nn.functional.conv2d = spy
    try:
        model.eval()(torch.randn(2, 8, 8, 8))
    finally:
        nn.functional.conv2d = real
    assert row(audit(model), "weight (computed)").stride == used[0].stride()


def test_a_computed_weight_that_cannot_be_evaluated_says_why():
    class Modulated(nn.Conv2d):
        def forward(self, x, style):
            return self._conv_forward(x, self.weight * style, self.bias)

    weight = row(prepared(nn.Sequential(Modulated(8, 6, 3))), "0.weight (computed)")
    assert weight.status == "ineffective"
    assert weight.reason.startswith("cannot be evaluated: TypeError")


def test_tied_tensors_name_each_other_and_count_once():
    report = prepared(Tied())
    assert row(report, "encoder.weight").shared_with == ("decoder.weight",)
    assert row(report, "decoder.weight").status == "converted"
    assert report.summary["tensors"] == 5
    assert report.summary["bytes_after"] == (4 * 4 * 9 + 4 + 4 + 24) * 4 + 3 * 8


def test_an_audit_loads_from_its_file_unchanged(tmp_path):
    report = prepared(mixed(), {"half": {"dtype": "bfloat16"}, **FLAT})
    report.save(tmp_path / "audit.json")
    assert Audit.load(tmp_path / "audit.json") == report
    data = json.loads((tmp_path / "audit.json").read_text())
    assert (data["format"], data["version"]) == ("prepare.audit", 1)
    assert list(data["rows"][0]) == list(AuditRow._fields)
    assert {r["status"] for r in data["rows"]} <= set(STATUSES)


def test_a_model_on_meta_is_audited_without_data():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(50_000, 50_000) for _ in range(10)))
    report = audit(model)
    assert report.summary["bytes_after"] == 10 * (50_000**2 + 50_000) * 4
    assert {r.device for r in report.rows} == {"meta"}


def test_another_dtype_or_device_than_wanted_is_ineffective():
    net = nn.Conv2d(3, 4, 3)
    plan = Pipeline.from_config({"device": {"device": "cpu"}, "half": {"keep": []}}).plan(net)
    rows = audit(net.bfloat16(), plan=plan).rows
    assert {row.reason for row in rows} == {"dtype is bfloat16, not float16"}
    rows = audit(net.half().to("meta"), plan=plan).rows
    assert {row.reason for row in rows} == {"device is meta, not cpu"}
    assert {row.status for row in rows} == {"ineffective"}
    numbered = [each._replace(wants={"device": "cpu:1"}) for each in plan.tensors]
    plan = dataclasses.replace(plan, tensors=tuple(numbered))
    rows = audit(nn.Conv2d(3, 4, 3), plan=plan).rows
    assert {row.reason for row in rows} == {"device is cpu, not cpu:1"}
