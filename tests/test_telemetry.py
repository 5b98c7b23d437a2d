"""Nothing that prepare starts reports to anybody: every connection beyond this machine is refused."""

import os
import socket
from pathlib import Path

import pytest


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
