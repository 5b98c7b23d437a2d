"""The engines of a sweep: each does every healthy job and names every sick one, and what is timed on it is marked."""

import importlib.util
import io
import os
import signal
import sys

import pytest
from hydra.core.plugins import Plugins

from prepare.cli import main as cli
from prepare.cli.launcher_checks import engine_problems
from prepare.job.record import Record
from prepare.report.terminal.sweep_progress import _time
from prepare.sweep.launchers import shares_cores
from sweeps import MIXED, NET, finish, healthy_and_sick, left_of, run, start, wait_for

pytestmark = pytest.mark.skipif(os.name != "posix", reason="asks for fork and signals of POSIX")
# Each with the extra that brings it; those that take long to start are for the slow tier.
ENGINES = [
    pytest.param("joblib", id="joblib"),
    pytest.param("submitit_local", id="submitit_local", marks=pytest.mark.slow),
    pytest.param("ray", id="ray", marks=pytest.mark.slow),
]
NEEDS = {
    "joblib": "hydra_joblib_launcher",
    "submitit_local": "hydra_submitit_launcher",
    "ray": "hydra_ray_launcher",
}
RAYS_OWN = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
NAMES = ",".join(f"sample_nets.{name}" for name in MIXED)


def needs(engine: str) -> None:
    if importlib.util.find_spec(f"hydra_plugins.{NEEDS[engine]}") is None:
        pytest.skip(f"hydra_plugins.{NEEDS[engine]} is not installed")


@pytest.mark.parametrize("engine", ENGINES)
def test_whatever_a_job_does_every_other_is_done_on_every_engine(tmp_path, engine):
    needs(engine)
    ran = run(f"model._target_={NAMES}", f"hydra/launcher={engine}", cwd=tmp_path)
    healthy_and_sick(ran)
    jobs = [Record(ran.file(number, "")).job() for number in range(len(MIXED))]
    assert {(job.launcher, job.shared) for job in jobs} == {(engine, True)}
    assert f"{len(MIXED)} of {len(MIXED)} done" in ran.err
    wait_for(lambda: not left_of(tmp_path), seconds=5)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_makes_the_same_audit_and_finds_plugins_and_modules_of_the_current_folder(
    tmp_path, engine
):
    needs(engine)
    (tmp_path / "own_steps.py").write_text(
        "from prepare.registry import register\nfrom prepare.step import TensorStep, Want\n"
        "@register('doubled')\nclass Doubled(TensorStep):\n"
        "    '''Makes everything float64.'''\n"
        "    def want(self, tensor):\n        return Want(dtype='float64')\n"
    )
    (tmp_path / "own_nets.py").write_text("from sample_nets import Net as net\n")
    words = ["model._target_=own_nets.net", "plugins=[own_steps]", "+steps.doubled={}", "seed=0,1"]
    audits = []
    for name in ("basic", engine):
        ran = run(*words, f"hydra/launcher={name}", cwd=tmp_path)
        assert ran.statuses == ["ok", "ok"], ran.err
        audits.append([ran.file(number, "audit.json").read_bytes() for number in (0, 1)])
    assert audits[0] == audits[1]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="SIGINT"),
        pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, id="SIGKILL"),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_no_process_of_any_engine_is_left_where_its_sweep_is_stopped(tmp_path, engine, number):
    needs(engine)
    process = start(NET + "waits", "seed=0,1,2", f"hydra/launcher={engine}", cwd=tmp_path)
    wait_for((tmp_path / "began").exists)
    process.send_signal(number)
    ended = finish(process, tmp_path / "swept")
    # Ray's own agents, which outlive a cluster that was not shut down for a minute, are not ours to end.
    wait_for(
        lambda: not [one for one in left_of(tmp_path) if one.name() not in RAYS_OWN], seconds=5
    )
    # Ray takes SIGTERM for itself, and dumps core.
    if number != signal.SIGKILL and (engine, number) != ("ray", signal.SIGTERM):
        assert ended.code == 130, ended.err
        assert set(ended.statuses) == {"interrupted"}
    (tmp_path / "go").touch()
    again = run(NET + "waits", "seed=0,1,2", "resume=true", cwd=tmp_path)
    assert (again.code, again.statuses) == (0, ["ok"] * 3), again.err


@pytest.mark.parametrize("engine", ["joblib", "submitit_local", "submitit_slurm", "ray"])
def test_an_engine_whose_package_is_missing_is_an_error_of_one_line(
    tmp_path, monkeypatch, capsys, engine
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prepare.cli.launcher_checks._is_there", lambda module: False)
    code = cli.run(["--multirun", "model=unet3d", "seed=0,1", f"hydra/launcher={engine}"])
    extra = engine.partition("_")[0]
    said = (
        f"hydra/launcher: {engine} needs {extra}, which is not here; "
        f"install the extra: pip install 'torch-prepare[{extra}]'\n"
    )
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert said in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hydra.sweeper.max_batch_size=0"],
         "hydra.sweeper.max_batch_size: 0 is no size of a batch; give a whole number from 1, or null for all at once"),
        (["hydra.sweeper._target_=nope"],
         "hydra.sweeper._target_: 'nope' is no class that can be imported; choose one that is installed with hydra/sweeper=NAME"),
        (["hydra.launcher._target_=no.such.Engine"],
         "hydra.launcher._target_: 'no.such.Engine' is no class that can be imported; choose one that is installed with hydra/launcher=NAME"),
        (["hydra/launcher=[basic]"], "hydra/launcher: takes one option, and not a list; write hydra/launcher=NAME"),
        (["hydra/launcher=[basic,joblib]"], "hydra/launcher: takes one option, and not a list; write hydra/launcher=NAME"),
        (["hydra/launcher=jobli"],
         "hydra/launcher: there is no option 'jobli'; did you mean 'joblib'?"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_what_hydra_itself_would_fall_over_is_an_error_of_one_line(
    tmp_path, monkeypatch, capsys, words, said
):
    monkeypatch.chdir(tmp_path)
    code = cli.run(["--multirun", "model=unet3d", "seed=0,1", *words])
    out, err = capsys.readouterr()
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(said)
    assert list(tmp_path.iterdir()) == []


def basic_launcher() -> type:
    # Hydra imports its plugins in its own way, the first time that it looks for them.
    Plugins.instance()
    return sys.modules["hydra._internal.core_plugins.basic_launcher"].BasicLauncher


def test_an_engine_that_stops_is_told_and_what_was_done_is_kept(tmp_path, monkeypatch, capsys):
    launch = basic_launcher().launch

    def stops(self, overrides, initial_job_idx):
        launch(self, overrides[:1], initial_job_idx)
        raise RuntimeError("no more workers")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(basic_launcher(), "launch", stops)
    code = cli.run(
        [
            "--multirun",
            NET + "Net",
            "seed=0,1",
            "hydra.sweep.dir=swept",
            "bench=none",
            "verify=none",
        ]
    )
    out, err = capsys.readouterr()
    assert code == 1, out + err
    assert "1 of 2 rows ok" in out
    assert "#1: it never started" in out
    assert err.splitlines()[-1].startswith(
        "hydra/launcher: the engine stopped: RuntimeError: no more workers; "
    )
    assert "no more workers" in (tmp_path / "swept" / "error.txt").read_text()


def test_an_interrupt_that_a_library_makes_an_error_of_is_still_one(tmp_path, monkeypatch, capsys):
    def closes_too_early(self, overrides, initial_job_idx):
        try:
            raise KeyboardInterrupt
        finally:
            raise ValueError("no such file to close")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(basic_launcher(), "launch", closes_too_early)
    code = cli.run(["--multirun", NET + "Net", "seed=0,1", "hydra.sweep.dir=swept"])
    assert code == 130
    assert "Traceback" not in capsys.readouterr().err


def test_jobs_beside_each_other_on_one_machine_are_said_to_share_it():
    assert not shares_cores("basic", {})
    assert not shares_cores("submitit_slurm", {})
    assert not shares_cores("joblib", {"n_jobs": 1})
    assert shares_cores("joblib", {"n_jobs": -1})
    assert all(
        shares_cores(name, {}) for name in ("submitit_local", "ray", "of_somebody_else", None)
    )


def test_the_engines_are_checked_before_a_sweep_only():
    basic = {"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"}
    chosen = {"hydra/launcher": "basic", "hydra/sweeper": "basic"}
    assert not [*engine_problems(chosen, launching=basic, sweeping={**basic, "max_batch_size": 3})]
    assert len([*engine_problems({}, launching={}, sweeping={"max_batch_size": True})]) == 5


def test_the_time_that_is_left_is_said_as_a_person_would():
    assert [_time(seconds) for seconds in (0.4, 89, 91, 3600, 36000)] == [
        "0 s",
        "89 s",
        "2 min",
        "60 min",
        "10.0 h",
    ]


def test_a_terminal_shows_how_far_a_sweep_is(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stderr", Terminal())
    names = "sample_nets.Net,sample_nets.raises"
    words = ["hydra.sweep.dir=swept", "bench=none", "verify=none", "flow=none"]
    assert cli.run(["--multirun", f"model._target_={names}", *words]) == 1
    said = sys.stderr.getvalue()
    assert "2 of 2 done, 1 failed" in said
    assert ": failed, " in said
