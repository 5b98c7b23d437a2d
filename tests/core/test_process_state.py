"""Threads that verify, bench, tune and apply leave the process, and a thread that serves, as they were."""

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from fingerprint import difference, process_state
from prepare.pipeline import Pipeline
from prepare.stages import bench, flow
from prepare.stages.tune import tune
from prepare.stages.verify import verify

STEPS = {
    "half": {"dtype": "bfloat16"},
    "conv2d_memory_format": {},
    "input_format": {"attach": True},
}
BATCH = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Positions(nn.Module):
    """Makes tensors in its forward, whose dtype is the default one, and calls other modules."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.act, self.drop = nn.ReLU(), nn.Dropout()

    def forward(self, x):
        return self.act(self.norm(self.conv(x))) + torch.arange(8) / 3 + torch.ones(8)


def model():
    return Positions().eval()


def verified(work):
    prepared = Pipeline.from_config(STEPS).apply(copy.deepcopy(work), known_issues="ignore")
    found = verify(work, prepared, BATCH, pipeline=Pipeline.from_config(STEPS))
    assert found.status == "pass", found


def timed(work):
    bench.compare({"a": work, "b": copy.deepcopy(work)}, BATCH, budget=0.2)


def tuned(work):
    tune(work, BATCH, budget=0.3, allow=["bfloat16"])


def applied(work):
    flow.predict(work, BATCH)
    steps = {"fuse_conv_bn": {}, **STEPS}
    Pipeline.from_config(steps).apply(work, known_issues="ignore")


WORK = (verified, timed, tuned, applied)


def beside_a_serving_thread(runs):
    """Do all kinds of work in threads, `runs` times, beside one that serves; return its number of answers."""
    served, expected = model(), None
    with torch.no_grad():
        expected = served(BATCH)
    answers, ends, wrong = 0, threading.Event(), []

    def serve():
        nonlocal answers
        while not ends.is_set():
            with torch.no_grad():
                answer = served(BATCH)
            if answer.dtype != expected.dtype or not torch.equal(answer, expected):
                wrong.append(answer)
            answers += 1
            time.sleep(0)

    for work in WORK:  # what is imported or cached at first use stays
        work(model())
    thread = threading.Thread(target=serve)
    before = process_state()
    with ThreadPoolExecutor(len(WORK)) as pool:
        thread.start()
        try:
            for run in range(runs):
                models = [model() for _ in WORK]
                torch.set_rng_state(torch.tensor(before[0], dtype=torch.uint8))
                for future in [pool.submit(*pair) for pair in zip(WORK, models, strict=True)]:
                    future.result()
                assert not difference(process_state(), before), f"run {run}"
                assert not wrong, f"run {run}"
        finally:
            ends.set()
            thread.join()
    return answers


@pytest.mark.slow
def test_threads_leave_the_process_and_a_serving_one_as_they_were():
    assert beside_a_serving_thread(2) > 10
