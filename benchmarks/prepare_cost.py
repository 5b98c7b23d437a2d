"""Measure time and memory of one `apply`, against the usual calls and a plain copy.

    python benchmarks/prepare_cost.py [--gigabytes 1.3] [--channels 1024] [--repeats 15] [--dtype bfloat16]
    python benchmarks/prepare_cost.py --busy N [--minutes 3.5] [--gigabytes 0.3] [--json FILE]

Variants run interleaved, in a new random order in every repeat, each on a new model. Prints medians and
ratios; `apply` runs twice, which shows the noise (A/A).

With `--busy`, `apply` is timed in pairs with torch's chain, beside N busy processes (0: none), for weights of
1, 36 and 150 MB: `prepare_cost_pairs.py`.
"""

import argparse
import gc
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import prepare_cost_pairs
import torch
from torch import nn
from torch.nn.utils import convert_conv2d_weight_memory_format

from prepare.audit import audit
from prepare.pipeline import Pipeline


def build(gigabytes: float, channels: int) -> nn.Module:
    """Return 3x3 convolutions with so many channels and gigabytes of float32 weights."""
    count = max(1, round(gigabytes * 1e9 / (channels * channels * 9 * 4)))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Conv2d(channels, channels, 3) for _ in range(count)))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return model


Cost = tuple[float, int]


def variants(dtype: torch.dtype) -> dict[str, Callable[[nn.Module], object]]:
    steps = {
        "device": {"device": "cpu"},
        "half": {"dtype": dtype, "keep": []},
        "conv2d_memory_format": {},
    }
    pipeline = Pipeline.from_config(steps)

    def upstream(model: nn.Module) -> object:
        return convert_conv2d_weight_memory_format(model.to("cpu").to(dtype), torch.channels_last)

    def plain_copy(model: nn.Module) -> object:
        with torch.no_grad():
            return [torch.empty_like(p, dtype=dtype).copy_(p) for p in model.parameters()]

    return {
        "apply": pipeline.apply,
        "apply (again)": pipeline.apply,
        "apply(low_memory=True)": lambda model: pipeline.apply(model, low_memory=True),
        "(a) .to().half(), then the converter": upstream,
        "one .to(device, dtype, memory_format)": lambda model: model.to(
            "cpu", dtype, memory_format=torch.channels_last
        ),
        "(b) one plain copy of each tensor": plain_copy,
    }


def peak_memory() -> int:
    """Return the peak memory of this process since its last reset, in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def warm_memory(gigabytes: float) -> None:
    """Write to twice the memory of the model, and release it.

    The host of a virtual machine reclaims free memory, and providing it again costs more than all that
    is measured here; the first variant would pay for it.
    """
    torch.empty(int(gigabytes * 2e9), dtype=torch.uint8).fill_(1)


def measure(act: Callable[[nn.Module], object], gigabytes: float, channels: int) -> Cost:
    """Return the seconds, and the peak memory above that of the process at the start."""
    model = build(gigabytes, channels)
    gc.collect()
    warm_memory(gigabytes)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory()
    start = time.perf_counter()
    kept = act(model)
    seconds = time.perf_counter() - start
    extra = peak_memory() - before
    del kept
    return seconds, extra


def copies(gigabytes: float, channels: int, repeats: int, dtype: torch.dtype) -> dict[str, dict]:
    acts = variants(dtype)
    found = {name: [] for name in acts}
    for repeat in range(repeats + 1):
        names = list(acts)
        random.Random(repeat).shuffle(names)
        for name in names:
            result = measure(acts[name], gigabytes, channels)
            if repeat:  # the first round warms up
                found[name].append(result)
        print(f"  round {repeat} of {repeats}", flush=True)
    return {
        name: {
            "seconds": statistics.median(seconds for seconds, _ in results),
            "all_seconds": [round(seconds, 4) for seconds, _ in results],
            "extra_bytes": int(statistics.median(extra for _, extra in results)),
        }
        for name, results in found.items()
    }


def many_modules(count: int, repeats: int) -> dict[str, float]:
    """Time `plan` and `audit` of `count` modules: convolutions, norms and activations alternate."""
    kinds = (lambda: nn.Conv2d(4, 4, 1), lambda: nn.BatchNorm2d(4), nn.ReLU)
    model = nn.Sequential(*(kinds[i % 3]() for i in range(count)))
    pipeline = Pipeline.from_config({"device": {}, "half": {}, "conv2d_memory_format": {}})
    seconds: dict[str, list[float]] = {"plan": [], "audit": []}
    for _ in range(repeats):
        for name, act in (("plan", pipeline.plan), ("audit", audit)):
            start = time.perf_counter()
            act(model)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def untouched_batch() -> float:
    """Time `pipeline.format` of a batch that needs no change."""
    pipeline = Pipeline.from_config({"conv2d_memory_format": {}, "input_format": {}})
    batch = {
        "image": torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
        "label": torch.ones(2),
    }
    assert pipeline.format(batch) is batch
    times = []
    for _ in range(2000):
        start = time.perf_counter()
        pipeline.format(batch)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busy", type=int, metavar="N", help="time pairs beside N busy processes")
    parser.add_argument("--minutes", type=float, default=3.5, help="for all pairs together")
    parser.add_argument("--gigabytes", type=float, help="default: 1.3, or 0.3 with --busy")
    parser.add_argument("--channels", type=int, default=1024, help="of every convolution")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    if options.busy is not None:
        found = prepare_cost_pairs.run(options.busy, options.minutes, options.gigabytes or 0.3)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
        return
    options.gigabytes = options.gigabytes or 1.3
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{torch.get_num_threads()} threads, {platform.machine()}"
    )
    many = {count: many_modules(count, 5) for count in (2_000, 20_000)}
    for name in ("plan", "audit"):
        small, large = many[2_000][name], many[20_000][name]
        print(f"{name}: {large:.2f} s for 20,000 modules, {large / small:.1f} times that of 2,000")
    batch = untouched_batch()
    print(f"format of a batch that needs nothing: {batch * 1e6:.1f} microseconds")
    size = (options.gigabytes, options.channels)
    found = copies(*size, options.repeats, getattr(torch, options.dtype))
    weights = sum(p.numel() for p in build(*size).parameters())
    base = found["apply"]["seconds"]
    print(f"\n{weights * 4 / 1e9:.2f} GB of float32 to {options.dtype}, channels_last; medians")
    print(f"{'':40} seconds  apply/this  extra GB (new weights: {weights * 2 / 1e9:.2f})")
    for name, result in found.items():
        extra = result["extra_bytes"] / 1e9
        print(f"{name:40} {result['seconds']:7.3f}  {base / result['seconds']:10.2f}  {extra:8.2f}")
    if options.json:
        report = {"torch": torch.__version__, "threads": torch.get_num_threads(), "many": many}
        report |= {
            "format_seconds": batch,
            "gigabytes": options.gigabytes,
            "channels": options.channels,
            "copies": found,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
