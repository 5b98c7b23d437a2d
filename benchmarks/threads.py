"""Measure MONAI's SegResNet 3-d and UNet 3-d again: contiguous against the recipe of the zoo.

    python benchmarks/threads.py --threads 1 --rounds 21 --out benchmarks/results/threads_1.json

Run it on a quiet machine, once with --threads 1 and once with --threads 2. All variants of a network
(contiguous, contiguous again as the A/A control, converted by torch's converter, and prepared) run
interleaved, in an order shuffled for each round, after --warm-up calls of each. A time of a round is one
call. Ratios are medians over the rounds of the ratio within a round; the interval is that of the median by
order statistics, at 95 % or more. Processor time is that of all threads of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

STEPS = {"repair_layout": {}, "conv3d_memory_format": {}, "input_format": {}}
NAMES = ("monai segresnet 3-d", "monai unet 3-d")
# What zoo.json holds of the AMD EPYC, two threads, 2026-11-22: (evaluation, training).
PUBLISHED = {"monai segresnet 3-d": (0.25, 0.39), "monai unet 3-d": (0.39, 0.64)}
BASE = "contiguous"


def interval(values: list[float], level: float = 0.95) -> tuple[float, float, float]:
    """Return the interval of the median by order statistics, and the level that it has."""
    ordered, n = sorted(values), len(values)
    for k in range(n // 2, 0, -1):
        covered = 1 - 2 * sum(comb(n, i) for i in range(k)) / 2**n
        if covered >= level:
            return ordered[k - 1], ordered[n - k], covered
    return ordered[0], ordered[-1], 1 - 2 / 2**n


def one_call(model: Any, batch: Any, *, train: bool) -> Callable[[], None]:
    import torch

    def evaluate() -> None:
        with torch.no_grad():
            model(batch)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        output = model(batch)
        output = output[0] if isinstance(output, (tuple, list)) else output
        output.square().mean().backward()

    return step if train else evaluate


def measure(name: str, options: argparse.Namespace, *, train: bool) -> dict[str, Any]:
    import copy
    import random

    import torch
    from torch.nn.utils import convert_conv3d_weight_memory_format
    from zoo_networks import NETWORKS

    from prepare.pipeline import Pipeline

    network = NETWORKS[name]
    torch.manual_seed(0)
    model = network.build().train(train)
    batch = network.batch()
    pipeline = Pipeline.from_config(STEPS)
    prepared = pipeline.apply(copy.deepcopy(model), known_issues="error" if train else "ignore")
    formatted = pipeline.format(batch)
    status = "not run"
    if options.verify:
        from prepare.stages.verify import verify

        found = verify(model, prepared, batch, mode="train" if train else "eval")
        status = found.status
    converted = convert_conv3d_weight_memory_format(copy.deepcopy(model), torch.channels_last_3d)
    variants = {
        BASE: one_call(model, batch, train=train),
        "contiguous again": one_call(copy.deepcopy(model), batch, train=train),
        "torch's converter": one_call(converted, batch, train=train),
        "prepared": one_call(prepared, formatted, train=train),
    }
    for call in variants.values():
        for _ in range(options.warm_up):
            call()
    times: dict[str, list[tuple[float, float]]] = {variant: [] for variant in variants}
    shuffle = random.Random(0)
    for number in range(options.rounds):
        order = list(variants)
        shuffle.shuffle(order)
        for variant in order:
            variants[variant]()  # untimed: the caches are as after a call of this variant
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(options.calls):
                variants[variant]()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            times[variant].append((wall / options.calls, cpu / options.calls))
        print(f"\r{name}, round {number + 1}/{options.rounds} ", end="", file=sys.stderr)
    print(file=sys.stderr)
    rows = {}
    for variant, pairs in times.items():
        rows[variant] = {"seconds": pairs}
        for index, what in enumerate(("wall", "processor")):
            ratios = [
                one[index] / base[index] for one, base in zip(pairs, times[BASE], strict=True)
            ]
            low, high, level = interval(ratios)
            rows[variant][what] = {
                "ms": median(pair[index] for pair in pairs) * 1e3,
                "ratio": median(ratios),
                "interval": [low, high],
                "confidence": level,
            }
    return {
        "network": name,
        "train": train,
        "shape": network.shape,
        "rows": rows,
        "verified": status,
    }


def shown(case: dict[str, Any]) -> str:
    mode, published = "training step" if case["train"] else "inference", PUBLISHED[case["network"]]
    lines = [
        (
            f"{case['network']} {list(case['shape'])}, {mode}, verified: {case['verified']}, "
            f"published on 2 threads: {published[case['train']]:.2f}"
        )
    ]
    for variant, row in case["rows"].items():
        cells = [
            f"{what} {row[what]['ratio']:.3f} ({row[what]['interval'][0]:.3f} to "
            f"{row[what]['interval'][1]:.3f}), {row[what]['ms']:.1f} ms"
            for what in ("wall", "processor")
        ]
        lines.append(f"  {variant:18} {'; '.join(cells)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument(
        "--rounds", type=int, default=25, help="at least 15 for a figure that is published"
    )
    parser.add_argument("--calls", type=int, default=1, help="calls for each time")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--train", action="store_true", help="training steps instead of inference")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of networks' names")
    parser.add_argument(
        "--spin-count",
        type=int,
        help="GOMP_SPINCOUNT: 1000 as the command line sets it; zoo.py sets none",
    )
    parser.add_argument("--no-verify", dest="verify", action="store_false")
    parser.add_argument("--out", type=Path, help="a JSON file for the raw times")
    options = parser.parse_args()
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # before torch is imported
        os.environ[variable] = str(options.threads)
    sys.path.insert(0, str(Path.cwd() / "benchmarks"))
    if options.spin_count:
        os.environ["GOMP_SPINCOUNT"] = str(options.spin_count)
    import torch

    torch.set_num_threads(options.threads)
    names = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    place = {"date": time.strftime("%Y-%m-%d"), "cpu": names[0].partition(": ")[2]}
    place["torch"] = torch.__version__
    load = os.getloadavg()[0]
    print(
        f"{place['date'][:10]}, {place['cpu']}, torch {place['torch']}, {options.threads} threads, "
        f"{options.rounds} rounds, load before {load:.2f}, GOMP_SPINCOUNT {os.environ.get('GOMP_SPINCOUNT')}"
    )
    cases = []
    for name in NAMES:
        if any(part in name for part in options.only):
            cases.append(measure(name, options, train=options.train))
            print(shown(cases[-1]), flush=True)
    print(f"load after {os.getloadavg()[0]:.2f}")
    if options.out:
        record = {"cases": cases, "environment": place, "threads": options.threads}
        record |= {"load": [load, os.getloadavg()[0]], "steps": STEPS}
        options.out.write_text(json.dumps(record, indent=1, default=str))


if __name__ == "__main__":
    main()
