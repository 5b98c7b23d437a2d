"""Memory in a bench: fresh pages, the peak of a call, and time on CUDA."""

import copy
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prepare.stages.bench import compare, peak_memory
from prepare.stages.bench.variant import Variant

BATCH = torch.ones(4, 3)


@pytest.mark.skipif(os.name != "posix", reason="this system does not count pages")
def test_time_spent_on_fresh_memory_is_reported():
    def heavy(x):  # so large that every C library gives it back at once
        return torch.ones(10**7)

    page_by_page = peak_memory.page_faults()
    heavy(None)
    if peak_memory.page_faults() - page_by_page < 5_000:
        pytest.skip("this system gives huge pages")
    found = compare({"heavy": heavy, "light": lambda x: x}, BATCH, budget=0.8)
    assert found.settings["fresh_memory"] >= 0.1
    assert any("is spent on memory that each call returns" in note for note in found.notes)
    found = compare({"light": lambda x: x}, BATCH, budget=0.2)
    assert found.settings["fresh_memory"] == 0.0
    assert not any("memory" in note for note in found.notes)


@pytest.mark.skipif(os.name != "posix", reason="this system does not count pages")
def test_the_cost_of_a_page_fault_is_measured():
    assert 1e-8 < peak_memory.seconds_per_page_fault() < 1e-3


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_documented_malloc_settings_keep_memory_in_the_process():
    code = """if True:
        import torch
        from prepare.stages.bench.peak_memory import page_faults
        def work(times):
            for _ in range(times):
                torch.ones(10**7)
        work(20)  # what is kept is soon as large as it has to be
        faults = []
        for _ in range(5):  # the system may take pages away meanwhile
            before = page_faults()
            work(5)
            faults.append(page_faults() - before)
        print(min(faults))"""
    root = Path(__file__).parents[2]
    line = re.search(
        r"^((?:MALLOC_\w+=\d+ )+)python", (root / "docs/timing.md").read_text(), re.MULTILINE
    )
    settings = dict(word.split("=") for word in line[1].split())

    def started(**more):
        env = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
        return subprocess.Popen(
            [sys.executable, "-c", code], env=env | more, cwd=root, stdout=subprocess.PIPE
        )

    def pages(process):
        output, _ = process.communicate()
        assert process.returncode == 0
        return int(output)

    plain, tuned = started(), started(**settings)  # at once: most of it is the import of torch
    without, with_settings = pages(plain), pages(tuned)
    if without < 25_000:
        pytest.skip("this system gives huge pages")
    assert with_settings < without / 2


def test_cuda_is_timed_by_events_between_synchronisations(monkeypatch):
    happened = []

    class Event:
        def __init__(self, *, enable_timing):
            self.timing = enable_timing

        def record(self):
            happened.append("record")

        def synchronize(self):
            happened.append("wait")

        def elapsed_time(self, end):
            assert self.timing
            assert end is not self
            return 30.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: happened.append("idle"))
    variant = Variant("a", lambda x: happened.append("call"), formatter=None, train=False)
    variant._devices.add(torch.device("cuda"))
    took = variant.timed(BATCH, lambda: 1 / 0, calls=3)
    assert took == pytest.approx(0.01)  # 30 ms, three calls
    assert happened == ["idle", "record", "call", "call", "call", "record", "wait"]


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")
def test_peak_memory_is_that_of_the_call_alone():
    there = torch.ones(2**23)  # 32 MiB, resident before

    def work():
        for _ in range(3):
            torch.ones(2**24).sum()  # 64 MiB, given back each time

    found, how = peak_memory.measure_peak(work, {torch.device("cpu")})
    assert how == "VmHWM of the process"
    assert 56 * 2**20 < found < 80 * 2**20
    assert there[0] == 1


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")
def test_peak_memory_includes_memory_from_the_reserve():
    # 18 activations of 0.5 MiB wait for backward; the C library keeps such blocks once they are freed.
    parts = (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    net = nn.Sequential(*(copy.deepcopy(part) for _ in range(6) for part in parts))
    variant = Variant("a", net, formatter=None, train=True)
    batch = torch.randn(2, 16, 64, 64)
    found = [variant.peak(batch)[0] for _ in range(3)]
    assert min(found) > 7 * 2**20


def test_peak_memory_is_none_where_the_system_hides_it(monkeypatch, tmp_path):
    monkeypatch.setattr(peak_memory, "_CLEAR_REFS", tmp_path / "no" / "clear_refs")
    found = compare({"a": nn.Identity()}, BATCH, budget=0.2)
    assert (found.row("a").peak_bytes, found.settings["memory"]) == (None, None)


class TwoGpus(nn.Module):
    """Says that its parameters are on two GPUs, which this machine may lack."""

    def parameters(self, recurse=True):
        return iter([SimpleNamespace(device=torch.device("cuda", index)) for index in (0, 1)])

    def forward(self, x):
        self.calls += 1


def two_gpus(monkeypatch):
    happened, module = [], TwoGpus()
    module.calls = 0
    monkeypatch.setattr(torch.cuda, "synchronize", happened.append)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", happened.append)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda gpu: 100 * (gpu.index + 1))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda gpu: 150 * (gpu.index + 1))
    return happened, module, Variant("a", module, formatter=None, train=False)


def test_a_model_on_two_gpus_is_timed_until_both_are_done(monkeypatch):
    happened, module, variant = two_gpus(monkeypatch)
    seconds = iter([1.0, 1.5])

    def clock():
        assert len(set(happened)) == 2
        happened.clear()
        return next(seconds)

    took = variant.timed(BATCH, clock, calls=5)
    assert took == pytest.approx(0.1)
    assert module.calls == 5
    assert variant.timer == "wall clock"


def test_the_peak_of_a_model_on_two_gpus_is_their_sum(monkeypatch):
    happened, _, variant = two_gpus(monkeypatch)
    found, how = variant.peak(BATCH)
    assert (found, how) == (150, "torch.cuda.max_memory_allocated")
    assert sorted(gpu.index for gpu in happened) == [0, 0, 0, 1, 1, 1]
