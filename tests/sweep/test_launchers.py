"""Tests of the launchers: each runs all jobs, names those that fail, and marks shared timings."""

import importlib.util
import os
import signal

import pytest

from prepare.app.job.record import Record
from prepare.app.sweep.worker import shares_cores
from sweeps import (
    DOUBLED,
    MIXED,
    NET,
    assert_only_failing_jobs_fail,
    finish,
    processes_in,
    run,
    start,
    wait_for,
)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="asks for fork and signals of POSIX")
# Each with the extra that brings it; those that take long to start are for the slow tier.
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("submitit_local", "ray")]
LAUNCHERS = ["joblib", *SLOW]
NEEDS = {
    "joblib": "hydra_joblib_launcher",
    "submitit_local": "hydra_submitit_launcher",
    "ray": "hydra_ray_launcher",
}
RAYS_OWN = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
FEW = ("Net", "raises", "is_killed", *MIXED[-2:])


def needs(launcher: str) -> None:
    plugin = f"hydra_plugins.{NEEDS[launcher]}"
    # Without any plugin there is no `hydra_plugins` to look into.
    found = importlib.util.find_spec("hydra_plugins") and importlib.util.find_spec(plugin)
    if found is None:
        pytest.skip(f"{plugin} is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("names", [FEW, MIXED])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_failing_job_leaves_the_others_alone_on_every_launcher(tmp_path, launcher, names):
    needs(launcher)
    targets = ",".join(f"sample_nets.{name}" for name in names)
    words = (f"model._target_={targets}", f"hydra/launcher={launcher}")
    ran = run(*words, cwd=tmp_path)
    assert_only_failing_jobs_fail(ran, names)
    jobs = [Record(ran.file(number, "")).job() for number in range(len(names))]
    assert {(job.launcher, job.shared) for job in jobs} == {(launcher, True)}
    wait_for(lambda: not processes_in(tmp_path), seconds=5)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_writes_the_same_audit_and_finds_plugins(tmp_path, launcher):
    needs(launcher)
    (tmp_path / "own_steps.py").write_text(DOUBLED)
    (tmp_path / "own_nets.py").write_text("from sample_nets import Net as net\n")
    words = ["model._target_=own_nets.net", "plugins=[own_steps]", "+steps.doubled={}", "seed=0,1"]
    audits = []
    for name in ("basic", launcher):
        ran = run(*words, f"hydra/launcher={name}", cwd=tmp_path)
        assert ran.statuses == ["ok", "ok"], ran.err
        audits.append([ran.file(number, "audit.json").read_bytes() for number in (0, 1)])
    assert audits[0] == audits[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="SIGINT", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, id="SIGKILL"),
    ],
)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_stopping_a_sweep_leaves_no_process_of_any_launcher(tmp_path, launcher, number):
    needs(launcher)
    process = start(NET + "waits", "seed=0,1,2", f"hydra/launcher={launcher}", cwd=tmp_path)
    wait_for((tmp_path / "began").exists)
    process.send_signal(number)
    ended = finish(process, tmp_path / "swept")
    # Ray's own agents, which outlive a cluster that was not shut down for a minute, are not ours to end.
    wait_for(
        lambda: not [one for one in processes_in(tmp_path) if one.name() not in RAYS_OWN], seconds=5
    )
    # Ray takes SIGTERM for itself, and dumps core.
    if number != signal.SIGKILL and (launcher, number) != ("ray", signal.SIGTERM):
        assert ended.code == 130, ended.err
        assert set(ended.statuses) == {"interrupted"}
    (tmp_path / "go").touch()
    again = run(NET + "waits", "seed=0,1,2", "resume=true", cwd=tmp_path)
    assert (again.code, again.statuses) == (0, ["ok"] * 3), again.err


def test_concurrent_jobs_on_one_machine_share_its_cores():
    assert not shares_cores("basic", {})
    assert not shares_cores("submitit_slurm", {})
    assert not shares_cores("joblib", {"n_jobs": 1})
    assert shares_cores("joblib", {"n_jobs": -1})
    assert all(
        shares_cores(name, {}) for name in ("submitit_local", "ray", "of_somebody_else", None)
    )
