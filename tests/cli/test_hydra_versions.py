"""The next Hydra gives the same answers, the same files and no warning; it is installed for these tests only."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paths import CONF, PYTHONPATH, TESTS

NEXT = "1.4.0rc3"
ROOT = CONF.parent
NETS = "model._target_=sample_nets."
NET = (NETS + "Net", "input.shape=[2,3,16,16]", "device=cpu", "bench=none")
COMMANDS = {
    "main job": (*NET, "memfmt=channels_last", "precision=bfloat16"),
    "plan": (*NET, "task=plan", "memfmt=channels_last"),
    "plugin": (*NET, "plugins=[json]", "+steps.input_format={}"),
    "sweep": ("--multirun", *NET, "memfmt=contiguous,channels_last,channels_last_3d"),
    "flags last": (*NET, "--cfg", "job"),
    "help": ("--help",),
    "misspelt option": ("model=unet3d", "memfmt=chanels_last"),
    "two mistakes": ("model=unet3d", "precision=hlf", "+typo=1"),
    "unreadable value": ("model=unet3d", "seed=[1,"),
    "interpolation": ("model=unet3d", "seed=${nothing}"),
    "model that raises": (f"{NETS}raises",),
}


@pytest.fixture(scope="module")
def following(tmp_path_factory) -> Path:
    """A folder with the next Hydra and its OmegaConf, to be put first on the path."""
    folder = tmp_path_factory.mktemp("hydra")
    pip = [sys.executable, "-m", "pip", "install", "--target", folder, f"hydra-core=={NEXT}"]
    # The one process of all tests that may use the network.
    online = {name: value for name, value in os.environ.items() if name != "PREPARE_TESTS_REFUSED"}
    done = subprocess.run(pip, capture_output=True, text=True, check=False, env=online)
    if done.returncode:
        pytest.skip(f"hydra-core {NEXT} cannot be installed here: {done.stderr.strip()[-300:]}")
    return folder


def environment(*first: Path) -> dict[str, str]:
    more = {
        "PYTHONPATH": os.pathsep.join(map(str, [*first, PYTHONPATH])),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "300",  # names of folders differ in length, and must not fold a line
    }
    return os.environ | more


def run(*words: str, cwd: Path, first: tuple[Path, ...] = ()) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *words], capture_output=True, text=True, cwd=cwd, check=False,
        env=environment(*first),
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def plain(text: str) -> list[str]:
    """The output without what differs from run to run: folders, times and progress."""
    text = re.sub(
        r"(outputs|multirun)/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-\w+-\d+-\w+", r"\1/FOLDER", text
    )
    text = re.sub(r"\d+\.\d+( s\b)?", "SECONDS", text)
    text = re.sub(r", (\d+ running|about [^,)]+ left)", "", text)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if not line.endswith(" ...")]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_and_writes_the_same(following, tmp_path, name):
    found = {}
    for first in ((), (following,)):
        folder = tmp_path / f"{len(first)}"
        folder.mkdir()
        code, out, err = run(*COMMANDS[name], cwd=folder, first=first)
        assert "Warning" not in err
        assert "Traceback" not in err
        files = {
            "/".join(path.relative_to(folder).parts[3:]): path.read_bytes()
            for path in folder.rglob("*")
            if path.name in ("audit.json", "audit.csv", "plan.json", "recipe.yaml")
        }
        kinds = sorted(path.name for path in folder.rglob("*") if path.is_file())
        found[len(first)] = (code, plain(out), plain(err), files, kinds)
    assert found[1] == found[0]
    assert found[1][0] in (0, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [
        "cli/test_one_job.py",
        "cli/test_mistakes.py",
        "cli/test_failed_runs.py",
        "cli/test_bare_words.py",
        "sweep/test_sweep.py",
        "cli/test_wrong_words.py",
        "job/test_record.py",
        "cli/test_hydra.py",
    ],
)
def test_the_tests_of_the_command_line_pass(following, tmp_path, file):
    words = ["-n", "0", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "base")]
    # Of a launcher that is installed beside it, and is older than it.
    words += ["-W", "ignore:register_new_resolver"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(TESTS / file)], capture_output=True, text=True,
        check=False, cwd=ROOT, env=environment(following),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
