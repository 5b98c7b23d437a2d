"""Time the start of the command line, against an empty Hydra application.

    python benchmarks/startup.py [--repeats 21] [--json results.json]

Every command runs in a new process, started from an empty folder. The commands run interleaved, in a
new random order in every repeat; the first repeat is not counted. Prints medians, quartiles and ratios
of medians of the wall time and of the CPU time, which a busy machine changes less. The `--help` of the
empty application runs twice: its ratio to itself is the noise.
"""

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

RUN = Path(__file__).resolve().parent.parent / "run.py"
# The first example of Hydra's documentation: one configuration file, one decorated function.
EMPTY = """
import hydra

@hydra.main(config_path="conf", config_name="config"{version_base})
def main(config):
    pass

if __name__ == "__main__":
    main()
"""
BASE = "an empty Hydra application --help"
TARGET = 1.3


def write_empty(folder: Path) -> Path:
    """Write the empty application to a folder; version_base does not exist after Hydra 1.3."""
    old = metadata.version("hydra-core").startswith("1.3")
    (folder / "conf").mkdir()
    (folder / "conf" / "config.yaml").write_text("key: value\n")
    (folder / "app.py").write_text(EMPTY.format(version_base=', version_base="1.3"' if old else ""))
    return folder / "app.py"


def commands(empty: Path) -> dict[str, tuple[list[str], int]]:
    """Return each command by its name, with its expected exit code."""
    python, run = sys.executable, str(RUN)
    return {
        BASE: ([python, str(empty), "--help"], 0),
        f"{BASE} (again)": ([python, str(empty), "--help"], 0),
        "an empty Hydra application, run": ([python, str(empty), "hydra.output_subdir=null"], 0),
        "python -c 'pass'": ([python, "-c", "pass"], 0),
        "run.py --help": ([python, run, "--help"], 0),
        "run.py steps": ([python, run, "steps"], 0),
        "run.py --version": ([python, run, "--version"], 0),
        "a misspelt option": ([python, run, "model=unet3d", "memfmt=chanels_last"], 2),
        "a misspelt key": ([python, run, "modle=unet3d"], 2),
        "a step's wrong option": (
            [python, run, "model=unet3d", "precision=half", "steps.half.dtype=float15"],
            2,
        ),
        "run.py model=unet3d --cfg job": ([python, run, "model=unet3d", "--cfg", "job"], 0),
    }


def timed(command: list[str], code: int, folder: Path) -> tuple[float, float]:
    """Return the wall time and the CPU time of a command, in seconds."""
    start, before = time.perf_counter(), processor()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode != code:
        sys.exit(f"{' '.join(command)} gave {done.returncode}, not {code}:\n{done.stderr}")
    return seconds, processor() - before


def processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(repeats: int) -> dict[str, list[tuple[float, float]]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        every = commands(write_empty(folder))
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in every}
        for repeat in range(repeats + 1):
            for name in random.sample(list(every), len(every)):
                seconds = timed(*every[name], folder)
                if repeat:
                    found[name].append(seconds)
    return found


def report(found: dict[str, list[tuple[float, float]]]) -> None:
    base = [statistics.median(side) for side in zip(*found[BASE], strict=True)]
    print(
        f"{'command':<42} {'wall ms':>7}  {'quartiles':>12}  {'ratio':>5}  {'cpu ms':>6}  {'ratio':>5}"
    )
    for name, pairs in found.items():
        wall, cpu = zip(*pairs, strict=True)
        low, middle, high = (1000 * q for q in statistics.quantiles(wall, n=4))
        ratios = [statistics.median(wall) / base[0], statistics.median(cpu) / base[1]]
        print(
            f"{name:<42} {middle:7.0f}  {f'{low:.0f} to {high:.0f}':>12}  {ratios[0]:5.2f}"
            f"  {1000 * statistics.median(cpu):6.0f}  {ratios[1]:5.2f}"
        )
    ours = statistics.median(wall for wall, _ in found["run.py --help"]) / base[0]
    print(f"\n--help: {ours:.2f} times an empty Hydra application's; the target is {TARGET}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--json", type=Path, help="also write every time here")
    asked = parser.parse_args()
    packages = {name: metadata.version(name) for name in ("hydra-core", "omegaconf")}
    where = {"python": platform.python_version(), **packages, "cores": os.cpu_count()}
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    if hasattr(os, "getloadavg"):
        print(f"load at the start: {os.getloadavg()[0]:.1f}\n")
    found = measure(asked.repeats)
    report(found)
    if asked.json:
        asked.json.write_text(json.dumps({"environment": where, "seconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
