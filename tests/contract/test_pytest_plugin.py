"""The fixture `layout_contract` in the test suite of another project."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import prepare
from prepare.stages.contract import Contract, record

pytest_plugins = ["pytester"]
ROOT = Path(prepare.__file__).parents[1]

SUITE = """
import pytest
import torch
from torch import nn

class Net(nn.Sequential):
    def forward(self, x):
        return {forward}

@pytest.mark.parametrize("size", ["a/b"])
def test_layout(layout_contract, size):
    model = Net(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    layout_contract(model, torch.randn(1, 3, 8, 8), {{"conv2d_memory_format": {{}}}})
"""
KEPT, BROKEN = "super().forward(x)", "super().forward(x).contiguous()"
FILE = "contracts/test_net-test_layout-a-b.yaml"


@pytest.fixture(scope="module")
def everything_is_imported():
    # pytester forgets, and imports again, what is imported first within it.
    record(nn.Conv2d(3, 4, 3), torch.ones(1, 3, 8, 8), {"conv2d_memory_format": {}})


@pytest.fixture
def run(everything_is_imported, pytester):
    def run(forward, *options):
        (pytester.path / "test_net.py").write_text(SUITE.format(forward=forward))
        options = (
            "-p",
            "prepare.testing.pytest_plugin",
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
            *options,
        )
        return pytester.runpytest_inprocess(*options)

    run.path = pytester.path
    return run


SEEDED = """
import torch

def test_before():
    torch.manual_seed(7)

@pytest.mark.parametrize("again", [0, 1])
def test_seeded(layout_contract, again):
    assert torch.rand(1).item() == torch.rand(1, generator=torch.Generator().manual_seed(0)).item()

def test_after():
    assert torch.rand(1).item() == torch.rand(1, generator=torch.Generator().manual_seed(7)).item()
"""


def test_the_fixture_seeds_torch_for_its_test_alone(run):
    (run.path / "test_seeded.py").write_text("import pytest\n" + SEEDED)
    run(KEPT, "test_seeded.py").assert_outcomes(passed=4)


def test_a_missing_contract_fails_and_is_written_on_update(run):
    result = run(KEPT)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [f"there is no contract at {FILE}; write it: pytest --prepare-update"]
    )
    run(KEPT, "--prepare-update").assert_outcomes(passed=1)
    assert Contract.load(run.path / FILE).layouts == {"0": "channels_last", "2": "channels_last"}


def test_a_broken_contract_fails_until_it_is_updated(run):
    run(KEPT, "--prepare-update")
    result = run(BROKEN, "--junit-xml=report.xml", "--prepare-summary=summary.md")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["broken: flow: Net: new break in forward: clone (test_net.py:8)", "if that is intended*"]
    )
    assert '<property name="layout_contract"' in (run.path / "report.xml").read_text()
    summary = (run.path / "summary.md").read_text()
    assert summary.startswith("### Layout contracts: 1 broken, 0 better, 0 kept")
    assert r"test\_net.py:8" in summary


def test_an_update_writes_what_is_broken_and_better_is_named(run):
    run(KEPT, "--prepare-update").assert_outcomes(passed=1)
    run(BROKEN, "--prepare-update").assert_outcomes(passed=1)
    result = run(KEPT)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [f"{FILE}: better than its contract; tighten it: pytest --prepare-update"]
    )


@pytest.mark.slow
def test_a_file_may_be_named_and_a_test_may_have_two(run):
    suite = SUITE.format(forward=KEPT)
    last = suite.splitlines()[-1]
    more = [last, last, f'{last[:-1]}, file="here/c.yaml")']
    (run.path / "test_net.py").write_text(suite.replace(last, "\n".join(more)))
    options = ("-p", "prepare.testing.pytest_plugin", "-p", "no:xdist", "--prepare-update")
    pytest.main([str(run.path), f"--rootdir={run.path}", "-q", *options, "-p", "no:cacheprovider"])
    found = {path.name for path in run.path.rglob("*.yaml")}
    assert found >= {"test_net-test_layout-a-b.yaml", "test_net-test_layout-a-b-2.yaml"}


def outside(folder, *options):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "prepare.testing.pytest_plugin",
        "-q",
        *options,
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_nothing_is_imported_unless_the_fixture_is_used(tmp_path):
    (tmp_path / "test_other.py").write_text(
        "import sys\ndef test_other():\n"
        "    ours = {name for name in sys.modules if name.startswith('prepare')}\n"
        "    assert ours <= {'prepare', 'prepare.testing', 'prepare.testing.pytest_plugin'}, ours\n"
        "    assert 'torch' not in sys.modules\n"
    )
    done = outside(tmp_path, "-p", "no:xdist", "-p", "no:anyio", "-p", "no:typeguard")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_contracts_are_checked_by_several_workers(tmp_path):
    text = SUITE.format(forward=KEPT).replace('["a/b"]', "range(6)")
    (tmp_path / "test_net.py").write_text(text)
    done = outside(tmp_path, "-n", "2", "--prepare-update")
    assert "6 passed" in done.stdout
    assert len(list((tmp_path / "contracts").glob("*.yaml"))) == 6
    (tmp_path / "test_net.py").write_text(text.replace(KEPT, BROKEN))
    done = outside(tmp_path, "-n", "2", "--prepare-summary=summary.md")
    assert re.search("6 failed", done.stdout)
    assert (tmp_path / "summary.md").read_text().count("new break in forward: clone") == 6
