"""Keep cores busy beside a measurement: processes that never wait.

Importing this before torch also limits how long torch's threads spin, as the command line does.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from prepare.core.utils.machine import limit_spinning

limit_spinning()


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes that never wait, until the context ends."""
    # A process ends by itself if this one is killed.
    loop = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
    command = [sys.executable, "-c", loop]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
