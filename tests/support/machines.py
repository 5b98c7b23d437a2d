"""Commands that take the machine they run on for one of their own, whose locks fail or reach no other."""

import errno
import fcntl
import os
import platform
import socket
from pathlib import Path

from paths import SHARED
from prepare.app.sweep import locks
from sweeps import QUICK
from warm_process import WarmProcess

MACHINE = "PREPARE_TESTS_MACHINE"
KINDS = ("locks", "no locks", "machines")


def start(kind: str, number: int, *words: str, cwd: Path) -> WarmProcess:
    """Start a sweep in `cwd`; with the kind `machines` on one of its own, which sees no other's processes."""
    environ = {MACHINE: f"{kind}:{number}", "OMP_NUM_THREADS": "1", "PYTHONPATH": SHARED}
    words = ["--multirun", *QUICK, "hydra.sweep.dir=swept", *words]
    return WarmProcess(words, cwd, os.environ | environ, text=True)


def enter(name: str) -> None:
    """Make this process one of the machine `kind:number`, on which time passes faster."""
    kind, _, number = name.partition(":")
    locks._BEAT, locks._DEAD = 0.5, 5.0
    if kind == "no locks":

        def refuse(*_):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        fcntl.flock = refuse
    if kind == "machines":
        fcntl.flock = lambda *_: None  # local to a machine, as on some file systems
        platform.node = socket.gethostname = lambda: f"node-{number}"
        locks._machine.cache_clear()
