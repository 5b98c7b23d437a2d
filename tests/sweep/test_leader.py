"""The command that leads a sweep: its lock on the folder, and what it makes of runs that left no result."""

import os
import signal

import pytest

from prepare.app.job.record import Job, Record, Result
from prepare.app.sweep.leader import Leader, is_led, stamp
from prepare.app.sweep.summary import read_summary
from prepare.errors import ConfigError

ROWS, NAMES = [["seed=0"], ["seed=1"]], ["a", "b"]
pytestmark = pytest.mark.skipif(os.name != "posix", reason="asks for locks of POSIX")


def lead(folder, **how):
    return Leader(folder, rows=ROWS, identities=NAMES, command="", **{"resume": False} | how)


def begin(folder, leader, number, launcher="basic"):
    record = Record(folder / str(number))
    name, sweep = NAMES[number], leader.manifest.sweep
    record.begin(Job(number, sweep, ROWS[number], {}, identity=name, launcher=launcher))
    return record


def test_one_command_leads_a_folder_until_it_ends(tmp_path):
    first = lead(tmp_path)
    begun = stamp(tmp_path)
    with pytest.raises(ConfigError):
        lead(tmp_path, resume=True)
    assert begun == stamp(tmp_path) is not None
    first.end(stopped=False)
    assert stamp(tmp_path) is None
    again = lead(tmp_path, resume=True)
    assert again.manifest.sweep == first.manifest.sweep
    assert stamp(tmp_path) not in (None, begun)  # a worker of the first one stops
    again.end(stopped=False)


def test_a_killed_command_leads_no_longer(tmp_path):
    if not (pid := os.fork()):
        lead(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert (tmp_path / "sweep.json").is_file()
    assert not is_led(tmp_path)
    assert {row.status for row in read_summary(tmp_path).rows} == {"interrupted"}


@pytest.mark.parametrize(("stopped", "status"), [(False, "crashed"), (True, "interrupted")])
def test_a_run_without_a_result_gets_one(tmp_path, stopped, status):
    leader = lead(tmp_path)
    lost, done = begin(tmp_path, leader, 0), begin(tmp_path, leader, 1)
    done.write_result(Result("ok"))
    leader.end(stopped=stopped)
    assert (lost.result().status, done.result().status) == (status, "ok")
