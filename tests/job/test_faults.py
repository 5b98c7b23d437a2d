"""Faults that a run may meet: a full disk, folders that cannot be, many runs at once, odd names, a kill."""

import csv
import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import warm_process
from paths import CONF
from prepare.audit import Audit, audit
from prepare.cli import main as cli
from prepare.core.utils import files
from prepare.errors import FileError
from prepare.job import record
from prepare.pipeline import Pipeline
from prepare.recipe import load
from small_nets import same, small_2d

ROOT = CONF.parent
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
WRITTEN = (
    "recipe.yaml",
    "plan.json",
    "audit.json",
    "audit.csv",
    "flow.json",
    "flow.svg",
    "verify.json",
    "report.html",
    "environment.json",
    "job.json",
    "result.json",
)
posix = pytest.mark.skipif(os.name != "posix", reason="asks for fork and signals of POSIX")

NETS = """
    import time
    from pathlib import Path
    from torch import nn

    NAMES = [
        "a/b", "/etc/passwd", "new\\nline", "\\r", "\\0", "\\x1b[31m", "<script>alert(1)</script>", "=1+1", "+1", "@x",
        "[red]x[/red]", "[/]", "\\ud800", "\\udc80", "x" * 5000, "\\u00e9\\u65e5\\U0001f916", "a,b", 'a"b', "a'b", "%s",
        "{x}", "${x}", "\\\\", "type:Conv2d", "re:a", "*", " ", "-", "~", "#", "null", "1", "\\u2028", "\\u202e",
    ]

    def small(width=8):
        return nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.Conv2d(width, 4, 1))

    def odd():
        model = nn.Sequential()
        for name in NAMES:
            model.add_module(name, nn.Conv2d(3, 3, 1))
        return model

    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError("odd \\ud800 [red] \\n\\x1b[31m second")

    def broken():
        model = odd()
        model.add_module("[bold]\\n\\udc80", Broken())
        return model

    class Waits(nn.Conv2d):
        def forward(self, x):
            if not Path("here").exists():
                Path("here").touch()
                time.sleep(60)
            return super().forward(x)

    def waits():
        return nn.Sequential(Waits(3, 3, 1))

    def waits_while_it_is_built():
        return waits()(None)

    def many(count=20_000):
        rows = [nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.ReLU()) for _ in range(count // 4)]
        return nn.Sequential(*rows)

    def fewer():
        return many(4_000)

    def huge():
        import torch
        with torch.device("meta"):
            return nn.Sequential(*(nn.Conv2d(5000, 5000, 3) for _ in range(112)))
"""
CHOSEN = ["memfmt=channels_last", "device=cpu", "bench=none"]
SMALL = ["model._target_=nets.small", "input.shape=[1,3,8,8]", *CHOSEN]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, which holds the module `nets`."""
    (tmp_path / "nets.py").write_text(textwrap.dedent(NETS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    yield tmp_path
    sys.modules.pop("nets", None)


def start(*words: str | Path, cwd: Path, cold: bool = False, **more: str) -> subprocess.Popen:
    """The command line in a process of its own, its output as bytes."""
    env = os.environ | {"OMP_NUM_THREADS": "1"} | more
    return warm_process.start(*words, cwd=cwd, env=env, text=False, cold=cold)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out.decode("utf-8", "strict"), err.decode("utf-8", "strict")


def told(err: str) -> list[str]:
    """The lines on stderr, without those that report progress."""
    return [line for line in err.splitlines() if not line.endswith(" ...")]


def whole(path: Path) -> bool:
    """Return whether a file can be read as what its name says; asserts it, so that a failure shows the reason."""
    text = path.read_bytes()
    assert text.endswith(b"\n"), path
    if path.suffix == ".json":
        assert json.loads(text), path
    elif path.name == "recipe.yaml":
        assert load(path), path
    elif path.suffix == ".csv":
        rows = list(csv.reader(io.StringIO(text.decode(), newline="")))
        assert len({len(row) for row in rows}) == 1, path
    return True


def all_whole(folder: Path, *, killed: bool = False) -> list[str]:
    """The names of all files in a tree, each of them whole, and no temporary unless it was killed.

    Without those that Hydra writes, which are not whole after a kill.
    """
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    found = [path for path in found if path.parent.name != ".hydra" and path.name != "prepare.log"]
    temporary = [path for path in found if path.name.endswith(files.TEMPORARY)]
    assert killed or not temporary
    return [path.name for path in found if path not in temporary and whole(path)]


def status(folder: Path) -> str:
    return json.loads((folder / "result.json").read_text())["status"]


# ------------------------------------------------------------------------------- writing number N fails


class Failing:
    """Makes one call of the system's file calls fail, or that and every later one."""

    def __init__(
        self, patch: pytest.MonkeyPatch, n: int, *, calls: tuple, error: BaseException, after: bool
    ):
        self.left, self.error, self.after, self.failed = n, error, after, 0
        # What `files` sees, and nothing else: Hydra and pytest write too.
        system = type("System", (), {"__getattr__": lambda _, name: getattr(os, name)})()
        for name in calls:
            setattr(system, name, self.wrapped(getattr(os, name)))
        patch.setattr(files, "os", system)

    def wrapped(self, real):
        def call(*arguments, **options):
            self.left -= 1
            if self.left == 0 or (self.after and self.left < 0):
                self.failed += 1
                if real is os.close:
                    real(*arguments)
                raise self.error
            return real(*arguments, **options)

        return call


def run_that_fails(n: int, folder: Path, capsys, **how) -> tuple[int, Failing, list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        fault = Failing(patch, n, **how)
        code = cli.run([*SMALL, f"hydra.run.dir={folder}"])
    return code, fault, told(capsys.readouterr().err)


@pytest.mark.parametrize(
    "after",
    [pytest.param(False, marks=pytest.mark.slow, id="only that one"),
     pytest.param(True, id="all from then on")],
)  # fmt: skip
def test_a_disk_that_is_full_at_write_number_n_is_one_line_and_exit_1(folder, capsys, after):
    found = []
    for n in range(1, 50):
        where = folder / f"run{n}"
        code, fault, err = run_that_fails(
            n, where, capsys, calls=("write",), error=FULL, after=after
        )
        names = all_whole(where)
        if not fault.failed:
            break
        assert (code, len(err)) == (1, 1)
        assert err[0].endswith(
            "cannot be written: No space left on device; free some space or choose another folder"
        )
        found.append(err[0].split(":")[0].split("/")[-1])
        # What was written before stays: one file more with every turn.
        assert len(names) == (n - 1 if after else min(n, len(WRITTEN)))
        if "result.json" in names:
            assert status(where) == "failed"
            assert json.loads((where / "result.json").read_text())["reason"] == "file"
    assert code == 0
    assert set(names) == set(WRITTEN) < set(record.FILES)
    # Everything that a run writes has failed once.
    assert set(found) == set(WRITTEN)


def test_a_full_disk_at_the_end_still_prints_the_results(folder, capsys):
    last = len(WRITTEN)
    for n in (1, last - 2, last):
        with pytest.MonkeyPatch.context() as patch:
            Failing(patch, n, calls=("write",), error=FULL, after=True)
            code = cli.run([*SMALL, f"hydra.run.dir=run{n}"])
        out, err = capsys.readouterr()
        assert code == 1
        assert "Sequential is prepared: device cpu" in out
        assert "verified" in out
        assert len(told(err)) == 1
        assert "No space left on device" in err


def test_results_are_printed_if_weights_cannot_be_saved(folder, capsys):
    with pytest.MonkeyPatch.context() as patch:
        Failing(patch, 1, calls=("write",), error=FULL, after=True)
        assert cli.run([*SMALL, "hydra.run.dir=run", "save=weights.pt"]) == 1
    out, err = capsys.readouterr()
    assert "Sequential is prepared" in out
    assert "weights.pt: cannot be written: No space left" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [FULL, OSError(errno.EROFS, "Read-only file system"), OSError("odd")], ids=repr
)
@pytest.mark.parametrize("after", [False, True], ids=["only that one", "all from then on"])
def test_a_failure_of_any_call_of_the_system_is_one_line_and_exit_1(folder, capsys, error, after):
    points = 0
    for n in range(1, 200):
        where = folder / f"run{n}"
        calls = ("open", "write", "fsync", "close", "replace")
        code, fault, err = run_that_fails(n, where, capsys, calls=calls, error=error, after=after)
        names = all_whole(where)
        if not fault.failed:
            break
        points += 1
        # To sync a folder may fail: the file is in place.
        if code != 0:
            assert (code, len(err)) == (1, 1)
            assert "cannot be written" in err[0]
        else:
            assert set(names) == set(WRITTEN)
    assert code == 0
    assert points >= 5 * len(WRITTEN)


def test_an_interrupt_at_write_n_exits_130_and_leaves_whole_files(folder, capsys):
    for n in range(1, 50):
        where = folder / f"run{n}"
        how = {"calls": ("write",), "error": KeyboardInterrupt(), "after": False}
        code, fault, err = run_that_fails(n, where, capsys, **how)
        names = all_whole(where)
        if not fault.failed:
            break
        assert (code, len(err)) == (130, 1)
        assert err[0] in ("stopped by Ctrl-C", "interrupted")
        if n < len(WRITTEN):
            assert status(where) == "interrupted"
    assert n == len(WRITTEN) + 1
    assert set(names) == set(WRITTEN)


def test_a_model_stays_usable_if_its_files_cannot_be_saved(tmp_path):
    model, reference = small_2d().eval(), small_2d().eval()
    reference.load_state_dict(model.state_dict())
    pipeline = Pipeline.from_config({"half": {"dtype": "bfloat16"}, "conv2d_memory_format": {}})
    plan = pipeline.plan(model)
    pipeline.apply(model)
    pipeline.apply(reference)
    (tmp_path / "file").touch()
    for act in (pipeline.save, audit(model, plan=plan).save):
        for path in (tmp_path / "file" / "x", tmp_path / "absent" / "x", tmp_path):
            with pytest.raises(FileError):
                act(path)
        for n in (1, 2, 3, 4, 5):
            with pytest.MonkeyPatch.context() as patch:
                Failing(
                    patch,
                    n,
                    calls=("open", "write", "fsync", "close", "replace"),
                    error=FULL,
                    after=True,
                )
                with pytest.raises(FileError, match="No space left on device"):
                    act(tmp_path / "saved")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    same(model, reference)
    assert not pipeline.plan(model)
    assert torch.isfinite(model(torch.randn(1, 3, 8, 8, dtype=torch.bfloat16))).all()
    pipeline.save(tmp_path / "recipe.yaml")
    assert not Pipeline.load(tmp_path / "recipe.yaml").plan(model)


# ------------------------------------------------------------------------------- folders that cannot be

IMPOSSIBLE = ["file/x", "file", "/proc/x", "n" * 300]


@pytest.mark.parametrize("where", IMPOSSIBLE, ids=lambda where: where[:10])
def test_a_folder_that_cannot_be_made_is_one_line_and_exit_1(folder, capsys, where):
    (folder / "file").write_text("mine")
    code = cli.run([*SMALL, f"hydra.run.dir={where}"])
    err = told(capsys.readouterr().err)
    assert (code, len(err)) == (1, 1)
    assert err[0].startswith(f"{where}: cannot be used: ")
    assert err[0].endswith("hydra.run.dir=FOLDER") or "; " in err[0]
    assert (folder / "file").read_text() == "mine"


@pytest.mark.parametrize("where", IMPOSSIBLE, ids=lambda where: where[:10])
def test_a_sweeps_folder_that_cannot_be_made_is_one_line_and_exit_1(folder, capsys, where):
    (folder / "file").write_text("mine")
    code = cli.run(["--multirun", *SMALL, "seed=1,2", f"hydra.sweep.dir={where}"])
    out, err = capsys.readouterr()
    assert (code, len(told(err)), out) == (1, 1, "")
    assert f"{where}: cannot be used: " in err
    assert (folder / "file").read_text() == "mine"


def test_a_rows_folder_that_cannot_be_made_is_one_line_and_exit_1(folder, capsys):
    code = cli.run(
        [
            "--multirun",
            *SMALL,
            "seed=1,2",
            "hydra.sweep.dir=sweep",
            f"hydra.sweep.subdir=${{hydra.job.num}}{'n' * 300}",
        ]
    )
    out, err = capsys.readouterr()
    assert code == 1
    assert "Traceback" not in out + err
    assert [line for line in told(err) if "cannot be used: File name too long" in line]


# ------------------------------------------------------------------------------- many at once

# One process imports everything; each run is a copy of it, so that all can start at one instant.
DRIVER = """
    import contextlib, os, random, signal, sys, time
    from pathlib import Path
    import torch
    from prepare.cli import main as cli
    torch.set_num_threads(1)
    count, together, *words = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]

    def run(out, *more):
        with open(out, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            return cli.run([*words, *more])

    run("warm.txt", "hydra.run.dir=warm")
"""
TOGETHER = """
    for turn in range(count):
        instant, children = time.time() + 0.05, []
        for index in range(together):
            child = os.fork()
            if not child:
                while time.time() < instant:
                    pass
                width = 8 + turn * together + index
                sweep = ["--multirun", "seed=1,2"] if index % 4 == 3 else []
                os._exit(run(f"out-{width}.txt", *sweep, f"+model.width={width}"))
            children.append(child)
        print(*(os.waitpid(child, 0)[1] for child in children), flush=True)
"""
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


def drive(code: str, count: int, folder: Path, *, together: int = 1) -> list[int]:
    """Runs the driver with that code; gives the status of every copy of it."""
    program = textwrap.dedent(DRIVER) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program, str(count), str(together), *SMALL], capture_output=True, text=True, cwd=folder, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return list(map(int, done.stdout.split()))


def widths(folder: Path) -> list[int]:
    """The width each run's folder speaks of: the same in every file of it."""
    found = []
    for result in folder.glob("**/result.json"):
        where = result.parent
        assert set(all_whole(where)) == set(WRITTEN)
        assert status(where) == "ok"
        (asked,) = [
            word
            for word in json.loads((where / "job.json").read_text())["overrides"]
            if "width" in word
        ]
        width = int(asked.split("=")[1])
        rows = {row.path: row for row in Audit.load(where / "audit.json").rows}
        assert rows["0.weight"].shape == (width, 3, 3, 3)
        plan = json.loads((where / "plan.json").read_text())
        assert f"[{width}, 3, 3, 3]" in json.dumps(plan)
        found.append(width)
    return found


def check_together(folder: Path, runs: int, rounds: int) -> None:
    assert drive(TOGETHER, rounds, folder, together=runs) == [0] * runs * rounds
    every = range(8, 8 + runs * rounds)
    sweeps = [width for width in every if width % 4 == 3]
    assert sorted(widths(folder / "outputs")) == [width for width in every if width not in sweeps]
    assert sorted(widths(folder / "multirun")) == sorted(sweeps * 2)
    summaries = [json.loads(path.read_text()) for path in folder.glob("multirun/*/*/summary.json")]
    assert len(summaries) == len(sweeps)
    assert all([row["status"] for row in summary["rows"]] == ["ok", "ok"] for summary in summaries)
    # It was a test only if some of them did start in the same second.
    seconds = [path.name[:8] for path in folder.glob("outputs/*/*")]
    assert len(set(seconds)) < len(seconds)


@posix
def test_runs_and_sweeps_of_the_same_second_have_folders_of_their_own(folder):
    check_together(folder, runs=4, rounds=1)


@posix
@pytest.mark.slow
def test_eight_runs_at_once_twenty_times_have_folders_of_their_own(folder):
    check_together(folder, runs=8, rounds=20)


# ------------------------------------------------------------------------------- names that hold anything

ODD = ["model._target_=nets.odd", "input.shape=[1,3,4,4]", *CHOSEN]
LEAVES_OUT = (
    'steps.conv2d_memory_format.exclude=["re:.red.*", "re:=1.1", "re:new\\nline", "re:.{5000}"]'
)


def odd_names() -> list[str]:
    found: dict = {}
    exec(textwrap.dedent(NETS), found)
    return found["NAMES"]


def check_odd_record(where: Path) -> None:
    names = sorted(odd_names())
    assert set(all_whole(where)) == set(WRITTEN)
    found = Audit.load(where / "audit.json")
    assert [row.module for row in found.rows if row.tensor == "weight"] == names
    # Half a pair of surrogates cannot stand in UTF-8, which is all that readers of CSV take.
    shown = [name.encode("utf-8", "backslashreplace").decode() for name in names]
    table = csv.DictReader(io.StringIO((where / "audit.csv").read_bytes().decode(), newline=""))
    assert [row["module"] for row in table if row["tensor"] == "weight"] == shown
    plan = json.loads((where / "plan.json").read_text())
    assert {row["module"] for row in plan["tensors"]} == set(names)
    again = where / "again.json"
    found.save(again)
    assert again.read_bytes() == (where / "audit.json").read_bytes()
    again.unlink()


def test_names_that_hold_anything_go_through_the_whole_command_line(folder, capsys):
    assert cli.run([*ODD, LEAVES_OUT, "hydra.run.dir=run"]) == 0
    out, err = capsys.readouterr()
    assert told(err) == []
    assert "[red]x[/red].weight" in out
    assert all(line.isprintable() for line in out.splitlines())
    check_odd_record(folder / "run")
    skipped = {
        row.module
        for row in Audit.load(folder / "run" / "audit.json").rows
        if row.status == "skipped"
    }
    assert skipped == {"[red]x[/red]", "=1+1", "new\nline", "x" * 5000}
    steps = load(folder / "run" / "recipe.yaml")
    assert Pipeline.from_config(steps).to_config() == steps


def test_a_plan_and_a_difference_show_names_that_hold_anything(folder, capsys):
    assert cli.run([*ODD, "task=plan", "hydra.run.dir=plan"]) == 0
    assert cli.run([*ODD, "hydra.run.dir=a"]) == 0
    assert cli.run([*ODD, "precision=bfloat16", "memfmt=contiguous", "hydra.run.dir=b"]) == 0
    assert cli.run(["diff", "--all", "a", "b"]) == 0
    out, err = capsys.readouterr()
    assert all(line.isprintable() for line in out.splitlines())
    assert "\\ud800.weight: stride" in out
    assert "=1+1.weight: stride" in out
    assert told(err) == []


def test_an_error_in_a_module_with_an_odd_name_is_one_line(folder, capsys):
    assert cli.run([*ODD, "model._target_=nets.broken", "hydra.run.dir=run"][1:]) == 1
    (line,) = [row for row in told(capsys.readouterr().err) if "traceback" not in row]
    assert line.isprintable()
    assert "[bold]\\n\\udc80" in line
    assert status(folder / "run") == "failed"
    assert json.loads((folder / "run" / "result.json").read_text())["reason"] == "model"


def test_a_sweep_row_that_fails_in_an_oddly_named_module_is_shown(folder, capsys):
    words = [*ODD[1:], "model._target_=nets.odd,nets.broken", "hydra.sweep.dir=sweep"]
    assert cli.run(["--multirun", *words]) == 1
    out, err = capsys.readouterr()
    assert all(line.isprintable() for line in (out + err).splitlines())
    for name in ("summary.json", "summary.csv", "summary.md"):
        assert "nets.broken" in (folder / "sweep" / name).read_text()
    rows = json.loads((folder / "sweep" / "summary.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["ok", "failed"]


def test_no_utf_8_terminal_and_no_writable_home_are_needed(folder):
    plain = {
        "LANG": "C",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "TERM": "dumb",
    }
    unwritable = "/proc" if Path("/proc/self").exists() else str(folder / "nets.py")
    narrow = {"COLUMNS": "40", "HOME": unwritable, "XDG_CACHE_HOME": f"{unwritable}/cache"}
    run = start(*ODD, LEAVES_OUT, "hydra.run.dir=run", cwd=folder, cold=True, **plain, **narrow)
    code, out, err = finish(run)
    assert (code, told(err)) == (0, [])
    assert out.isascii()
    assert max(map(len, out.splitlines()[1:])) <= 40
    check_odd_record(folder / "run")


@posix
def test_a_terminal_of_forty_columns_is_not_overrun(folder):
    import pty
    import termios

    outer, inner = pty.openpty()
    termios.tcsetwinsize(inner, (24, 40))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    program = [sys.executable, str(ROOT / "run.py"), *SMALL, "hydra.run.dir=run"]
    run = subprocess.Popen(program, stdout=inner, stderr=subprocess.DEVNULL, cwd=folder, env=env)
    os.close(inner)
    assert run.wait(timeout=300) == 0
    out = b""
    try:
        while part := os.read(outer, 1 << 16):
            out += part
    except OSError:  # what Linux says when the other end has gone
        pass
    os.close(outer)
    lines = out.decode().splitlines()
    assert "converted" in out.decode()
    assert max(map(len, lines[1:])) <= 40


# ------------------------------------------------------------------------------- the same bytes


def test_a_recipe_gives_the_same_bytes_in_every_process(folder):
    words = [*SMALL, "precision=bfloat16", "steps.half.keep=[norms,'type:BatchNorm2d']"]
    words.append("verify=none")
    alone = start(
        *words,
        "hydra.run.dir=alone",
        cwd=folder,
        cold=True,
        PYTHONHASHSEED="2",
        OMP_NUM_THREADS="2",
    )
    assert cli.run(["--multirun", *words, "seed=3,0", "hydra.sweep.dir=sweep"]) == 0
    assert finish(alone)[0] == 0
    (row,) = (folder / "sweep").glob("1-*")
    for name in ("audit.json", "audit.csv", "plan.json", "recipe.yaml"):
        assert (row / name).read_bytes() == (folder / "alone" / name).read_bytes(), name


# ------------------------------------------------------------------------------- many modules, and huge ones

MEASURED = """
    import json, os, resource, sys
    import torch
    from prepare.audit import audit
    from prepare.pipeline import Pipeline
    import nets
    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    nets.small()
    model = getattr(nets, sys.argv[1])()
    before = peak()
    plan = Pipeline.from_config({"conv2d_memory_format": {}, "half": {"dtype": "bfloat16"}}).plan(model)
    planned = peak()
    found = audit(model, plan=plan)
    found.save("audit.json")
    print(json.dumps({
        "modules": sum(1 for _ in model.modules()), "bytes": found.summary["bytes_before"],
        "devices": found.summary["devices"], "planned": len(plan.tensors), "rows": len(found.rows),
        "plan": planned - before, "audit": peak() - planned, "file": os.path.getsize("audit.json"),
    }))
"""


def measured(folder: Path, build: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURED), build], capture_output=True, text=True, cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@posix
@pytest.mark.parametrize(
    ("build", "modules"), [("fewer", 4_000), pytest.param("many", 20_000, marks=pytest.mark.slow)]
)
def test_thousands_of_modules_are_audited_in_little_memory(folder, build, modules):
    found = measured(folder, build)
    assert found["modules"] > modules
    assert found["rows"] == found["planned"] == modules * 7 // 4
    assert found["file"] < modules * 1_000
    assert max(found["plan"], found["audit"]) < modules * 7_500


@posix
@pytest.mark.slow  # the command line does the same below
def test_100_gb_on_meta_are_planned_without_materialising(folder):
    found = measured(folder, "huge")
    assert found["bytes"] > 100e9
    assert found["devices"] == {"meta": 224}
    assert max(found["plan"], found["audit"]) < 100_000_000


def test_the_command_line_plans_100_gb_on_meta(folder, capsys):
    words = ["model._target_=nets.huge", *CHOSEN]
    assert cli.run([*words, "task=plan", "hydra.run.dir=plan"]) == 0
    assert set(all_whole(folder / "plan")) == {
        "plan.json",
        "report.html",
        "environment.json",
        "job.json",
        "result.json",
    }
    capsys.readouterr()
    assert cli.run([*words, "hydra.run.dir=run"]) == 2
    (line,) = told(capsys.readouterr().err)
    assert "meta holds no data; load it with prepare.checkpoint.load(path, model)" in line
    assert cli.run([*words, "~device", "hydra.run.dir=meta"]) == 0
    assert Audit.load(folder / "meta" / "audit.json").summary["convolutions"]["converted"] == 112


# ------------------------------------------------------------------------------- interrupted and killed


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


def check_signal_at_random_moments(folder: Path, sent: signal.Signals, moments: int) -> list[int]:
    """Sends a signal at random moments of whole runs, from their very start; gives the exit codes."""
    rng, codes = random.Random(7), []
    for number in range(moments):
        run = start(*SMALL, f"hydra.run.dir=run{number}", cwd=folder)
        time.sleep(rng.uniform(0.2, 4))
        run.send_signal(sent)
        codes.append(finish(run)[0])
        all_whole(folder / f"run{number}")
    return codes


@posix
@pytest.mark.slow
def test_ctrl_c_at_any_moment_leaves_whole_files(folder):
    codes = check_signal_at_random_moments(folder, signal.SIGINT, 50)
    # Python itself answers while it starts, before any of our code runs.
    assert set(codes) <= {0, 130, -signal.SIGINT}
    assert codes.count(130) > 10


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
