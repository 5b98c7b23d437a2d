"""Time operators under settings of how OpenMP's threads wait, on a quiet machine and beside busy processes.

    python benchmarks/waiting.py [--busy 0 1 2] [--rounds 5] [--seconds 0.25] [--json FILE]

Each setting runs in a new process, in a new random order in every round. A figure is the mean time of one
call, because the tail is what spinning costs; a ratio is the median over the rounds of the ratios to torch's
default in the same round.
"""

import argparse
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from busy import busy_processes

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "GOMP_SPINCOUNT=100": {"GOMP_SPINCOUNT": "100"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "GOMP_SPINCOUNT=3000": {"GOMP_SPINCOUNT": "3000"},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    "GOMP_SPINCOUNT=30000": {"GOMP_SPINCOUNT": "30000"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
}
_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def operators() -> dict[str, Callable[[], Any]]:
    """Return the operators to time, small and large."""
    import torch
    from torch import nn

    def network(channels: int, size: int) -> Callable[[], Any]:
        layers = [
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.InstanceNorm2d(channels))
            for _ in range(4)
        ]
        model = nn.Sequential(*layers).eval()
        x = torch.randn(1, channels, size, size)
        return lambda: model(x)

    small, large, square = torch.randn(200_000), torch.randn(20_000_000), torch.randn(1024, 1024)
    to_small, to_large = torch.empty_like(small), torch.empty_like(large)
    return {
        "copy, 0.2 M": lambda: to_small.copy_(small),
        "copy, 20 M": lambda: to_large.copy_(large),
        "product, 1024 x 1024": lambda: square @ square,
        "network, 64 x 64": network(16, 64),
        "network, 256 x 256": network(32, 256),
    }


def measure(seconds: float) -> dict[str, list[float]]:
    """Return the mean, the median and the 99th percentile of one call of each operator, in seconds."""
    import torch

    figures = {}
    with torch.no_grad():
        for name, act in operators().items():
            times, end = [], 0.0
            for number in range(100_000):
                start = time.perf_counter()
                act()
                now = time.perf_counter()
                if number < 3:  # warms up
                    end = now + seconds
                    continue
                times.append(now - start)
                if now > end and len(times) >= 5:
                    break
            times.sort()
            last = times[int(0.99 * len(times))]
            figures[name] = [statistics.fmean(times), statistics.median(times), last]
    return figures


def measure_apart(setting: str, seconds: float) -> dict[str, list[float]]:
    """Run `measure` in a new process with the variables of a setting."""
    environ = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    command = [sys.executable, __file__, "--child", "--seconds", str(seconds)]
    done = subprocess.run(
        command, env=environ | SETTINGS[setting], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def ratios(rounds: list[dict], setting: str) -> dict[str, float]:
    """Return the median ratio of each operator's mean time to that of the default."""
    names = rounds[0]["default"]
    return {
        name: statistics.median(
            each[setting][name][0] / each["default"][name][0] for each in rounds
        )
        for name in names
    }


def show(busy: int, rounds: list[dict]) -> None:
    names = list(rounds[0]["default"])
    print(f"\nbeside {busy} busy processes: mean time of one call, against the default")
    print(f"{'':24} {'all':>6} " + " ".join(f"{name:>20}" for name in names))
    for setting in rounds[0]:
        found = ratios(rounds, setting)
        together = math.exp(statistics.fmean(map(math.log, found.values())))
        cells = []
        for name, value in found.items():
            mean, _, last = (
                statistics.median(each[setting][name][i] for each in rounds) for i in range(3)
            )
            cells.append(f"{value:5.2f} {mean * 1e6:7.0f} {last * 1e6:6.0f}")
        print(f"{setting:24} {together:6.2f} " + " ".join(f"{cell:>20}" for cell in cells))
    print("(in each cell: the ratio; the mean and the 99th percentile in microseconds)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busy", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.25, help="for each operator")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.seconds)))
        return
    report: dict[str, Any] = {"cores": os.cpu_count(), "machine": platform.machine()}
    report |= {"settings": list(SETTINGS), "busy": {}}
    for busy in options.busy:
        rounds: list[dict] = []
        with busy_processes(busy):
            for number in range(options.rounds):
                order = random.Random(number).sample(list(SETTINGS), len(SETTINGS))
                found = {setting: measure_apart(setting, options.seconds) for setting in order}
                rounds.append({setting: found[setting] for setting in SETTINGS})
        report["busy"][str(busy)] = rounds
        show(busy, rounds)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
