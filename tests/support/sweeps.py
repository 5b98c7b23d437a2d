"""Helpers that run sweeps over the networks of `sample_nets`, in this process or in a child process."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from own_process import start_command
from paths import SHARED

QUICK = ("bench=none", "verify=none", "flow=none")
NET = "model._target_=sample_nets."
# A module with a step.
DOUBLED = """
from prepare.registry import register
from prepare.step import TensorStep, Want
@register("doubled")
class Doubled(TensorStep):
    def want(self, tensor):
        return Want(dtype="float64")
"""
# Every way in which a job can fail, with the status and the reason of its row.
FAILING = {
    "raises": ("failed", "in raises: ValueError: no such depth"),
    "exits": ("failed", "the run called sys.exit(0)"),
    "leaves": ("crashed", "the run ended its process with exit code 0, as os._exit does"),
    "is_killed": ("crashed", "killed by SIGKILL: out of memory?"),
    "segfaults": ("crashed", "killed by SIGSEGV: a crash in native code"),
    "runs_out_of_memory": ("failed", "in runs_out_of_memory: MemoryError: 2 TiB"),
}
# Failing jobs among healthy ones; the last one reports whether the process state is intact.
MIXED = ("Net", *FAILING, "changes_the_process", "reports_the_process")


class Ended(NamedTuple):
    """A sweep that has ended."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def rows(self) -> list[dict]:
        return json.loads((self.folder / "summary.json").read_text())["rows"]

    @property
    def statuses(self) -> list[str]:
        return [row["status"] for row in self.rows]

    def file(self, number: int, name: str) -> Path:
        return self.folder / self.rows[number]["folder"] / name

    def result(self, number: int) -> dict:
        return json.loads(self.file(number, "result.json").read_text())


def start(*words: str, cwd: Path, folder: str = "swept", **environ: str) -> subprocess.Popen:
    """Start the sweep in a child process, which reacts to Ctrl-C and can import `sample_nets`."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": SHARED, "COLUMNS": "200"} | environ
    words = ["--multirun", *QUICK, f"hydra.sweep.dir={folder}", *words]
    return start_command(*words, cwd=cwd, env=env)


def finish(process: subprocess.Popen, folder: Path) -> Ended:
    out, err = process.communicate(timeout=300)
    return Ended(process.returncode, out, err, folder)


def run(*words: str, cwd: Path, **environ: str) -> Ended:
    return finish(start(*words, cwd=cwd, **environ), cwd / "swept")


def assert_only_failing_jobs_fail(ended: Ended, names: tuple[str, ...] = MIXED) -> None:
    """Assert that each healthy job of `names` is done, each failing one named, and the summary complete."""
    assert ended.code == 1, ended.err
    assert len(ended.rows) == len(names)
    for name, row in zip(names, ended.rows, strict=True):
        status, words = FAILING.get(name, ("ok", ""))
        assert row["status"] == status, (name, row)
        assert words in (row["reason"] or ""), (name, row)
        assert ended.result(row["number"])["status"] == status
    assert "Traceback" not in ended.out + ended.err
    log = ended.file(len(names) - 1, "log.txt").read_text()
    assert log.startswith("process (torch.float32, True, ")


def wait_for(condition, *, seconds: float = 300.0):
    """Return the value of `condition` as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)
    return value


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return other processes whose working directory or command is in `folder`, but not the test's own."""
    processes, this = [], psutil.Process()
    known = {this, *this.children(recursive=True)}
    for process in psutil.process_iter():
        try:
            about = [process.cwd(), *process.cmdline()]
            ended = process in known or process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if not ended and any(str(folder) in word for word in about):
            processes.append(process)
    return processes
