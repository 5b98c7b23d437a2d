"""Tests of the findings of a flow as SARIF, and of the modules that the terminal shows."""

import contextlib
import json
import types
from dataclasses import replace

import pytest
import torch

import made
from made import module
from prepare.app.report.terminal.document import part_lines
from prepare.core.document import ReportContext
from prepare.core.utils.text import size
from prepare.pipeline import Pipeline
from prepare.stages.flow import predict
from prepare.stages.flow.document import flow_document
from prepare.stages.flow.records import Event
from prepare.stages.flow.sarif import sarif_log
from prepare.stages.flow.torch_operators import CAUSES

NETS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4)

    def forward(self, x):
        return self.norm(self.conv(x)).contiguous()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block(), nn.Conv2d(4, 4, 3))

    @torch.no_grad()
    def forward(self, x):
        x = self.blocks(x)
        return x.contiguous()
"""


def event(cause="clone", source="nets.py:9", module="a", **more) -> Event:
    given = {
        "type": "Block",
        "operation": f"aten.{cause}",
        "bytes": 8,
        "operand": "",
        "cause": cause,
        "source": source,
    }
    return made.event(module, **given | more)


def log_of(*events: Event, modules=(), **more):
    flow = made.flow_of(
        wanted={4: "channels_last"}, events=events, modules=modules, convolutions=()
    )
    (run,) = sarif_log(replace(flow, **more))["runs"]
    return run


@pytest.fixture(scope="module")
def flow(tmp_path_factory):
    """The flow of a network in the folder `nets.py` of a user, who is in that folder."""
    folder, nets = tmp_path_factory.mktemp("nets"), types.ModuleType("nets")
    (folder / "nets.py").write_text(NETS)
    exec(compile(NETS, str(folder / "nets.py"), "exec"), vars(nets))
    model = nets.Net().eval()
    Pipeline.from_config({"conv2d_memory_format": {}}).apply(model, known_issues="ignore")
    example = torch.randn(1, 4, 12, 12).to(memory_format=torch.channels_last)
    with contextlib.chdir(folder):
        found = predict(model, example)
        return found, sarif_log(found)


@pytest.fixture
def nets(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def places(run):
    found = []
    for result in run["results"]:
        place = result["locations"][0].get("physicalLocation")
        where = place and (place["artifactLocation"]["uri"], place["region"]["startLine"])
        found.append((result["ruleId"], where))
    return found


def test_a_log_has_what_sarif_2_1_0_requires(flow):
    log = json.loads(json.dumps(flow[1]))
    assert (log["version"], log["$schema"][-10:]) == ("2.1.0", "2.1.0.json")
    (run,) = log["runs"]
    assert run["tool"]["driver"]["name"] == "prepare"
    rules = run["tool"]["driver"]["rules"]
    assert len({rule["id"] for rule in rules}) == len(rules) == 2
    assert run["invocations"][0]["executionSuccessful"] is True
    for result in run["results"]:
        assert result["level"] in {"none", "note", "warning", "error"}
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["message"]["text"]
        ((location,),) = (result["locations"],)
        assert location["physicalLocation"]["region"]["startLine"] >= 1
        assert all(each["fullyQualifiedName"] for each in location["logicalLocations"])
    assert places(run) == [
        ("layout/instance_norm", ("nets.py", 10)),
        ("layout/clone", ("nets.py", 21)),
    ]


def test_the_terminal_shows_the_layouts_of_own_modules(flow):
    by_name = {each.name: each for each in flow[0].modules}
    assert by_name[""].source == "nets.py:18"
    assert (by_name["blocks"].source, by_name["blocks"].given) == ("", "channels_last")
    shown = ReportContext(found={"flow": flow[0]}, ran=("flow",))
    (table,) = [
        part for part in flow_document(shown).parts() if getattr(part, "label", "") == "Modules"
    ]
    assert [line.split("  ")[0].strip() for line in part_lines(table)] == [
        "module", "the model itself", "blocks.1", "blocks.0", "blocks.2"
    ]  # fmt: skip
    assert [row[1:3] for row in table.rows] == [
        ("channels_last", "contiguous"), ("contiguous", "contiguous"),
        ("channels_last", "contiguous"), ("contiguous", "contiguous"),
    ]  # fmt: skip
    assert table.rows[0][3] == size(flow[0].summary["copied_bytes"])
    assert "Modules" not in str(flow[0])
    many = replace(flow[0], modules=flow[0].modules * 20)
    shown = ReportContext(found={"flow": many}, ran=("flow",))
    (table,) = [
        part for part in flow_document(shown).parts() if getattr(part, "label", "") == "Modules"
    ]
    assert len(list(part_lines(table))) < 25 < len(table.rows)


def test_equal_causes_at_one_line_are_one_result(nets):
    run = log_of(event(), event(module="b", count=3), event("cat"), event(kind="regain"))
    assert places(run) == [("layout/clone", ("nets.py", 9)), ("layout/cat", ("nets.py", 9))]
    (first, _) = run["results"]
    assert first["message"]["text"].startswith(
        "clone in Block loses the layout in a and 1 more: 4 times"
    )


@pytest.mark.parametrize("source", ["", "/elsewhere/nets.py:3", "library/nets.py:3"])
def test_a_break_outside_is_at_the_forward_around_it(source, nets):
    around = (
        replace(module("a"), source="nets.py:8"),
        replace(module("a.b"), source="library/x.py:1"),
    )
    assert places(log_of(event(source=source, module="a.b.c"), modules=around)) == [
        ("layout/clone", ("nets.py", 8))
    ]
    assert places(log_of(event(source=source))) == [("layout/clone", None)]


def test_a_flow_that_cannot_predict_did_not_succeed():
    (ended,) = log_of(status="cannot predict", reason="it asks for a value")["invocations"]
    assert ended["executionSuccessful"] is False
    (note,) = ended["toolExecutionNotifications"]
    assert note["message"]["text"] == "cannot predict: it asks for a value"


def test_a_rule_has_no_character_that_a_path_does_not_have():
    assert all(cause.replace("_", "").isalnum() for cause in CAUSES)
