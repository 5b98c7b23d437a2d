"""Setup of every test: one thread, fixed random numbers, and no network beyond this machine."""

import gc
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

# Threads of torch that wait without spinning leave the cores to other test processes. libgomp reads this
# when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch

from prepare.core.utils.packages import switch_off_telemetry
from prepare.registry import STEPS, register

# `nohup`, and `&` in a script, let a process and its children ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# One thread, so that parallel test processes do not fight over cores.
torch.set_num_threads(1)
switch_off_telemetry()
# OpenVINO reports each import to its makers; without this package it does not.
sys.modules.setdefault("openvino_telemetry", None)
# The processes that tests start refuse the network too: they import `sitecustomize` from there.
NO_NETWORK = str(Path(__file__).parent / "support" / "no_network")
REFUSED = Path(tempfile.mkdtemp(prefix="prepare-tests-")) / "refused"
REFUSED.touch()
os.environ["PREPARE_TESTS_REFUSED"] = str(REFUSED)
# No test reads or writes what the user's own tunings have stored.
os.environ["XDG_CACHE_HOME"] = str(REFUSED.with_name("cache"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), NO_NETWORK]))
sys.path.append(NO_NETWORK)
import sitecustomize  # noqa: E402, F401

# A package with tests of its own, which test_testing.py runs where it is installed.
collect_ignore = ["example_plugin", "example_stage"]


def pytest_xdist_auto_num_workers():
    """Return one process more than there are cores: many tests wait for processes that they start."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else os.cpu_count()


def pytest_collection_finish():
    """Leave what has been imported out of garbage collections, which take a fifth of the time otherwise."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_logs():
    """Close the logs of runs in this process, and restore what Hydra has changed in its loggers."""
    loggers = [logging.getLogger(name) for name in ("", "prepare", "hydra")]
    before = [(log, log.handlers[:], log.level, log.propagate) for log in loggers]
    yield
    for log, handlers, level, propagate in before:
        for opened in set(log.handlers) - set(handlers):
            opened.close()
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)


@pytest.fixture(autouse=True)
def _nothing_is_sent():
    before = REFUSED.stat().st_size
    yield
    refused = REFUSED.read_text()[before:]
    assert not refused, f"tried to reach another machine: {refused}"


@pytest.fixture
def plugin():
    """`register`, for steps of one test only."""
    before = {name: STEPS[name] for name in STEPS}
    yield register
    STEPS._classes.clear()
    STEPS._classes.update(before)
