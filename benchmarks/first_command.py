"""Time README's first command from its start to what it prints, quiet and beside busy processes.

    python benchmarks/first_command.py [--busy 0 2] [--repeats 5] [--json FILE]

Each repeat is a new process in a folder of its own, and the loads take turns. The first answer is the line
that says what was prepared, counted from the moment when torch has been loaded.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from busy import busy_processes

RUN = Path(__file__).resolve().parent.parent / "run.py"
WORDS = ("model=unet3d", "memfmt=channels_last_3d")
# What is timed, by the word that opens its line.
COLUMNS = ("first answer", "verification", "whole command")
PREPARED, VERIFYING, VERIFIED = "UNet3d is prepared", "verifying", "verified"


def torch_seconds() -> float:
    """Return the time that a new process takes to load torch."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - start


def run_once(folder: Path) -> dict[str, float]:
    """Return the seconds until each line of a run, by what is timed."""
    torch_loaded = torch_seconds()
    start, at = time.perf_counter(), {}
    command = [sys.executable, "-u", str(RUN), *WORDS, "hydra.run.dir=run"]
    with subprocess.Popen(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        for line in process.stdout:
            for word in (PREPARED, VERIFYING, VERIFIED):
                if line.strip().startswith(word):
                    at.setdefault(word, time.perf_counter() - start)
    whole = time.perf_counter() - start
    if process.returncode:
        sys.exit(f"{' '.join(command)} gave {process.returncode}")
    seconds = (at[PREPARED] - torch_loaded, at[VERIFIED] - at[VERIFYING], whole)
    return dict(zip(COLUMNS, seconds, strict=True))


def measure(loads: list[int], repeats: int) -> dict[str, list[dict[str, float]]]:
    """Return every repeat beside each number of busy processes; the first one warms up."""
    found: dict[str, list[dict[str, float]]] = {str(load): [] for load in loads}
    for repeat in range(repeats + 1):
        for load in loads:
            with tempfile.TemporaryDirectory() as name, busy_processes(load):
                seconds = run_once(Path(name))
            if repeat:
                found[str(load)].append(seconds)
                print(load, {name: round(value, 2) for name, value in seconds.items()}, flush=True)
    return found


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in COLUMNS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2], metavar="N")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write every time here")
    options = parser.parse_args()
    found = {"cores": os.cpu_count(), "busy": measure(options.busy, options.repeats)}
    for load, runs in found["busy"].items():
        print(f"beside {load} busy processes, medians: {medians(runs)}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
