"""The wheel holds what it must, works where it is installed, and the core needs no command line's packages."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from paths import CONF
from prepare.app.job import record

ROOT = CONF.parent
CLI = ("hydra", "omegaconf", "rich")


def run(*words: str | Path, cwd: Path, **more: str) -> subprocess.CompletedProcess:
    """A program in a folder, without this checkout on its path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **more}
    return subprocess.run(
        list(map(str, words)), capture_output=True, text=True, cwd=cwd, env=env, timeout=300
    )


def checked(*words: str | Path, cwd: Path) -> str:
    done = run(*words, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    checked(*pip, "-w", folder, ROOT, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The folder of programs of a new environment that has the wheel, and torch from this one."""
    folder = tmp_path_factory.mktemp("environment")
    checked(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    paths = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    # Only the packages: a path file within them (that of an editable install) is not followed.
    (site / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    programs = Path(sysconfig.get_path("scripts", "venv", vars=paths))
    install = ("install", "--no-deps", "--no-index", "--ignore-installed", wheel)
    pip = (sys.executable, "-m", "pip", "--python", programs / "python")
    checked(*pip, *install, cwd=folder)
    return programs


# ------------------------------------------------------------------------------- what is in the wheel


def test_the_wheel_holds_the_package_and_all_configurations_only(wheel):
    names = {
        name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("torch_prepare-")
    }
    configs = {f"prepare/conf/{path.relative_to(CONF).as_posix()}" for path in CONF.rglob("*.*")}
    code = (ROOT / folder for folder in ("prepare", "hydra_plugins"))
    modules = {path.relative_to(ROOT).as_posix() for each in code for path in each.rglob("*.py")}
    assert len(configs) > 40
    assert "prepare/conf/__init__.py" in configs  # Hydra's `pkg://prepare.conf` asks for a package
    package = ROOT / "prepare"
    data = [*(package / "app" / "report" / "templates").rglob("*.*"), package / "py.typed", package / "__init__.pyi",
            package / "core" / "model" / "known_issues.yaml",
            *(package / "frameworks" / "start").rglob("*/*")]  # fmt: skip
    assert names == configs | modules | {path.relative_to(ROOT).as_posix() for path in data}


def test_the_core_needs_torch_pyyaml_and_safetensors_only(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if re.match(r"torch_prepare-.*/METADATA", n))
        about = BytesParser().parsebytes(archive.read(name))
    asked = map(Requirement, about.get_all("Requires-Dist"))
    needed = {one.name for one in asked if "extra" not in str(one.marker)}
    assert needed == {"torch", "pyyaml", "safetensors"}


# ------------------------------------------------------------------------------- where it is installed


def test_the_console_script_runs_from_an_empty_folder(installed, tmp_path):
    small = ("model.width=2", "model.depth=2", "input.shape=[1,1,8,8]")
    words = ("model=unet2d", *small, "memfmt=channels_last", "bench=none")
    done = run(installed / "prepare", *words, cwd=tmp_path)
    assert done.stderr == ""  # progress is for a terminal
    assert done.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    (result,) = tmp_path.rglob("result.json")
    not_here = ("flow_before", "bench", "tune", "model", "log",
                "traceback")  # fmt: skip
    usual = {name for name in record.shown_files() if not name.startswith(not_here)}
    assert {path.name for path in result.parent.iterdir()} == {*usual, ".hydra", "prepare.log"}
    assert json.loads(result.read_text())["status"] == "ok"
    audit = json.loads((result.parent / "audit.json").read_text())
    assert audit["summary"]["convolutions"]["converted"] > 0


def test_the_bare_words_and_the_help_work_where_it_is_installed(installed, tmp_path):
    assert "conv3d_memory_format" in checked(installed / "prepare", "steps", cwd=tmp_path)
    assert "channels_last_3d" in checked(installed / "prepare", "--help", cwd=tmp_path)
    done = run(installed / "prepare", "memfmt=chanels_last", cwd=tmp_path)
    assert done.returncode == 2
    assert "'channels_last'?" in done.stderr
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------- without the extras


def without(packages: tuple[str, ...], code: str, cwd: Path) -> subprocess.CompletedProcess:
    """Runs code in an interpreter that cannot import these packages."""
    block = f"""
        import sys
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {packages!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Absent())
    """
    program = textwrap.dedent(block) + textwrap.dedent(code)
    return run(sys.executable, "-c", program, cwd=cwd, PYTHONPATH=str(ROOT))


def test_only_command_line_modules_need_its_packages(tmp_path):
    code = """
        import importlib, pkgutil, prepare
        absent = []
        for found in pkgutil.walk_packages(prepare.__path__, "prepare."):
            if found.name.startswith("prepare.frameworks."):
                continue  # each needs its framework
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                absent.append(found.name)
        import torch
        steps = {"conv2d_memory_format": {}, "input_format": {}}
        model, pipeline = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)), prepare.Pipeline.from_config(steps)
        prepare.audit.audit(model, plan=pipeline.plan(model)).save("audit.json")
        pipeline.apply(model)(pipeline.format(torch.randn(1, 3, 8, 8)))
        pipeline.save("recipe.yaml")
        assert not prepare.Pipeline.load("recipe.yaml").plan(model)
        print(*sorted(absent))
    """
    done = without(CLI, code, tmp_path)
    assert done.stderr == ""
    needs = (
        "prepare.frameworks.hydra",
        "prepare.app.cli.",
        "prepare.app.report.terminal",
        "prepare.app.report.sweep_progress",
        "prepare.app.report.pages",
        "prepare.app.report.html",
    )
    assert [name for name in done.stdout.split() if not name.startswith(needs)] == []


@pytest.mark.parametrize(
    ("absent", "words"),
    [("hydra", ["model=unet2d"]), ("omegaconf", ["model=unet2d"]), ("rich", ["model=unet2d"]),
     ("rich", ["summary", "."])],
)  # fmt: skip
def test_the_command_line_says_in_one_line_which_extra_it_needs(tmp_path, absent, words):
    done = without((absent,), f"from prepare.app.cli.main import main; main({words})", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f" {absent};" in line
    assert line.endswith("'torch-prepare[cli]'")
    assert list(tmp_path.iterdir()) == []
