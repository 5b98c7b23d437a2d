"""Start the command line in a process of its own, as a user does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from paths import RUN


def start_command(
    *words: str | Path, cwd: Path, env: dict[str, str], text: bool = True
) -> subprocess.Popen:
    """Start `python run.py WORDS` with that environment; Ctrl-C stops it, and its output is captured."""
    # A shell makes its background processes, and all that they start, ignore Ctrl-C.
    posix = os.name == "posix"
    restore = (lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) if posix else None
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, str(RUN), *map(str, words)], cwd=cwd, env=env, preexec_fn=restore,
        stdout=pipe, stderr=pipe, text=text,
    )  # fmt: skip
