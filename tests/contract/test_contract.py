"""Layout regressions break a contract, and nothing else does."""

import dataclasses
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from layout_regressions import BATCH, FLAT, OF_NETWORK, OF_PREPARED, OF_RECIPE, net
from prepare.core.document import ReportContext
from prepare.core.utils.environment import environment
from prepare.errors import ConfigError, ContractError, FileError, RefusedError
from prepare.models.resnet import ResNet2d
from prepare.models.unet import UNet2d, UNet3d
from prepare.pipeline import Pipeline
from prepare.stages.bench.records import VariantResult
from prepare.stages.contract import Contract, ContractCheck, check, record
from prepare.stages.contract.compare import compare
from prepare.stages.contract.document import contract_document
from prepare.stages.contract.records import TimeRatio
from prepare.stages.contract.summary import check_lines, markdown, page


@pytest.fixture(scope="module")
def contract():
    return record(net(), BATCH, FLAT)


def prepared_with_optimizer():
    model = Pipeline.from_config(FLAT).apply(net())
    optimizer = torch.optim.Adam(model.parameters())
    model(BATCH).mean().backward()
    optimizer.step()
    return model, optimizer


QUICK = (
    "contiguous() added",
    "a cast in the middle",
    "a branch on the layout",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in OF_NETWORK],
)
def test_a_regression_of_the_network_breaks_its_contract(name, contract):
    model = net()
    OF_NETWORK[name](model)
    assert check(model, BATCH, contract).status == "broken"


@pytest.mark.parametrize("name", OF_RECIPE)
def test_a_regression_of_the_recipe_breaks_the_contract(name, contract):
    result = check(net(), BATCH, contract, OF_RECIPE[name])
    assert {change.what for change in result.of("broken")} >= {"recipe"}
    assert len(result.of("broken")) > 1


@pytest.mark.parametrize("regress", OF_PREPARED, ids=lambda each: each.__name__)
def test_what_happens_to_a_prepared_model_breaks_its_contract(regress):
    model, optimizer = prepared_with_optimizer()
    known = record(model, BATCH, optimizer=optimizer)
    assert check(model, BATCH, known, optimizer=optimizer).changes == ()
    regress(model, optimizer)
    assert check(model, BATCH, known, optimizer=optimizer).status == "broken"


def test_a_regression_is_shown_with_its_line_of_code(contract):
    model = net()
    OF_NETWORK["contiguous() added"](model)
    result = check(model, BATCH, contract)
    (change,) = [each for each in result.changes if each.what == "flow"]
    assert (change.kind, change.where, change.text) == (
        "broken",
        "down",
        "new break in forward: clone",
    )
    assert "layout_regressions.py:" in change.source
    lines = list(check_lines(result, file="c.yaml", update="UPDATE"))
    assert lines[0].startswith("broken: flow: down: new break in forward: clone (")
    assert lines[-1] == "if that is intended, record it again: UPDATE"


def test_an_unchanged_model_keeps_its_contract(contract):
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = check(model, BATCH, contract)
    assert (result.status, result.changes) == ("kept", ())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training
    assert model.stem.weight.is_contiguous()
    assert list(check_lines(result, file="c.yaml", update="")) == ["the contract is kept: c.yaml"]


def test_training_is_followed_backward_too():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Softmax(1), nn.Conv2d(8, 8, 3))
    found = record(model, BATCH, FLAT, mode="train")
    places = [what for each in found.flow.values() for what in each]
    assert {what.split(":")[0] for what in places} == {"break in forward", "break in backward"}


def test_less_breaks_and_more_layouts_are_better(contract):
    model = net()
    OF_NETWORK["softmax in the middle"](model)
    known = record(model, BATCH, FLAT)
    result = check(net(), BATCH, known)
    assert result.status == "better"
    assert [change.text for change in result.of("better")] == [
        "no longer a break in forward: softmax"
    ]
    (*_, last) = check_lines(result, file="c.yaml", update="UPDATE")
    assert last == "to hold the model to what it keeps now, record it again: UPDATE"


def test_another_version_of_a_library_is_a_note(contract):
    known = dataclasses.replace(contract, seen={**contract.seen, "torch": "2.4.0", "timm": "1.0"})
    result = compare(known, contract)
    assert result.status == "kept"
    assert [(change.kind, change.where) for change in result.changes] == [
        ("note", "timm"),
        ("note", "torch"),
    ]


def time(ratio, low, high, machine="a"):
    return {"time": TimeRatio(ratio=ratio, low=low, high=high, machine=machine)}


def error(part):
    return {"errors": {"outputs": part}}


TIME = time(0.8, 0.78, 0.82)
PASS, FAIL = {"verified": "pass"}, {"verified": "fail"}


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (TIME, time(1.0, 0.95, 1.1), "broken"),
        (TIME, time(0.5, 0.45, 0.55), "better"),
        (TIME, time(0.84, 0.81, 0.86), "too noisy"),
        (TIME, {"untimed": "0.02 to 1.41 times as long"}, "too noisy"),
        (TIME, time(1.0, 0.95, 1.1, "b"), "note"),
        (TIME, time(0.81, 0.79, 0.83), None),
        (TIME, {"time": None}, "note"),
        (PASS, FAIL, "broken"),
        (PASS, {"verified": "cannot tell"}, "too noisy"),
        (FAIL, PASS, "better"),
        (PASS, {"verified": ""}, "note"),
        (FAIL, FAIL, None),
        (error(0.01), error(0.9), None),
        (error(0.01), error(2.0), "broken"),
        (error(2.0), error(3.0), None),
        (error(2.0), error(0.01), None),
    ],
)
def test_time_and_errors_break_a_contract_only_for_certain(before, after, kind, contract):
    known, now = (dataclasses.replace(contract, **each) for each in (before, after))
    assert [change.kind for change in compare(known, now).changes] == ([kind] if kind else [])


def test_equal_changes_are_one_line_with_a_count(contract):
    weights = {
        name: re.sub(r" \S+ channels_last ", " 1,1 other ", text)
        for name, text in contract.weights.items()
    }
    result = compare(contract, dataclasses.replace(contract, weights=weights))
    texts = "\n".join(check_lines(result, file="", update=""))
    assert "and 2 more: channels_last is now other" in texts
    many = {f"m{i}": {f"break in forward: c{i}": 1} for i in range(20)}
    result = compare(contract, dataclasses.replace(contract, flow=many))
    lines = list(check_lines(result, file="", update=""))
    assert "broken: 12 more changes" in lines
    assert len(lines) < 24


def test_markdown_escapes_names_and_puts_the_worst_first(contract):
    flow = {"a_b*": {"break in forward: x": 1}}
    broken = compare(contract, dataclasses.replace(contract, flow=flow))
    kept = compare(contract, contract)
    results = [{"status": each.status, "text": markdown("a`b", each)} for each in (kept, broken)]
    text = page(results)
    assert text.startswith(
        "### Layout contracts: 1 broken, 0 better, 1 kept\n\n- `a'b`: the contract is broken"
    )
    assert r"a\_b\*" in text


def test_a_contract_is_read_as_it_was_written(tmp_path, contract):
    file = tmp_path / "contract.yaml"
    flow = {"down": {"break in forward: clone": 2}}
    whole = dataclasses.replace(contract, **TIME, optimizer={"a": "b"}, flow=flow)
    whole.save(file)
    assert Contract.load(file) == whole
    assert file.read_text().startswith("format: prepare.contract\nversion: 1\nmodel: ")


@pytest.mark.parametrize(
    "name", ["_fc", "nan", "1e5", "0o17", "${a}", "<<", "on", "010", "a: b", "*a", ""]
)
def test_a_contract_may_hold_a_module_of_any_name(tmp_path, contract, name):
    whole = dataclasses.replace(contract, modules={name: name}, layouts={"a": name})
    whole.save(tmp_path / "contract.yaml")
    assert Contract.load(tmp_path / "contract.yaml") == whole


def test_aliases_in_a_contract_are_not_expanded(tmp_path, contract):
    contract.save(tmp_path / "c.yaml")
    lines = [f"  l{i}: &l{i} {{a: *l{i - 1}, b: *l{i - 1}}}" for i in range(1, 40)]
    with (tmp_path / "c.yaml").open("a") as file:
        file.write("\n".join(["sizes:", "  l0: &l0 {}", *lines]))
    with pytest.raises(ContractError, match="holds the a"):
        Contract.load(tmp_path / "c.yaml")


def test_a_check_is_read_as_it_was_written(tmp_path, contract):
    whole = dataclasses.replace(contract, verified="fail")
    result = dataclasses.replace(compare(contract, whole), file="c.yaml")
    result.save(tmp_path / "contract.json")
    assert ContractCheck.load(tmp_path / "contract.json") == dataclasses.replace(result, today=None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "format: prepare.recipe\nversion: 1\n",
            "this is a prepare.recipe, not a prepare.contract",
        ),
        ("format: prepare.contract\nversion: 2\n", "version 2 is not known here"),
        ("[", "this is not a contract: ValueError"),
        ("!!python/object/apply:os.system [id]", "this is not a contract"),
        ("format: prepare.contract\nversion: 1\n", "the keys are"),
    ],
)
def test_a_file_that_is_not_a_contract_is_named(text, message, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ContractError, match="c.yaml") as caught:
        Contract.load(tmp_path / "c.yaml")
    assert message in str(caught.value)


def test_a_missing_contract_is_a_file_error(tmp_path):
    with pytest.raises(FileError):
        Contract.load(tmp_path / "none.yaml")


class CannotBeCopied(nn.Conv2d):
    def __deepcopy__(self, memo):
        raise TypeError("no")


def test_wrong_arguments_of_a_contract_are_named():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with pytest.raises(ConfigError, match="mode: 'evl' is not a mode; did you mean 'eval'"):
        record(net(), BATCH, mode="evl")
    with pytest.raises(ConfigError, match="time: needs a recipe"):
        record(net(), BATCH, time=True)
    with pytest.raises(ConfigError, match="optimizer: belongs to the model"):
        record(net(), BATCH, FLAT, optimizer=optimizer)
    with pytest.raises(RefusedError, match="model: cannot be copied"):
        record(CannotBeCopied(3, 4, 3), BATCH, FLAT)


OBSERVE = "prepare.stages.contract.observe"


@pytest.fixture
def timed_as(monkeypatch):
    """Return a function that lets the timing of a contract give an interval and settings."""

    def timed_as(low, high, **settings):
        ratio = (low + high) / 2
        row = VariantResult(name="a", verdict="", ratio=ratio, ratio_interval=(low, high))
        compared = SimpleNamespace(row=lambda _: row, settings={"threads": 2, **settings})
        monkeypatch.setattr("prepare.stages.bench.compare", lambda *_, **__: compared)

    return timed_as


def test_the_time_is_measured_if_it_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(f"{OBSERVE}._SECONDS", 0.05)
    Pipeline.from_config(FLAT).save(tmp_path / "recipe.yaml")
    known = record(net(), BATCH, tmp_path / "recipe.yaml", time=True)
    assert bool(known.time) != bool(known.untimed)
    monkeypatch.setattr(f"{OBSERVE}._time", lambda *_, **__: (TIME["time"], ""))
    known = record(net(), BATCH, FLAT, time=True)
    assert check(net(), BATCH, known).today.time == TIME["time"]


@pytest.mark.parametrize(
    ("low", "high", "settings"),
    [(0.02, 1.41, {}), (0.78, 0.82, {"cores_available": 2, "others": 2.0})],
    ids=["wide", "disturbed"],
)
def test_a_time_that_is_noise_is_not_recorded(low, high, settings, timed_as, tmp_path):
    timed_as(low, high, **settings)
    known = record(net(), BATCH, FLAT, time=True)
    assert (known.time, known.is_timed) == (None, False)
    assert known.untimed.startswith(f"{low:.2f} to {high:.2f} times as long: ")
    known.save(tmp_path / "c.yaml")
    assert Contract.load(tmp_path / "c.yaml").untimed == known.untimed
    timed_as(0.78, 0.82)
    assert record(net(), BATCH, FLAT, time=True).time.low == 0.78


def test_a_processor_without_a_name_can_be_timed(monkeypatch, timed_as):
    here = {**environment(), "cpu": None}
    monkeypatch.setattr(f"{OBSERVE}.environment", lambda: here)
    timed_as(0.48, 0.52)
    known = record(net(), BATCH, FLAT, time=True)
    assert known.time.machine.startswith("a processor without a name, 2 threads")


def test_a_kept_contract_says_first_that_it_is_kept(contract):
    known = dataclasses.replace(contract, time=TIME["time"])
    today = dataclasses.replace(
        contract, untimed="0.02 to 1.41 times as long: too wide an interval"
    )
    found = contract_document(ReportContext(found={"contract": compare(known, today)}))
    assert found.answers[0].line.startswith("kept: ; unclear: time ratio: 0.02 to 1.41 times")
    assert found.advice[0].remark == "all that can be decided is as recorded"
    found = contract_document(ReportContext(found={"contract": compare(known, known)}))
    assert found.advice[0].remark == "all is as recorded"


NETWORKS = {
    "net": (net, BATCH, FLAT),
    "norms": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 2, 1),
        ),
        torch.randn(2, 3, 16, 16),
        FLAT,
    ),
    "bfloat16": (net, BATCH, {**FLAT, "half": {"dtype": "bfloat16"}}),
    "resnet": (lambda: ResNet2d(), torch.randn(1, 3, 32, 32), FLAT),
    "unet": (lambda: UNet2d(width=4, depth=2), torch.randn(2, 1, 16, 16), FLAT),
    "repaired": (
        lambda: UNet3d(width=4, depth=2),
        torch.randn(1, 1, 8, 8, 8),
        {"conv3d_memory_format": {}, "repair_layout": {}},
    ),
}


def broken_by_seed(name, mode, seeds):
    """Return the seeds whose weights and batch break the contract of the same network with seed 0."""
    build, batch, recipe = NETWORKS[name]
    known, broken = None, []
    for seed in range(seeds + 1):
        torch.manual_seed(seed)
        model, inputs = build(), torch.randn_like(batch)
        if known is None:
            known = record(model, inputs, recipe, mode=mode)
        elif (result := check(model, inputs, known)).of("broken"):
            broken.append((seed, check_lines(result, file="contract.yaml", update="update it")))
    return broken


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_other_weights_and_inputs_keep_a_contract(mode):
    assert broken_by_seed("norms", mode, 3) == []


@pytest.mark.parametrize("busy", [False, True], ids=["quiet", "busy"])
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.slow
def test_none_of_2000_checks_breaks_a_contract(name, mode, busy):
    burners = [
        subprocess.Popen(
            [sys.executable, "-c", "import os\nwhile os.getppid() != 1: sum(range(10**6))"]
        )
        for _ in range(3 * busy)
    ]
    try:  # 6 networks in 2 modes: 2,004 checks on a quiet machine, and as many on a busy one
        assert broken_by_seed(name, mode, 167) == []
        build, batch, recipe = NETWORKS[name]
        model = build()
        known = record(model, batch, recipe, mode=mode)
        for _ in range(25):
            assert check(model, batch, known).status == "kept"
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
