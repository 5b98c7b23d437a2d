"""Measure time and peak memory of loading weights into a prepared model, against separate torch calls.

    python benchmarks/load.py [--gigabytes 1.3] [--channels 1024] [--repeats 7] [--threads 2] [--json FILE]

Each variant runs in a new process, interleaved, in a new random order in every repeat. The file is
float32 and in the page cache; the target is bfloat16 and channels-last on the CPU. The figures are
medians, and ratios to the first variant, which runs twice (A/A). Memory is the peak above the memory of
the process before the load, including the mapped part of the file.
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import convert_conv2d_weight_memory_format

from prepare.checkpoint import load, save
from prepare.pipeline import Pipeline

STEPS = {
    "device": {"device": "cpu"},
    "half": {"dtype": "bfloat16", "keep": []},
    "conv2d_memory_format": {},
}


_BUFFER = bytearray(2**20)


def build(gigabytes: float, channels: int) -> nn.Module:
    """Return 3x3 convolutions with so many channels and gigabytes of float32 weights."""
    count = max(1, round(gigabytes * 1e9 / (channels * channels * 9 * 4)))
    return nn.Sequential(*(nn.Conv2d(channels, channels, 3) for _ in range(count)))


def by_torch(path: Path, make: Callable[[], nn.Module]) -> nn.Module:
    """Load in the usual way."""
    from safetensors.torch import load_file

    model = make()
    model.load_state_dict(load_file(path))
    return convert_conv2d_weight_memory_format(model.to(torch.bfloat16), torch.channels_last)


def by_torch_on_meta(path: Path, make: Callable[[], nn.Module]) -> nn.Module:
    """Load as torch's documentation advises for large models without non-persistent buffers."""
    from safetensors.torch import load_file

    with torch.device("meta"):
        model = make()
    model.load_state_dict(load_file(path), assign=True)
    return convert_conv2d_weight_memory_format(model.to(torch.bfloat16), torch.channels_last)


def by_prepare(path: Path, make: Callable[[], nn.Module], *, check: str) -> nn.Module:
    return load(path, make, pipeline=Pipeline.from_config(STEPS), check=check).model


VARIANTS: dict[str, Callable[[Path, Callable[[], nn.Module]], nn.Module]] = {
    "build, load_state_dict, cast, convert": by_torch,
    "build, load_state_dict, cast, convert (again)": by_torch,
    "build on meta, load_state_dict(assign=True), cast, convert": by_torch_on_meta,
    "checkpoint.load(check='never')": partial(by_prepare, check="never"),
    "checkpoint.load, every sha256 compared": partial(by_prepare, check="always"),
}


def peak_memory() -> int:
    """Return the peak memory of this process since its last reset, in bytes (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def measure(name: str, path: Path, gigabytes: float, channels: int) -> dict[str, float]:
    """Run one variant in this process; return its seconds and its peak memory in bytes."""
    import safetensors.torch  # noqa: F401  the import is not part of the timing

    # The host of a virtual machine reclaims free memory, and providing it again costs more than all that
    # is measured here; the first variant would pay for it.
    torch.empty(int(gigabytes * 2.1e9), dtype=torch.uint8).fill_(1)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory()
    start = time.perf_counter()
    model = VARIANTS[name](path, partial(build, gigabytes, channels))
    seconds = time.perf_counter() - start
    weight = model[0].weight
    assert weight.dtype is torch.bfloat16
    assert weight.stride() == (9 * channels, 1, 3 * channels, channels)
    total = sum(float(p.detach().view(-1)[:1000].sum()) for p in model.parameters() if p.dim() == 1)
    return {"seconds": seconds, "peak_bytes": peak_memory() - before, "sum": total}


def read(path: Path) -> None:
    """Read the file once, so that it is in the page cache for every variant."""
    with path.open("rb", buffering=0) as file:
        while file.readinto(_BUFFER):
            pass


def compare(options: argparse.Namespace, path: Path) -> dict[str, dict]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for repeat in range(options.repeats):
        for name in random.Random(repeat).sample(list(VARIANTS), len(VARIANTS)):
            read(path)
            words = [f"--gigabytes={options.gigabytes}", f"--channels={options.channels}"]
            words += [f"--threads={options.threads}", f"--file={path}", f"--variant={name}"]
            command = [sys.executable, __file__, *words]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[name].append(json.loads(done.stdout))
        print(f"  round {repeat + 1} of {options.repeats}", flush=True)
    assert len({one["sum"] for ones in found.values() for one in ones}) == 1, "not the same values"
    return {
        name: {
            "seconds": statistics.median(one["seconds"] for one in ones),
            "peak_bytes": int(statistics.median(one["peak_bytes"] for one in ones)),
            "all_seconds": [round(one["seconds"], 3) for one in ones],
            "all_peak_bytes": [one["peak_bytes"] for one in ones],
        }
        for name, ones in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.3)
    parser.add_argument("--channels", type=int, default=1024, help="of every convolution")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.variant:
        size = (options.gigabytes, options.channels)
        print(json.dumps(measure(options.variant, options.file, *size)))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = build(options.gigabytes, options.channels)
        held = sum(p.nbytes for p in model.parameters())
        save(model, path := Path(folder) / "weights.safetensors")
        del model
        found = compare(options, path)
    base = found[next(iter(VARIANTS))]
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {options.threads} threads; "
        f"{held / 1e9:.2f} GB of float32 to bfloat16, channels_last ({held / 2e9:.2f} GB); medians"
    )
    print(f"{'':60} seconds  ratio  least   peak GB  ratio")
    least = min(base["all_seconds"])
    for name, one in found.items():
        seconds, peak = one["seconds"], one["peak_bytes"]
        print(
            f"{name:60} {seconds:7.2f}  {seconds / base['seconds']:5.2f}  "
            f"{min(one['all_seconds']) / least:5.2f}   {peak / 1e9:7.2f}  {peak / base['peak_bytes']:5.2f}"
        )
    if options.json:
        report = {"torch": torch.__version__, "threads": options.threads, "bytes": held}
        report |= {"channels": options.channels, "variants": found}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
