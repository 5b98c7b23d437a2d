"""Tests of claims: one process has a job, on every machine, and the job of a dead one can be taken over."""

import errno
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from filelock import Timeout

import machines
from prepare.app.job.record import Job, Record, Result
from prepare.app.sweep import coordinator, locks
from prepare.app.sweep.coordinator import Coordinator
from prepare.app.sweep.locks import Claim, ClaimLost, is_held
from prepare.app.sweep.manifest import (
    SweepManifest,
    job_claim,
    read_sweep_manifest,
    write_sweep_manifest,
)
from prepare.app.sweep.summary import read_summary
from prepare.core.utils import files
from prepare.errors import ConfigError
from sweeps import NET, finish, processes_in, start, wait_for

pytestmark = pytest.mark.skipif(os.name != "posix", reason="asks for fork and signals of POSIX")

# Notes each result that a job has written, in the process of the job.
NOTES = """
import os
from pathlib import Path
from prepare.app.job.record import Record

write = Record.write_result

def write_and_note(self, result):
    write(self, result)
    with Path("written").open("a") as file:
        file.write(f"{self.job().identity} {result.status}\\n")

Record.write_result = write_and_note
"""


@pytest.fixture
def fast(monkeypatch):
    """Let a claim seem dead within a second."""
    monkeypatch.setattr(locks, "_BEAT", 0.05)
    monkeypatch.setattr(locks, "_DEAD", 0.75)


@pytest.fixture
def elsewhere():
    """Return a function that leaves a claim as a process of another machine, which does not touch it."""

    def leave(path: Path) -> Path:
        held = Claim(path)
        assert held.acquire()
        file = file_of(path)
        text = file.read_text()
        held.close()
        file.write_text(text.replace(f"host={locks._machine()}", "host=another"))
        return file

    return leave


def file_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lease")


def take_over(path: Path) -> None:
    """Take a claim over, as another machine does after its process seemed dead."""
    file = file_of(path)
    other = file.with_name("other")
    other.write_text(file.read_text().replace("token=", "token=0"))
    other.replace(file)


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("turns", [4, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("left", ["nothing", "dead", "ended", "empty"])
def test_one_of_many_rivals_acquires_a_claim(tmp_path, left, turns):
    gone = dead_process()
    for turn in range(2 if left == "empty" else turns):
        path = tmp_path / str(turn)
        if left != "nothing":
            first = Claim(path)
            assert first.acquire()
            text = file_of(path).read_text()
            first.close()
            if left == "dead":
                file_of(path).write_text(text.replace(f"pid={os.getpid()}", f"pid={gone}"))
            if left == "empty":
                file_of(path).touch()
        rivals = [Claim(path) for _ in range(8)]
        barrier, won = threading.Barrier(len(rivals)), []

        def take(rival, barrier=barrier, won=won):
            barrier.wait()
            won.append(rival.acquire())

        threads = [threading.Thread(target=take, args=(rival,)) for rival in rivals]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(won) == [False] * 7 + [True]
        for rival in rivals:
            rival.close()


@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
def test_a_claim_of_another_machine_is_kept_whatever_its_clock(tmp_path, fast, monkeypatch, skew):
    held = Claim(tmp_path / "claim")
    assert held.acquire()
    with monkeypatch.context() as patched:
        patched.setattr(locks, "_machine", lambda: "another")
        patched.setattr(socket, "gethostname", lambda: "another")
        patched.setattr(locks, "ask_server", lambda folder: time.time() + skew)
        assert not Claim(tmp_path / "claim").acquire()
    held.close()
    assert Claim(tmp_path / "claim").acquire()


def test_a_claim_of_a_dead_machine_is_taken_over_after_watching(tmp_path, fast, elsewhere):
    path = tmp_path / "claim"
    file = elsewhere(path)
    assert is_held(path)
    assert not Claim(path).acquire()
    os.utime(file, (1, 1))
    assert not is_held(path)
    assert not Claim(path).acquire(watch=False)
    taken = Claim(path)
    assert taken.acquire()
    assert is_held(path)


# Ends the process at the n-th call that touches a file, as SIGKILL does at any of them.
KILLED_AT = """
import os, sys
from pathlib import Path
from prepare.app.sweep.locks import Claim

claim, last = Claim(Path(sys.argv[1])), int(sys.argv[2])
count = 0

def stop(*_):
    global count
    count += 1
    if count == last:
        os._exit(9)

def before(call):
    def run(*args, **kwargs):
        stop()
        return call(*args, **kwargs)
    return run

sys.addaudithook(lambda event, _: event in ("open", "os.link", "os.remove", "os.rename", "os.utime") and stop())
os.write = before(os.write)
claim.acquire()
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_no_claim_without_a_process(tmp_path):
    moments = range(1, 40)
    for moment in moments:
        path = tmp_path / str(moment)
        code = [sys.executable, "-c", KILLED_AT, str(path), str(moment)]
        ended = subprocess.run(code, check=False).returncode
        with locks.claim(path) as taken:
            assert taken, moment
            assert file_of(path).stat().st_size
        if ended == 0:
            break
    assert moments[0] < moment < moments[-1]


@pytest.mark.slow
def test_filelock_alone_keeps_an_empty_claim_for_ever(tmp_path, fast):
    file_of(tmp_path / "claim").touch()
    with pytest.raises(Timeout):
        locks._lease(tmp_path / "claim").acquire(timeout=4)
    assert Claim(tmp_path / "claim").acquire()


def test_a_claim_needs_no_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    held = Claim(tmp_path / "claim")
    assert held.acquire()
    assert not Claim(held.path).acquire()
    held.close()
    assert not list(tmp_path.iterdir())
    assert Claim(held.path).acquire()


def test_a_process_that_lost_its_claim_writes_and_deletes_nothing(tmp_path):
    path, mine = tmp_path / "claim", tmp_path / "job.json"
    mine.write_text("of another")
    with pytest.raises(ClaimLost), locks.claim(path) as held:
        assert held
        files.write_text(tmp_path / "before", "")
        take_over(path)
        for change in (partial(files.write_text, mine, "x"), partial(files.remove, mine)):
            with pytest.raises(ClaimLost):
                change()
        Record(tmp_path).clear()
    assert mine.read_text() == "of another"
    assert {file.name for file in tmp_path.iterdir()} == {"before", "job.json", "claim.lease"}
    files.write_text(mine, "x")


def test_a_suspended_process_notices_that_it_lost_its_claim(tmp_path, fast):
    path = tmp_path / "claim"
    held = Claim(path)
    assert held.acquire()
    check = pickle.loads(pickle.dumps(held.check))
    check()
    take_over(path)
    with pytest.raises(ClaimLost):
        check()
    held.close()
    assert file_of(path).exists()


def test_an_id_that_another_process_has_now_is_not_the_claimant(tmp_path):
    held = Claim(tmp_path / "claim")
    assert held.acquire()
    text = file_of(held.path).read_text()
    held.close()
    start = re.search(r"^start=(\d+)$", text, re.MULTILINE)
    if not start:
        pytest.skip("this system does not say when a process was started")
    file_of(held.path).write_text(text.replace(start[1], str(int(start[1]) - 1)))
    assert Claim(held.path).acquire(watch=False)


@pytest.mark.slow
def test_a_job_whose_claim_is_lost_ends_and_writes_nothing(tmp_path):
    process = start(NET + "waits", "seed=0", "resume=true", cwd=tmp_path)
    wait_for((tmp_path / "began").exists)
    swept = tmp_path / "swept"
    (identity,) = read_sweep_manifest(swept).identities
    path = job_claim(swept, identity)
    file_of(path).unlink()
    with locks.claim(path) as taken:
        assert taken
        assert "waiting for" in _until(process, "waiting")
        (record,) = (Record(each.parent) for each in swept.rglob("job.json"))
        assert record.result() is None
        (tmp_path / "go").touch()
    ended = finish(process, swept)
    assert (ended.code, ended.statuses) == (1, ["crashed"])
    wait_for(lambda: not processes_in(tmp_path), seconds=5)


def _until(process, word: str) -> str:
    said = ""
    while word not in said:
        said += (line := process.stderr.readline())
        assert line, said
    return said


def test_a_coordinator_claims_nothing_through_a_link(tmp_path):
    folder, outside = tmp_path / "swept", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (folder / ".locks").symlink_to(outside)
    with pytest.raises(ConfigError, match="holds a link out of it: .locks"):
        Coordinator(folder, rows=[["seed=0"]], identities=["row"], resume=False)
    assert not list(outside.iterdir())


def test_a_command_waits_for_a_row_that_is_claimed_anew(tmp_path, monkeypatch):
    manifest = SweepManifest("sweep", [["seed=0"]], ["row"])
    write_sweep_manifest(tmp_path, manifest)
    record = Record(tmp_path / "0")
    record.begin(Job(0, "sweep", ["seed=0"], {}, identity="row"))
    waiting = Coordinator(tmp_path, rows=manifest.rows, identities=manifest.identities, resume=True)
    other, attempts = Claim(job_claim(tmp_path, "row")), []

    def finish_it():
        time.sleep(0.3)
        record.write_result(Result("ok"))
        other.close()

    def claim(*args, **kwargs):
        if not attempts:  # another command was quicker to see that the process had died
            assert other.acquire()
            threading.Thread(target=finish_it).start()
        attempts.append(args)
        return locks.claim(*args, **kwargs)

    monkeypatch.setattr(coordinator, "claim", claim)
    waiting.end(stopped=False)
    assert record.result() == Result("ok")
    assert len(attempts) == 1


# ------------------------------------------------------------------------------- many workers


def share_and_kill(folder: Path, kind: str, rng: random.Random, *, workers: int, jobs: int) -> None:
    """Let workers share a sweep, kill half of them, and let another run what is left."""
    folder.mkdir()
    (folder / "notes.py").write_text(NOTES)
    seeds = f"seed={','.join(map(str, range(jobs)))}"
    words = [NET + "Net", "plugins=[notes]", seeds, "resume=true"]
    processes = [machines.start(kind, each, *words, cwd=folder) for each in range(workers)]
    killed = processes[: workers // 2]
    swept, written = folder / "swept", folder / "written"
    wait_for(written.exists, seconds=300)
    for process in killed:
        time.sleep(rng.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
    ended = [process.communicate(timeout=300) for process in processes]
    for process, (out, err) in zip(processes, ended, strict=True):
        allowed = {0, 1, -signal.SIGKILL} if process in killed else {0, 1}
        assert process.returncode in allowed, out + err
        assert "Traceback" not in out + err
    wait_for(lambda: not processes_in(folder), seconds=30)
    closing = machines.start(kind, workers, *words, cwd=folder)
    out, err = closing.communicate(timeout=300)
    assert closing.returncode == 0, out + err
    assert [row.status for row in read_summary(swept).rows] == ["ok"] * jobs
    for path in swept.rglob("result.json"):
        assert {"audit.json", "recipe.yaml", "report.html"} <= {
            p.name for p in path.parent.iterdir()
        }
    # A kill may have come between a result and its note, so a note may be missing, but none is there twice.
    counts = Counter(line for line in written.read_text().splitlines() if line.endswith(" ok"))
    assert set(counts.values()) == {1}, counts
    assert jobs - len(killed) <= len(counts) <= jobs


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=() if k == "locks" else pytest.mark.slow, id=k) for k in machines.KINDS],
)
def test_workers_that_share_a_sweep_do_each_job_once(tmp_path, kind):
    share_and_kill(tmp_path / "one", kind, random.Random(kind), workers=3, jobs=4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", machines.KINDS)
def test_eight_workers_do_each_job_once_in_twenty_sweeps(tmp_path, kind):
    rng = random.Random(kind)
    for turn in range(20):
        share_and_kill(tmp_path / f"sweep-{turn}", kind, rng, workers=8, jobs=8)
