"""Train a 3-d U-Net on synthetic volumes, prepared and unprepared, and compare the losses.

    python benchmarks/segmentation.py [--steps 200] [--threads 2]

Each volume contains a few balls that are brighter than the noise; the network segments them. Both
networks start with the same weights, get the same batches, and take their steps alternately. Writes
`results/segmentation.json`, and the curves as `docs/segmentation.svg` where matplotlib is installed.
"""

import argparse
import copy
import json
import os
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from prepare.core.utils.environment import environment
from prepare.models.unet import UNet3d
from prepare.pipeline import Pipeline

ROOT = Path(__file__).parent.parent
SIDE, BATCH, HELD_OUT = 32, 2, 8
STEPS = {"conv3d_memory_format": {}, "repair_layout": {}, "input_format": {}}


def volumes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy volumes (count, 1, 32, 32, 32), and the masks of the balls, of the same shape."""
    numbers = torch.Generator().manual_seed(seed)
    grid = torch.stack(torch.meshgrid(*[torch.arange(float(SIDE))] * 3, indexing="ij"))
    masks = torch.zeros(count, 1, SIDE, SIDE, SIDE)
    for mask in masks:
        for _ in range(3):
            centre = torch.rand(3, 1, 1, 1, generator=numbers) * SIDE
            radius = 3 + 4 * torch.rand(1, generator=numbers)
            mask[0][((grid - centre) ** 2).sum(0) < radius**2] = 1
    return masks + torch.randn(masks.shape, generator=numbers), masks


def dice(model: nn.Module, pipeline: Pipeline) -> float:
    """Return the Dice score on held-out volumes: 1 is perfect."""
    images, masks = volumes(HELD_OUT, seed=10**6)
    with torch.no_grad():
        found = model.eval()(pipeline.format(images)) > 0
    return float(2 * (found * masks).sum() / (found.sum() + masks.sum()))


def train(steps: int) -> dict:
    """Train both networks; return losses, Dice scores and seconds per step."""
    torch.manual_seed(0)
    model = UNet3d(in_channels=1, out_channels=1, width=8, depth=3, norm="instance").train()
    pipelines = {"unprepared": Pipeline.from_config({}), "prepared": Pipeline.from_config(STEPS)}
    models, optimizers = {}, {}
    for name, pipeline in pipelines.items():
        models[name] = pipeline.apply(copy.deepcopy(model))
        optimizers[name] = torch.optim.Adam(models[name].parameters(), 1e-3)
    losses, seconds = {name: [] for name in models}, {name: [] for name in models}
    for step in range(steps):
        images, masks = volumes(BATCH, seed=step)
        for name, one in models.items():
            start = time.perf_counter()
            optimizers[name].zero_grad(set_to_none=True)
            loss = binary_cross_entropy_with_logits(one(pipelines[name].format(images)), masks)
            loss.backward()
            optimizers[name].step()
            seconds[name].append(time.perf_counter() - start)
            losses[name].append(loss.item())
        if step % 20 == 0 or step == steps - 1:
            said = ", ".join(f"{name} {found[-1]:.4f}" for name, found in losses.items())
            print(f"step {step + 1} of {steps}: loss {said}", flush=True)
    return {
        "losses": losses,
        "dice": {name: dice(one, pipelines[name]) for name, one in models.items()},
        "seconds": {name: statistics.median(found) for name, found in seconds.items()},
    }


def draw(found: dict, path: Path) -> None:
    """Draw the loss curves for the docs."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "prepare"  # the same picture for the same numbers
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    styles = {"unprepared": ("#888888", "-", 3.5), "prepared": ("#00897b", "--", 1.5)}
    for name, losses in found["losses"].items():
        colour, line, width = styles[name]
        axes.plot(
            range(1, len(losses) + 1), losses, line, color=colour, linewidth=width, label=name
        )
    axes.set(xlabel="training step", ylabel="loss", yscale="log")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = train(options.steps)
    found |= {"steps": options.steps, "environment": environment()}
    ratio = found["seconds"]["prepared"] / found["seconds"]["unprepared"]
    print(f"dice {found['dice']}; a prepared step takes {ratio:.2f} of an unprepared one")
    (ROOT / "benchmarks/results/segmentation.json").write_text(json.dumps(found, indent=1) + "\n")
    try:
        draw(found, ROOT / "docs/segmentation.svg")
    except ImportError:
        print("matplotlib is not installed: no picture")


if __name__ == "__main__":
    main()
