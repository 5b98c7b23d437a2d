"""Faults in one module end in a script that fails alone, and passes once the fault is removed."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import planted_faults
from prepare.core.utils.child_process import ForkedRunner
from prepare.errors import ModelError
from prepare.pipeline import Pipeline
from prepare.stages.reduce import reduce, search
from prepare.stages.reduce.calls import call_of_module
from prepare.stages.reduce.records import CRASHES, HANGS, RAISES, SLOW, WRONG, ModuleCall
from prepare.stages.reduce.script import answer, run_script, script_of
from prepare.stages.reduce.search import WorkerTrials, trial_here, variants
from single_module_faults import FAULTS, MODULES, SLOW_FAULTS, Net, batch_of, bfloat16

NORM = next(
    fault for fault in FAULTS if str(fault) == "batch_norm2d-not_a_number-many_channels-backward"
)
QUICK = (FAULTS[0], FAULTS[5], NORM)  # that of a norm must not become one of rounding
LIMIT = 25


def net_of(fault):
    torch.manual_seed(0)
    net = Net(MODULES[fault.probe][0]())
    x = batch_of(fault)
    if fault.where is bfloat16:
        return net.bfloat16(), x.bfloat16()
    flat = x.is_contiguous(memory_format=torch.channels_last)
    return (net.to(memory_format=torch.channels_last) if flat else net), x


def check_reduction(fault, monkeypatch, *, slow=False):
    net, x = net_of(fault)
    with monkeypatch.context() as planting:
        # The forward of the network itself may raise the fault: the calls are collected before.
        calls = search.collect_calls(net, x, pipeline=None, training=True)
        planting.setattr(search, "collect_calls", lambda *_, **__: list(calls))
        fault.plant(planting)
        found = reduce(net, x, isolated=False, seconds=120, slow=slow)
        assert found is not None
        assert found.module == "module"
        assert len(found.script.splitlines()) <= LIMIT
        again = [run_script(found.script)[0] for _ in range(3)]
        assert set(again) == {found.fault}
    assert run_script(found.script)[0] == "passes"
    return found


@pytest.mark.parametrize("fault", QUICK, ids=str)
def test_a_planted_fault_of_each_kind_is_reduced(fault, monkeypatch):
    found = check_reduction(fault, monkeypatch)
    assert found.fault == (RAISES if fault.change.__name__ == "raises" else WRONG)
    assert found.call.shape[0] <= 2
    assert max(found.call.shape[2:]) <= 16


@pytest.mark.slow
def test_54_of_60_planted_faults_are_reduced(monkeypatch):
    lost = {}
    for fault in FAULTS + SLOW_FAULTS:
        try:
            check_reduction(fault, monkeypatch, slow=fault in SLOW_FAULTS)
        except AssertionError as error:
            lost[str(fault)] = str(error)[:200]
    assert len(FAULTS + SLOW_FAULTS) == 62
    assert len(lost) <= 6, lost


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d, nn.Conv2d])
def test_the_call_of_a_repaired_module_names_torchs_class(kind):
    module = kind(4, 4, 1) if kind is nn.Conv2d else kind(4)
    steps = {"repair_layout": {"force": True, "exact": True}}
    Pipeline.from_config(steps).apply(module, strict=False, known_issues="ignore")
    x = torch.randn(2, 4, 3, 3)
    assert call_of_module("m", module, x, module(x), training=True).kind == kind.__name__


def test_a_network_without_a_fault_gives_no_script():
    for fault in FAULTS[:1]:
        net, x = net_of(fault)
        assert reduce(net, x, isolated=False) is None


def call(kind="Conv2d", shape=(2, 4, 6, 6), **changes):
    arguments = {"in_channels": 4, "out_channels": 6, "kernel_size": 3}
    arguments = changes.pop("arguments", arguments)
    options = tuple(changes.pop("options", {}).items())
    return ModuleCall(
        name="m",
        kind=kind,
        arguments=tuple(arguments.items()),
        options=options,
        shape=shape,
        **changes,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"format": "channels_last", "dtype": "bfloat16", "mean": 3.0, "deviation": 0.5},
        {"backward": False, "training": False, "repeats": 2, "allowed": 1e-3},
        {"options": {"bias": False, "padding_mode": "reflect", "padding": (1, 1)}},
        {"device": "cpu:0", "dtype": "bfloat16"},
        {"device": "cpu:0", "slow": True, "format": "channels_last"},
        {
            "slow": True,
            "format": "channels_last",
            "dtype": "bfloat16",
            "backward": False,
            "mean": 1.0,
        },
    ],
)
def test_a_script_of_a_right_call_passes(changes):
    given = call(**changes)
    script = script_of(given)
    assert len(script.splitlines()) <= LIMIT
    outcome, text = trial_here(given)
    assert outcome == "passes" or (given.slow and outcome == SLOW)
    assert outcome == SLOW or "torch 2" in text


def test_variants_are_simpler_and_stay_consistent():
    depthwise = call(
        arguments={"in_channels": 8, "out_channels": 16, "kernel_size": (3, 5)},
        shape=(4, 8, 9, 7),
        options={"groups": 8, "stride": 2},
        mean=5.0,
        repeats=20,
    )
    found = list(variants(depthwise))
    assert {each.value("groups") for each in found if each.shape[1] == 2} == {2}
    assert {each.value("out_channels") for each in found if each.shape[1] == 2} == {4}
    assert any(each.mean == 0.0 for each in found)
    assert any(each.repeats == 1 for each in found)
    assert any("stride" not in dict(each.options) for each in found)
    norm = call("LayerNorm", (2, 4, 6, 6), arguments={"normalized_shape": (4, 6, 6)})
    assert any(each.value("normalized_shape") == (1, 6, 6) for each in variants(norm))


@pytest.mark.parametrize(
    ("change", "outcome"),
    [("crash", CRASHES), ("end_silently", CRASHES), ("wait", HANGS)],
)
@pytest.mark.skipif(sys.platform != "linux", reason="a new process would take seconds")
def test_a_script_that_breaks_down_is_a_fault(change, outcome, monkeypatch):
    def broken(request):
        if "sigmoid" in request["script"].lower():
            getattr(planted_faults, change)()
        return answer(request)

    runner, trials = ForkedRunner(broken), WorkerTrials()
    monkeypatch.setattr(search, "_SECONDS", 2.0)
    monkeypatch.setattr(trials, "ask", runner.ask)
    right, breaking = (call(kind, (1, 2, 3, 3), arguments={}) for kind in ("SiLU", "Sigmoid"))
    trial_here(right)  # what torch imports in a first call takes a fork longer than its limit
    outcomes = [trials(each)[0] for each in (right, breaking, right)]
    assert outcomes == ["passes", outcome, "passes"]
    runner.stop()


def test_rounding_is_not_reported_as_a_fault():
    constant = call("GroupNorm", arguments={"num_groups": 2, "num_channels": 4}, mean=1e5)
    assert trial_here(constant)[0] == "invalid"
    wrong = call(options={"no_such_option": 1})
    assert trial_here(wrong)[0] == "invalid"


def test_a_model_whose_forward_raises_is_named():
    with pytest.raises(ModelError, match="Conv2d"):
        reduce(nn.Sequential(nn.Conv2d(3, 4, 3)), torch.randn(1, 2, 8, 8), isolated=False)


@pytest.mark.slow
def test_a_reduced_script_runs_alone(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8)).to(
        memory_format=torch.channels_last
    )
    found = reduce(model, torch.randn(1, 3, 12, 12).to(memory_format=torch.channels_last))
    assert (found.fault, found.module, found.known) == (WRONG, "1", "instance_norm_gradients_cpu")
    (tmp_path / "reduced.py").write_text(found.script)
    done = subprocess.run(
        [sys.executable, "-I", "reduced.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "AssertionError: input gradients: error" in done.stderr
