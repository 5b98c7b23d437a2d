"""Tune networks whose sign changes with the size for a workload, and time the recipe at sizes held out of it.

    python benchmarks/workload.py [--busy 2] [--budget 15] [--seconds 4] [--json FILE] [NAME ...]

At each size held out: the unprepared model twice (A/A), the format alone, the recipe of the tuning and,
where it says that two are better, that of the nearest size of the workload. Times are CPU seconds, in every
round in random order, and ratios are within rounds. With `--busy N`, N processes keep cores busy beside it.
"""

import argparse
import copy
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import busy  # first: it sets how torch's threads wait
import torch
from torch import nn

from prepare import Pipeline, Workload
from prepare.core.utils.environment import environment
from prepare.models.resnet import ResNet2d
from prepare.models.unet import UNet2d, UNet3d
from prepare.stages.bench import compare
from prepare.stages.tune import Tuning, tune

Shape = tuple[int, ...]
FLAT = {"conv2d_memory_format": {}, "input_format": {}}
DEEP = {"conv3d_memory_format": {}, "input_format": {}}


class Case(NamedTuple):
    """A network, its format alone, the sizes of its workload with their weights, and those held out."""

    build: Callable[[], nn.Module]
    format: dict[str, Any]
    sizes: dict[Shape, float]
    held_out: dict[Shape, float]


def unet2d() -> nn.Module:
    """Return a 2-d U-Net with instance norms."""
    return UNet2d(in_channels=1, out_channels=2, width=16, norm="instance")


def unet3d() -> nn.Module:
    """Return a 3-d U-Net with batch norms."""
    return UNet3d(in_channels=1, out_channels=2, width=8)


def resnet2d() -> nn.Module:
    """Return a residual network with instance norms."""
    return ResNet2d(norm="instance")


def attention() -> nn.Module:
    """Return MONAI's U-Net with attention gates and batch norms."""
    from monai.networks.nets import AttentionUnet

    return AttentionUnet(
        spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2)
    )


def pointwise() -> nn.Module:
    """Return a stack of 1x1 convolutions."""
    layers = [nn.Conv2d(64, 256, 1), nn.ReLU(), nn.Conv2d(256, 64, 1), nn.ReLU()]
    return nn.Sequential(*layers, *map(copy.deepcopy, layers))


CASES: dict[str, Case] = {
    "unet2d": Case(
        unet2d,
        FLAT,
        {(1, 1, 16, 16): 50, (1, 1, 96, 96): 1},
        {(1, 1, 32, 32): 20, (1, 1, 128, 128): 1},
    ),
    "unet3d": Case(
        unet3d,
        DEEP,
        {(1, 1, 32, 32, 32): 2, (2, 1, 32, 32, 32): 1},
        {(1, 1, 16, 16, 16): 4, (3, 1, 32, 32, 32): 1},
    ),
    "resnet2d": Case(
        resnet2d,
        FLAT,
        {(1, 3, 32, 32): 20, (4, 3, 64, 64): 1},
        {(1, 3, 40, 40): 20, (8, 3, 64, 64): 1},
    ),
    "attention": Case(
        attention,
        DEEP,
        {(1, 1, 32, 32, 32): 1, (2, 1, 16, 16, 16): 10},
        {(1, 1, 24, 24, 24): 2, (4, 1, 16, 16, 16): 5},
    ),
    "pointwise": Case(
        pointwise,
        FLAT,
        {(1, 64, 7, 7): 50, (8, 64, 28, 28): 1},
        {(1, 64, 14, 14): 20, (8, 64, 56, 56): 1},
    ),
}


def nearest(shape: Shape, case: Case, tuning: Tuning) -> str:
    """Return the better recipe of the size of the workload whose lengths are nearest, by their ratios."""

    def distance(other: Shape) -> float:
        return sum(abs(math.log(a / b)) for a, b in zip(shape, other, strict=True))

    sizes = dict(zip(case.sizes, tuning.sizes, strict=True))
    name = sizes[min(sizes, key=distance)].name
    return next(each.recipe for each in tuning.better if name in each.sizes)


def measure(case: Case, budget: float, seconds: float) -> dict[str, Any]:
    """Return the tuning, and the ratios at the sizes held out and of all of their calls."""
    torch.manual_seed(0)
    model = case.build().eval()
    workload = Workload(map(torch.randn, case.sizes), weights=case.sizes.values())
    tuning = tune(model, workload, budget=budget, cache=False, _clock=time.process_time)
    steps = {"format": case.format, "chosen": tuning.recipe}
    steps |= {f"two: {each.recipe}": tuning.row(each.recipe).steps for each in tuning.better}
    models, formats = {"unprepared": model}, {}
    for name, recipe in steps.items():
        pipeline = Pipeline.from_config(recipe)
        models[name] = pipeline.apply(copy.deepcopy(model), known_issues="ignore")
        if any(step.phase == "inputs" for step in pipeline.steps.values()):
            formats[name] = pipeline.format
    found = {}
    for shape in case.held_out:
        timed = compare(
            models, torch.randn(shape), budget=seconds, format=formats, _clock=time.process_time
        )
        rows = {row.name: (row.ratio, row.ratio_interval) for row in timed.rows}
        if tuning.better:
            rows["two"] = rows[f"two: {nearest(shape, case, tuning)}"]
        found["x".join(map(str, shape))] = {
            "weight": case.held_out[shape],
            "seconds": timed.row("unprepared").seconds,
            "rounds": timed.repeats,
            "rows": rows,
            "A/A": timed.aa and (timed.aa.ratio, timed.aa.interval),
        }
    spent = [each["weight"] * each["seconds"] for each in found.values()]
    whole = {
        name: sum(t * each["rows"][name][0] for t, each in zip(spent, found.values(), strict=True))
        / sum(spent)
        for name in ("format", "chosen", *(["two"] if tuning.better else []))
    }
    return {
        "winner": tuning.winner,
        "better": [(each.recipe, each.sizes) for each in tuning.better],
        "tuned": {
            row.name: [(each.ratio, each.ratio_interval) for each in row.sizes]
            for row in tuning.rows
            if row.ratio is not None
        },
        "rounds": tuning.rounds,
        "noise": tuning.noise,
        "held_out": found,
        "whole": whole,
    }


def main() -> None:
    """Measure the networks, print each and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--budget", type=float, default=15.0)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {"busy": options.busy, "networks": {}, "environment": environment()}
    with busy.busy_processes(options.busy):
        for name in options.names:
            load = os.getloadavg()[0]
            report["networks"][name] = measure(CASES[name], options.budget, options.seconds)
            report["networks"][name]["load"] = load
            shown = {key: report["networks"][name][key] for key in ("winner", "better", "whole")}
            print(f"{name}: {json.dumps(shown)}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
