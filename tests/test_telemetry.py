"""Nothing that prepare starts reports to anybody: every connection beyond this machine is refused."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paths import PYTHONPATH

EXPORTED = """
import time, torch
from prepare.stages.export import export
model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3)).eval()
assert export(model, torch.randn(1, 1, 8, 8), to="openvino", folder="out").status == "pass"
time.sleep(1)  # a report is sent from a thread
"""
openvino = pytest.mark.skipif(not importlib.util.find_spec("openvino"), reason="needs openvino")


def refused_by(code: str, folder: Path) -> str:
    """Return what a process that runs `code` tried to reach."""
    log = folder / "refused"
    log.touch()
    # A home of its own: OpenVINO asks there whether it was told to be silent.
    more = {"PYTHONPATH": PYTHONPATH, "PREPARE_TESTS_REFUSED": str(log), "HOME": str(folder)}
    env = {name: value for name, value in os.environ.items() if name not in ("CI", "TF_BUILD")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=env | more, cwd=folder,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return log.read_text()


@pytest.mark.slow
@openvino
def test_openvino_reports_nothing_where_a_model_is_exported(tmp_path):
    assert refused_by(EXPORTED, tmp_path) == ""


@pytest.mark.slow
@openvino
def test_openvino_reports_where_nobody_switches_it_off(tmp_path):
    assert refused_by("import openvino, time; time.sleep(1)", tmp_path) != ""


@pytest.mark.parametrize("name", ["RAY_USAGE_STATS_ENABLED", "HF_HUB_DISABLE_TELEMETRY"])
def test_the_command_line_switches_the_others_off(monkeypatch, capsys, name):
    from prepare.app.cli.main import run

    monkeypatch.delenv(name, raising=False)
    assert run(["--version"]) == 0
    assert os.environ.pop(name) in ("0", "1")


def test_a_connection_beyond_this_machine_is_refused_and_noted():
    noted = Path(os.environ["PREPARE_TESTS_REFUSED"])

    with pytest.raises(OSError, match="tests may not leave this machine"):
        socket.create_connection(("example.com", 80), timeout=1)
    assert "example.com" in noted.read_text()
    noted.write_text("")


def test_a_connection_to_this_machine_is_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()
