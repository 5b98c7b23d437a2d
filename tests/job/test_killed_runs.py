"""Runs that are interrupted or killed leave whole files."""

import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest

from run_faults import NETS, WRITTEN, all_whole, drive, finish, posix, start, status, told

KILLED = """
    rng = random.Random(count)
    for number in range(count):
        child = os.fork()
        while not child:
            run("out.txt", f"hydra.run.dir=runs/{number}-{time.time_ns()}")
        while not list(Path("runs").glob(f"{number}-*")):
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.15) + rng.randrange(2) * rng.uniform(0, 0.5))
        os.kill(child, signal.SIGKILL)
        print(os.waitpid(child, 0)[1])
"""


def wait_for(path: Path, run: subprocess.Popen) -> None:
    for _ in range(6000):
        if path.exists():
            return
        assert run.poll() is None, run.communicate()
        time.sleep(0.01)
    raise AssertionError(f"{path} never came")


@posix
def test_ctrl_c_during_a_run_exits_130_and_leaves_whole_files(folder):
    builds = ("waits", "waits_while_it_is_built")
    runs = {}
    for build in builds:
        (folder / build).mkdir()
        (folder / build / "nets.py").write_text(textwrap.dedent(NETS))
        words = [f"model._target_=nets.{build}", "input.shape=[1,3,4,4]", "memfmt=channels_last"]
        runs[build] = start(*words, "hydra.run.dir=run", cwd=folder / build)
    for build, run in runs.items():
        wait_for(folder / build / "here", run)
        time.sleep(0.1)
        run.send_signal(signal.SIGINT)
        code, _, err = finish(run)
        assert (code, told(err)) == (130, ["stopped by Ctrl-C"])
        left = {"job.json", "environment.json", "report.html", "result.json"}
        assert set(all_whole(folder / build / "run")) == left
        assert status(folder / build / "run") == "interrupted"


def kill_at_random_moments(folder: Path, moments: int) -> int:
    """Kills runs at random moments; gives the number of those that were in the middle of their record."""
    assert drive(KILLED, moments, folder) == [signal.SIGKILL] * moments
    midway, runs = 0, list((folder / "runs").iterdir())
    assert len(runs) >= moments
    for where in runs:
        names = all_whole(where, killed=True)
        assert ("result.json" in names) == (set(names) == set(WRITTEN))
        midway += 0 < len(names) < len(WRITTEN)
    return midway


@posix
def test_a_run_killed_at_any_moment_leaves_whole_files(folder):
    kill_at_random_moments(folder, 4)


@posix
@pytest.mark.slow
def test_two_hundred_killed_runs_leave_whole_files(folder):
    assert kill_at_random_moments(folder, 200) > 0
