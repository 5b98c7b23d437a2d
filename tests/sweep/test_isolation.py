"""Tests of isolation: each job of a sweep has its own process, and its failures are reported."""

import os
import sys

import pytest

from prepare.app.cli import main as cli
from sweeps import DOUBLED, MIXED, NET, Ended, assert_only_failing_jobs_fail, start, wait_for

QUICK = ("bench=none", "verify=none", "flow=none")
posix = pytest.mark.skipif(os.name != "posix", reason="asks for fork and signals of POSIX")
pytestmark = posix


@pytest.fixture
def sweep(tmp_path, monkeypatch, capsys):
    """Run a sweep in an empty folder, started by this process."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        code = cli.run(["--multirun", "hydra.sweep.dir=swept", *QUICK, *words])
        return Ended(code, *capsys.readouterr(), tmp_path / "swept")

    return run


def test_a_failing_job_is_reported_and_leaves_the_others_alone(sweep):
    names = [f"sample_nets.{name}" for name in MIXED]
    ran = sweep(f"model._target_={','.join(names)}")
    assert_only_failing_jobs_fail(ran)
    of_python = [
        ran.result(MIXED.index(name)) for name in ("exits", "raises", "runs_out_of_memory")
    ]
    assert [result["reason"] for result in of_python] == ["exit", "model", "oom"]
    assert all("Traceback" in result["traceback"] for result in of_python)
    text = ran.file(MIXED.index("exits"), "traceback.txt").read_text()
    assert text == of_python[0]["traceback"]
    assert not ran.file(0, "traceback.txt").exists()
    fell = ran.result(MIXED.index("segfaults"))
    assert "to fall" in fell["traceback"]
    assert "in segfaults" in fell["traceback"]
    assert "sample_nets.exits: failed, " in ran.err
    assert ", 6 failed" in ran.err


def test_a_job_gets_the_folder_and_environment_of_the_command(sweep, tmp_path, monkeypatch):
    (tmp_path / "own_nets.py").write_text(
        "import os\nfrom torch import nn\n"
        "def net():\n    print(os.getcwd(), os.environ['PREPARE_TEST'])\n    return nn.Conv2d(1, 1, 1)\n"
    )
    monkeypatch.setenv("PREPARE_TEST", "told")
    ran = sweep("model._target_=own_nets.net", "seed=0,1")
    assert ran.file(1, "log.txt").read_text() == f"{tmp_path} told\n"
    # The next sweep of this process sees the file as it is then.
    (tmp_path / "own_nets.py").write_text("from sample_nets import Net as net\n")
    again = sweep("model._target_=own_nets.net", "seed=0,1", "overwrite=true")
    assert not again.file(1, "log.txt").exists()


def test_a_plugin_registers_its_step_in_the_job_process(sweep, tmp_path):
    (tmp_path / "own_steps.py").write_text(DOUBLED)
    ran = sweep(
        NET + "Net", "plugins=[own_steps]", "+steps.doubled={}", "seed=0,1", "precision=float32"
    )
    assert ran.statuses == ["ok", "ok"], ran.err
    assert "own_steps" not in sys.modules


def test_processes_that_a_job_started_end_with_it(sweep, tmp_path):
    ran = sweep(NET + "forks", "seed=0,1")
    assert ran.code == 0
    wait_for(lambda: not _is_alive(int((tmp_path / "left").read_text())), seconds=5)


def test_without_isolation_a_job_runs_in_the_sweep_process(sweep, tmp_path):
    ran = sweep(NET + "waits", "+model.name=swept", "isolate=true,false")
    assert ran.statuses == ["ok", "ok"]
    apart, here = map(int, (tmp_path / "began").read_text().split())
    assert here == os.getpid() != apart


@pytest.mark.slow
def test_a_killed_fork_server_fails_one_job_and_is_replaced(tmp_path):
    process = start(NET + "waits,sample_nets.Net", cwd=tmp_path)
    wait_for((tmp_path / "began").exists)
    job = int((tmp_path / "began").read_text())
    os.kill(_parent(job), 9)
    out, err = process.communicate(timeout=60)
    ended = Ended(process.returncode, out, err, tmp_path / "swept")
    assert ended.statuses == ["crashed", "ok"]
    assert not _is_alive(job)


def _is_alive(pid: int) -> bool:
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def _parent(pid: int) -> int:
    import psutil

    return psutil.Process(pid).ppid()
