"""Sweeps over the networks of `sample_nets`, in this process or in one of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from paths import RUN, SHARED

NET = "model._target_=sample_nets."
# Every way in which a job can end badly, with the status and the words of its row.
SICK = {
    "raises": ("failed", "raised ValueError: no such depth"),
    "exits": ("failed", "the job called sys.exit(0)"),
    "leaves": ("crashed", "the job ended its process with exit code 0, as os._exit does"),
    "is_killed": ("crashed", "killed by SIGKILL: out of memory?"),
    "segfaults": ("crashed", "killed by SIGSEGV: a crash in native code"),
    "runs_out_of_memory": ("failed", "out of memory: MemoryError: 2 TiB"),
}
# The sick among healthy ones, and one at the end that finds the process as it should be.
MIXED = ("Net", *SICK, "changes_the_process", "reports_the_process")


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
    """Starts the sweep in a process of its own, which heeds Ctrl-C and finds `sample_nets`."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": SHARED, "COLUMNS": "200"} | environ
    # A shell has its background processes ignore Ctrl-C, and all that they start.
    heeds = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    return subprocess.Popen(
        [sys.executable, str(RUN), "--multirun", "bench=none", "verify=none", "flow=none",
         f"hydra.sweep.dir={folder}", *words],
        cwd=cwd, env=env, preexec_fn=heeds, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen, folder: Path) -> Ended:
    out, err = process.communicate(timeout=300)
    return Ended(process.returncode, out, err, folder)


def run(*words: str, cwd: Path, **environ: str) -> Ended:
    return finish(start(*words, cwd=cwd, **environ), cwd / "swept")


def healthy_and_sick(ended: Ended) -> None:
    """Asserts that every healthy job of MIXED is done, every sick one named, and the summary complete."""
    assert ended.code == 1, ended.err
    assert len(ended.rows) == len(MIXED)
    for name, row in zip(MIXED, ended.rows, strict=True):
        status, words = SICK.get(name, ("ok", ""))
        assert row["status"] == status, (name, row)
        assert words in (row["reason"] or ""), (name, row)
        assert ended.result(row["number"])["status"] == status
    assert "Traceback" not in ended.out + ended.err
    said = ended.file(len(MIXED) - 1, "log.txt").read_text()
    assert said.startswith("process (torch.float32, True, ")


def wait_for(condition, *, seconds: float = 60.0):
    """What `condition` gives, once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)
    return found


def left_of(folder: Path) -> list[psutil.Process]:
    """The processes whose current folder, or whose command, is in `folder`, but for those of the test itself."""
    found, ours = [], psutil.Process()
    known = {ours, *ours.children(recursive=True)}
    for process in psutil.process_iter():
        try:
            about = [process.cwd(), *process.cmdline()]
        except psutil.Error:
            continue
        ended = process in known or process.status() == psutil.STATUS_ZOMBIE
        if not ended and any(str(folder) in word for word in about):
            found.append(process)
    return found
