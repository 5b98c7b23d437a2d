"""The quick tier with other versions of torch, Python and Hydra: `nox` runs all, `nox -l` lists them.

    nox -s "tests-3.12(torch='2.8.0')"
    nox -s hydra -- tests/cli -k multirun

Each torch is a build for CUDA of about 5 GB, which runs on the
CPU too; the environments are removed with `rm -r .nox`.
"""

import re
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv|venv"

TORCH = ["2.5.1", "2.8.0", "2.10.0", "2.15.0"]
PYTHON = ["3.11", "3.12", "3.13"]
HYDRA = ("hydra-core==1.3.8", "omegaconf==2.3.1")
NEXT_HYDRA = ("hydra-core==1.4.0rc3", "omegaconf>=2.4.1rc1")
# What a session installs itself, and what other versions of torch need in other versions, or have none of.
OTHERS = r"(hydra-core|omegaconf|torch|triton|nvidia-.*|lightning|pytorch-lightning)=="
EXTRAS = "cli,joblib,submitit"


def constraints(session: nox.Session) -> str:
    """Write the constraints without those of OTHERS, and return the file's name."""
    lines = Path("constraints.txt").read_text().splitlines()
    # Not `session.create_tmp()`: it becomes TMPDIR, so that tests would run inside this repository.
    file = Path(session.virtualenv.location) / "constraints.txt"
    file.write_text("\n".join(line for line in lines if not re.match(OTHERS, line)))
    return str(file)


def install(session: nox.Session, *packages: str) -> None:
    """Install the package, what its tests need, and `packages`; other tests skip themselves."""
    tools = [
        "pytest",
        "pytest-xdist",
        "hypothesis",
        "numpy",
        "psutil",
        "einops",
        "expecttest",
        "setuptools",
    ]
    session.install("-c", constraints(session), "-e", f".[{EXTRAS}]", *tools, *packages)


@nox.session(python=PYTHON)
@nox.parametrize("torch", TORCH)
def tests(session: nox.Session, torch: str) -> None:
    """Run the quick tier with this torch."""
    install(session, f"torch=={torch}", *HYDRA)
    session.run("pytest", *session.posargs)


@nox.session(python=PYTHON[0])
def hydra(session: nox.Session) -> None:
    """Run the quick tier with the next Hydra."""
    install(session, "torch==2.13.0", *NEXT_HYDRA)
    session.run("pytest", *session.posargs)
