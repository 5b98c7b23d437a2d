"""Deferred signals: what is held, what is left alone, and when a handler runs."""

import os
import random
import signal
import sys
import threading
import time

import pytest
import torch
from torch import nn

from prepare.core.forward.unchanged import unchanged
from prepare.core.utils.process_state import held_interrupts, interruptible
from prepare.pipeline import Pipeline
from small_nets import facts

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends signals to itself")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def python_handlers():
    """Handlers of Python for both signals, which raise."""

    def stop(number, frame):
        raise KeyboardInterrupt(number)

    before = [signal.signal(number, stop) for number in SIGNALS]
    yield stop
    assert all(signal.getsignal(number) is stop for number in SIGNALS)
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def test_a_signal_acts_after_the_outermost_block():
    done = []
    with pytest.raises(KeyboardInterrupt), held_interrupts():
        with held_interrupts():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


def large():
    return nn.Sequential(*(nn.Conv2d(64, 64, 3) for _ in range(8 * 6)))


def applied_under_signals(times):
    """Apply beside a thread that signals the process at a random moment; return how often it acted."""
    pipeline = Pipeline.from_config({"half": {"keep": []}, "conv2d_memory_format": {}})
    pipeline.apply(large(), known_issues="ignore")  # the first one takes longer
    model, start = large(), time.perf_counter()
    pipeline.apply(model, known_issues="ignore")
    took, acted, whole = time.perf_counter() - start, 0, 0
    for _ in range(times):
        model = large()
        before = facts(model)
        timer = threading.Timer(
            random.uniform(0, took), os.kill, (os.getpid(), random.choice(SIGNALS))
        )
        try:
            timer.start()
            pipeline.apply(model, known_issues="ignore")
            timer.join()
            time.sleep(0.001)
        except KeyboardInterrupt:
            acted += 1
            timer.join()
            prepared = not pipeline.plan(model)
            whole += prepared
            assert prepared or facts(model) == before
    return acted, whole


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_signal_to_a_process_with_threads_leaves_models_whole():
    acted, whole = applied_under_signals(20)
    assert acted == 20
    assert whole < acted


def test_a_signal_between_two_lines_leaves_model_and_batch():
    net, x = nn.BatchNorm2d(3), torch.randn(2, 3, 4, 4)
    before = facts(net), x.clone()
    with pytest.raises(KeyboardInterrupt), unchanged(net, x):
        signal.raise_signal(signal.SIGINT)
        net(x.mul_(2))
    assert facts(net) == before[0]
    assert torch.equal(x, before[1])


def test_a_signal_in_a_call_of_the_model_acts_at_once():
    net, done = nn.BatchNorm2d(3), []
    before = facts(net)
    with pytest.raises(KeyboardInterrupt), unchanged(net):
        interruptible(signal.raise_signal, signal.SIGINT)
        done.append("after it")
    assert not done
    assert facts(net) == before
