"""The patch applies with git, replaces only the named calls, and needs nothing but torch."""

import importlib
import subprocess
import sys

import pytest
import torch

from prepare.stages.flow import observe
from prepare.stages.patch.make_patch import make_patch, patched_source, write_diff
from prepare.stages.patch.records import Patch
from prepare.steps.keeping.choose_calls import ChosenCalls, choose_calls
from prepare.steps.keeping.find_calls import find_calls

SOURCE = '''"""A network."""
from torch import nn, cat as join
import torch.nn.functional as F
import torch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(3, 8, 3, padding=1)  # ä

    def forward(self, x):
        x = self.conv(x)
        y = (
            (x * 2)
            .contiguous()
        )
        "äöü"; z = F.pad(y.clone(), (1, 1)); x = x.contiguous() + (y) + 1
        z = z.repeat(
            1, 1, (1), 1, 1
        )
        return torch.cat([z, torch.cat((x, y), -1)[..., :2]], dim=-1)


def untouched(x):
    return torch.cat([x])


class Twice(nn.Module):
    def forward(self, x):
        x = x.clone()
        return F.pad(
            x.clone(), (1, 1)
        )
'''


@pytest.fixture
def network(tmp_path, monkeypatch):
    """Return a module that is imported from a file in a package folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "patched_net.py").write_text(SOURCE)
    yield importlib.import_module("patched_net")
    del sys.modules["patched_net"]


def made(module):
    torch.manual_seed(0)
    return module.Net().to(memory_format=torch.channels_last_3d).eval()


def example():
    return torch.ones(2, 3, 4, 5, 6).contiguous(memory_format=torch.channels_last_3d)


def test_a_diff_applies_with_git_and_the_file_then_keeps_the_layout(network, tmp_path):
    before = made(network)
    expected = before(example())
    chosen = choose_calls(before, example(), backward=False)
    patch = make_patch(before, chosen)
    patch.save(tmp_path / "patch.json")
    assert Patch.load(tmp_path / "patch.json") == patch
    subprocess.run(["git", "apply", "patch.diff"], check=True, cwd=tmp_path)
    importlib.invalidate_caches()
    del sys.modules["patched_net"]
    (tmp_path / "__pycache__").exists() and [
        file.unlink() for file in (tmp_path / "__pycache__").iterdir()
    ]
    after = made(importlib.import_module("patched_net"))
    assert torch.equal(after(example()), expected)
    assert observe(before, example()).summary["breaks"] == patch.before[1] > 0
    assert observe(after, example()).summary["breaks"] == patch.after[1] == 0


def test_every_kind_of_call_is_replaced_in_the_text(network):
    calls = find_calls(network.Net)
    text = patched_source(SOURCE, list(calls))
    body = text[text.index("    def forward") :]
    assert "z = _kept_F_pad(_kept_x_clone(y), (1, 1)); x = " in body
    assert "x = _kept_x_add(_kept_x_add(_kept_x_contiguous(x) , (y)) , 1)" in body
    assert "_kept_x_contiguous((_kept_x_mul(x , 2))" in body
    assert "_kept_x_repeat(z, \n            1, 1, (1), 1, 1\n        )" in body
    assert "_kept_torch_cat([z, _kept_torch_cat((x, y), -1)[..., :2]], dim=-1)" in body
    assert "def untouched(x):\n    return torch.cat([x])\n" in text
    space = {}
    exec(compile(text, "patched", "exec"), space)
    assert torch.equal(made_of(space)(example()), made(network)(example()))


def made_of(space):
    torch.manual_seed(0)
    return space["Net"]().to(memory_format=torch.channels_last_3d).eval()


def test_only_the_named_calls_are_in_the_diff(network):
    call = next(call for call in find_calls(network.Net) if call.operator == "pad")
    diff = write_diff([call])
    removed = [line for line in diff.splitlines() if line[:1] == "-" and line[:3] != "---"]
    assert len(removed) == 1
    assert "F.pad" in removed[0]
    assert "def _keep_pad" in diff
    assert "def _keep_cat" not in diff


def test_the_same_code_is_replaced_at_every_line(network):
    call = next(call for call in find_calls(network.Twice) if call.operator == "clone")
    added = [line for line in write_diff([call]).splitlines() if "_kept_x_clone(x)" in line]
    assert len([line for line in added if line[:1] == "+" and "def " not in line]) == 2


def test_a_file_without_torch_gets_an_import():
    source = SOURCE.replace("import torch\n\n", "\n").replace("torch.cat", "join")
    space = {"__name__": "elsewhere"}
    exec(compile(patched_source(source, []), "patched", "exec"), space)
    assert space["torch"] is torch


def test_no_call_makes_no_diff():
    assert write_diff([]) == ""


def test_breaks_that_stay_have_a_reason(network):
    model = made(network)
    flow = observe(model, example())
    left = make_patch(model, ChosenCalls((), (), flow, flow)).left
    assert {each.reason for each in left} == {"a change removes no break"}
    assert sum(each.breaks for each in left) == flow.summary["breaks"]
    assert all(each.source.startswith("patched_net.py:") for each in left)
