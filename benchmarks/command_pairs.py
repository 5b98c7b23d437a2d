"""Time commands of this tree in pairs with those of another one: processor time of all their processes.

    python benchmarks/command_pairs.py OTHER_TREE [help import job sweep] [--rounds 7]

Each round runs every command in this tree, in the other, and in the other again, in random order. It prints
the median and the range of the ratios this / other, and of other / other, which is the noise.
"""

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent.parent
FORMATS = "memfmt=channels_last,contiguous,channels_last,contiguous"
OFF = ["bench=none", "verify=none"]
COMMANDS = {
    "help": ["run.py", "--help"],
    "import": ["-c", "import prepare"],
    "job": ["run.py", "model=unet2d", "memfmt=channels_last", "bench=none"],
    "sweep": ["run.py", "-m", "model=unet2d", FORMATS, "precision=float32,bfloat16", *OFF],
}


def seconds(tree: Path, command: list[str]) -> float:
    """Return the processor time of a command and its children, with one thread."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        kind = "sweep" if "-m" in command else "run"
        folders = [f"hydra.{kind}.dir={folder}/out"] if "bench=none" in command else []
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = [sys.executable, *command, *folders]
        subprocess.run(done, cwd=tree, env=environment, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Time the commands, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("names", nargs="*", default=[*COMMANDS], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    trees = {"this": HERE, "other": options.other.resolve()}
    trees["again"] = trees["other"]
    for name in options.names:
        for tree in {*trees.values()}:
            seconds(tree, COMMANDS[name])
        rows = [
            {key: seconds(trees[key], COMMANDS[name]) for key in random.sample([*trees], 3)}
            for _ in range(options.rounds)
        ]
        for key, kind in (("this", "this / other"), ("again", "other / other")):
            ratios = [row[key] / row["other"] for row in rows]
            middle = statistics.median(ratios)
            print(
                f"{name}: {kind} {middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f})", flush=True
            )


if __name__ == "__main__":
    main()
