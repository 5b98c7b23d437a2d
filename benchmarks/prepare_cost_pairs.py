"""Time `apply` against torch's chain in pairs: `python benchmarks/prepare_cost.py --busy N`.

The chain is `.to(dtype)`, then torch's converter. Weights of 1, 36 and 150 MB each, of 2-d and 3-d
convolutions, to float16 and bfloat16. In each round every variant prepares a new model, in a new random
order; a figure is the median of the ratios to the chain in the same round.
"""

import gc
import itertools
import platform
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from busy import busy_processes
from torch import nn
from torch.nn.utils import (
    convert_conv2d_weight_memory_format,
    convert_conv3d_weight_memory_format,
)

from prepare.core.utils.machine import how_threads_wait
from prepare.pipeline import Pipeline

# Channels of convolutions whose float32 weights have so many megabytes.
CHANNELS = {1: {2: 160, 3: 96}, 36: {2: 1000, 3: 576}, 150: {2: 2048, 3: 1184}}
CONVOLUTIONS = {2: nn.Conv2d, 3: nn.Conv3d}
CONVERTERS = {2: convert_conv2d_weight_memory_format, 3: convert_conv3d_weight_memory_format}
FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
CHAIN = "chain"
VARIANTS = ("chain (again)", "apply", "apply(low_memory=True)", "chain, old ones kept")


def build(rank: int, megabytes: int, gigabytes: float) -> nn.Module:
    """Return convolutions with weights of so many megabytes each, and so many gigabytes in all."""
    channels = CHANNELS[megabytes][rank]
    count = max(1, round(gigabytes * 1e9 / (channels**2 * 3**rank * 4)))
    with torch.device("meta"):
        layers = [CONVOLUTIONS[rank](channels, channels, 3) for _ in range(count)]
    model = nn.Sequential(*layers).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.02, 0.02)
    return model


def variants(rank: int, dtype: str) -> dict[str, Callable[[nn.Module], object]]:
    """Return what is timed, by name."""
    steps = {"half": {"dtype": dtype, "keep": []}, f"conv{rank}d_memory_format": {}}
    pipeline = Pipeline.from_config(steps)

    def chain(model: nn.Module) -> object:
        return CONVERTERS[rank](model.to(getattr(torch, dtype)), FORMATS[rank])

    def keep(model: nn.Module) -> object:
        """Do what the chain does, and hold the old tensors until the end, as whatever can be undone must."""
        old = [parameter.data for parameter in model.parameters()]
        chain(model)
        return old

    low = lambda model: pipeline.apply(model, low_memory=True)  # noqa: E731
    return {CHAIN: chain} | dict(zip(VARIANTS, (chain, pipeline.apply, low, keep), strict=True))


def measure(rank: int, megabytes: int, dtype: str, until: float, gigabytes: float) -> dict:
    """Return the seconds of each variant, at least three rounds of them, until a time."""
    acts = variants(rank, dtype)
    seconds: dict[str, list[float]] = {name: [] for name in acts}
    for count in itertools.count():
        for name in random.Random(count).sample(list(acts), len(acts)):
            model = build(rank, megabytes, gigabytes)
            gc.collect()
            # Memory that the host of a virtual machine has taken away would be paid by the first variant.
            torch.empty(int(gigabytes * 2e9), dtype=torch.uint8).fill_(1)
            start = time.perf_counter()
            acts[name](model)
            taken = time.perf_counter() - start
            if count:  # the first round warms up
                seconds[name].append(round(taken, 5))
        if count >= 3 and time.monotonic() > until:
            return seconds
    raise AssertionError


def ratio(seconds: dict[str, list[float]], variant: str) -> float:
    """Return the median ratio of a variant's time to the chain's in the same round."""
    pairs = zip(seconds[variant], seconds[CHAIN], strict=True)
    return statistics.median(own / base for own, base in pairs)


def run(busy: int, minutes: float, gigabytes: float) -> dict[str, Any]:
    """Measure every case beside so many busy processes, print the ratios, return all figures."""
    report: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    report |= {"machine": platform.machine(), "busy": busy, "gigabytes": gigabytes}
    report |= {"waiting": how_threads_wait() or "default"}
    report |= {"cases": []}
    cases = list(itertools.product((1, 36, 150), (2, 3), ("float16", "bfloat16")))
    end = time.monotonic() + 60 * minutes
    print(f"beside {busy} busy processes")
    print(f"{'':24} chain, ms {' '.join(f'{name:>24}' for name in VARIANTS)}  rounds")
    with busy_processes(busy):
        for place, (megabytes, rank, dtype) in enumerate(cases):
            now = time.monotonic()
            share = max(0.0, end - now) / (len(cases) - place)
            seconds = measure(rank, megabytes, dtype, now + share, gigabytes)
            case = {"megabytes": megabytes, "rank": rank, "dtype": dtype, "seconds": seconds}
            report["cases"].append(case)
            cells = " ".join(f"{ratio(seconds, name):24.2f}" for name in VARIANTS)
            base = statistics.median(seconds[CHAIN]) * 1e3
            label = f"{megabytes} MB, {rank}-d, {dtype}"
            print(f"{label:24} {base:9.1f} {cells}  {len(seconds[CHAIN]):6}", flush=True)
    return report
