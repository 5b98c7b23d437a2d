"""Compare the ways in which keep_layout gets its calls: breaks, copied bytes and CPU time.

    python benchmarks/keep_choice.py [--only cosmos] [--rounds 30] [--threads 2] [--busy 2] [--json FILE]

Whole video autoencoders of diffusers, small, with random weights (`video_networks.py`), in channels-last with
`repair_layout`: without `keep_layout`, with all calls (`Pipeline.apply(model)`), and with those that
`Pipeline.apply(model, example=batch)` chooses; beside them the calls that a run of the command line writes
into its recipe. The variants run in every round, in random order; a ratio is the median of those to the
contiguous network in the same round, of the CPU time of all threads, with an interval of 95 %. The contiguous
network runs twice (A/A). With one thread torch runs the 3 x 1 x 1 convolutions of Cosmos in its reference
kernel.
"""

import argparse
import copy
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import busy  # first: it sets how torch's threads wait
import torch
from torch import Tensor, nn
from video_networks import VIDEO_NETWORKS

from prepare.core.utils.environment import environment
from prepare.pipeline import Pipeline
from prepare.stages.bench.statistics import ratio
from prepare.stages.flow import predict
from prepare.stages.verify import verify

FILE = Path(__file__).parent / "results" / "keep_choice.json"
NAMES = ("diffusers mochi", "diffusers cosmos", "diffusers ltx video")
FORMATS: dict[str, Any] = {
    "conv2d_memory_format": {},
    "conv3d_memory_format": {},
    "input_format": {},
}
RUN = Path(__file__).parents[1] / "run.py"


class Autoencoder(nn.Module):
    """An autoencoder of VIDEO_NETWORKS whose forward takes a clip and returns a tensor."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.autoencoder = VIDEO_NETWORKS[name].build().eval()

    def forward(self, clip: Tensor) -> Tensor:
        return self.autoencoder(clip, return_dict=False)[0]


def of_command_line(name: str, shape: tuple[int, ...]) -> list[str]:
    """Return the calls that a run of the command line writes into its recipe."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "model._target_=keep_choice.Autoencoder",
            f"+model.name={name!r}",
            "memfmt=by_rank",
        ]
        words += [f"input.shape={list(shape)}".replace(" ", ""), "bench=none", "verify=none"]
        words += ["+steps.repair_layout={}", "+steps.keep_layout={}", f"hydra.run.dir={folder}"]
        environ = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        command = [sys.executable, RUN, *words]
        subprocess.run(command, cwd=Path(__file__).parent, env=environ, check=True)
        return Pipeline.load(Path(folder, "recipe.yaml")).to_config()["keep_layout"]["calls"]


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Return the figures of one network, and of its variants."""
    original = Autoencoder(name)
    batch = torch.randn(VIDEO_NETWORKS[name].shape)
    recipes = {
        "formats": FORMATS,
        "repaired": (repaired := FORMATS | {"repair_layout": {}}),
        "all calls": repaired | {"keep_layout": {}},
        "apply(example)": repaired | {"keep_layout": {}},
    }
    variants: dict[str, tuple[nn.Module, Tensor]] = {"contiguous": (original, batch)}
    found: dict[str, Any] = {"command line": {"calls": of_command_line(name, tuple(batch.shape))}}
    for variant, steps in recipes.items():
        pipeline, model = Pipeline.from_config(steps), copy.deepcopy(original)
        example = batch if variant == "apply(example)" else None
        pipeline.apply(model, strict=False, known_issues="ignore", example=example)
        flow = predict(model, pipeline.format(batch))
        variants[variant] = model, pipeline.format(batch)
        found[variant] = {
            "calls": (pipeline.to_config().get("keep_layout") or {}).get("calls", []),
            **{key: flow.summary[key] for key in ("breaks", "copied_bytes")},
            "verified": verify(original, model, batch, pipeline=pipeline, gradients=False).status,
        }
    variants["A/A"] = variants["contiguous"]
    seconds = timed(variants, rounds)
    for variant in list(variants)[1:]:
        ratio_of = ratio(seconds[variant], seconds["contiguous"], 0.95)
        found.setdefault(variant, {}).update(ratio=ratio_of.value, interval=ratio_of.interval)
    return found | {"seconds": {key: [round(s, 5) for s in all_] for key, all_ in seconds.items()}}


def timed(variants: dict[str, tuple[nn.Module, Tensor]], rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each variant in each round."""
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    with torch.no_grad():
        for number in range(rounds + 1):
            for variant in random.Random(number).sample(list(variants), len(variants)):
                model, batch = variants[variant]
                start = time.process_time()
                model(batch)
                if number:  # the first round warms up
                    seconds[variant].append(time.process_time() - start)
    return seconds


def main() -> None:
    """Measure the chosen networks, print each and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="", help="a part of the names of networks")
    parser.add_argument("--json", type=Path, default=FILE)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    report = json.loads(options.json.read_text()) if options.json.exists() else {"networks": {}}
    with busy.busy_processes(options.busy):
        for name in NAMES:
            if options.only in name:
                report["networks"][name] = found = measure(name, options.rounds)
                print(
                    name,
                    *(f"{key}: {row}" for key, row in found.items() if key != "seconds"),
                    sep="\n  ",
                )
                environment_now = {"busy": options.busy, "environment": environment()}
                options.json.write_text(json.dumps(report | environment_now, indent=1) + "\n")


if __name__ == "__main__":
    main()
