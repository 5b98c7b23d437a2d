"""Small runs that may fail or be killed, and the checks of the files that they leave."""

import csv
import io
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from own_process import start_command
from paths import CONF
from prepare.core.utils import files
from prepare.recipe import load

ROOT = CONF.parent


WRITTEN = (
    "recipe.yaml", "plan.json", "audit.json", "audit.csv", "flow.json", "verify.json", "report.html",
    "environment.json", "job.json", "result.json",
)  # fmt: skip
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


def start(*words: str | Path, cwd: Path, **more: str) -> subprocess.Popen:
    """The command line in a process of its own, its output as bytes."""
    env = os.environ | {"OMP_NUM_THREADS": "1"} | more
    return start_command(*words, cwd=cwd, env=env, text=False)


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


# One process imports everything; each run is a copy of it, so that all can start at one instant.
DRIVER = """
    import contextlib, os, random, signal, sys, time
    from pathlib import Path
    import torch
    from prepare.app.cli import main as cli
    torch.set_num_threads(1)
    count, together, *words = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]

    def run(out, *more):
        with open(out, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            return cli.run([*words, *more])

    run("warm.txt", "hydra.run.dir=warm")
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
