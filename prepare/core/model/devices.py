"""Ask devices for their free memory, wait for them, and compute with one thread each."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from prepare.core.utils.process_state import interrupts_wait

_MEMINFO = Path("/proc/meminfo")


def free_memory(device: torch.device) -> int | None:
    """Return the bytes of free memory, or None where the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = _MEMINFO.read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        return 1024 * int(available.split()[1])
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return None


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait for all work on every accelerator among `devices`; a CPU has none that is waiting."""
    for device in {device for device in devices if device.type not in ("cpu", "meta")}:
        synchronize = getattr(torch, device.type).synchronize
        # There is one MPS, and its function takes no argument.
        synchronize() if device.type == "mps" else synchronize(device)


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Run torch's operators in `count` threads; for the calling thread alone, if the system allows that."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    set_threads = _set_threads()
    set_threads(count)
    try:
        yield
    finally:
        set_threads(before)


class OneThreadWorkers(ThreadPoolExecutor):
    """As many threads as torch uses, each of which runs torch's operators in one thread.

    At the end of a parallel region every thread waits for the slowest one, and on a busy machine that is a
    thread that is not running. Threads that each take the next piece of work never wait for one another.

    The threads start with the first work and end with the context. With `start` False the calling thread
    does all work, in one thread too.
    """

    def __init__(self, start: bool) -> None:  # noqa: FBT001
        self._count = torch.get_num_threads() if start else 1
        super().__init__(self._count)

    def run(self, work: Callable[[Any], None], waiting: deque[Any]) -> None:
        """Call `work` with every item that waits, and remove it; leave the rest if an interrupt is deferred.

        After an error, wait until the threads have stopped and raise it.
        """

        def work_on() -> None:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), with_threads(1):
                while waiting and not interrupts_wait():
                    try:
                        item = waiting.popleft()
                    except IndexError:  # another thread has taken the last one
                        return
                    work(item)

        if self._count == 1 or len(waiting) < 2:
            work_on()
            return
        futures = [self.submit(work_on) for _ in range(self._count)]
        try:
            for future in futures:
                future.result()
        except BaseException:
            waiting.clear()
            raise
        finally:
            wait(futures)


@cache
def _set_threads() -> Callable[[int], object]:
    """Return a function that sets the number of threads of the calling thread.

    `torch.set_num_threads` also sets it for threads that start later, so OpenMP's own function is better
    where it can be found.
    """
    count = torch.get_num_threads()
    try:
        omp_set_num_threads = ctypes.CDLL(None).omp_set_num_threads
    except (OSError, AttributeError, TypeError):  # Windows, or another library of threads
        return torch.set_num_threads
    other = 1 if count > 1 else 2
    omp_set_num_threads(other)
    works = torch.get_num_threads() == other
    omp_set_num_threads(count)
    return omp_set_num_threads if works else torch.set_num_threads
