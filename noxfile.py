"""The quick tier at the corners of what is supported: `nox` runs all four, `nox -l` lists them.

    nox -s "tests(torch='2.5.1', python='3.11')"

Another torch than that of constraints.txt is a build for CUDA of about 5 GB, which runs on the CPU too; the
environments are removed with `rm -r .nox`.
"""

import re
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv|venv"

# What a session installs itself, and what other versions of torch need in other versions, or have none of.
OTHERS = r"(hydra-core|omegaconf|torch|triton|nvidia-.*|lightning|pytorch-lightning)=="
HYDRA = ("hydra-core==1.3.8", "omegaconf==2.3.1")
NEXT_HYDRA = ("hydra-core==1.4.0rc3", "omegaconf>=2.4.1rc1")


def run(session: nox.Session, *packages: str) -> None:
    """Install the package, what its tests need, and `packages`; other tests skip themselves."""
    lines = Path("constraints.txt").read_text().splitlines()
    # Not `session.create_tmp()`: it becomes TMPDIR, so that tests would run inside this repository.
    constraints = Path(session.virtualenv.location) / "constraints.txt"
    constraints.write_text("\n".join(line for line in lines if not re.match(OTHERS, line)))
    session.install("-c", str(constraints), "-e", ".[test]", *packages)
    session.run("pytest", *session.posargs)


@nox.session
@nox.parametrize(("python", "torch"), [("3.11", "2.5.1"), ("3.12", "2.13.0"), ("3.13", "2.15.0")])
def tests(session: nox.Session, torch: str) -> None:
    """Run the quick tier with this torch."""
    run(session, f"torch=={torch}", *HYDRA)


@nox.session(python="3.11")
def hydra(session: nox.Session) -> None:
    """Run the quick tier with the next Hydra."""
    run(session, "torch==2.13.0", *NEXT_HYDRA)
