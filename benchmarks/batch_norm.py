"""Time batch norms in training on a CPU, and compare their errors: contiguous, channels-last, repaired.

    python benchmarks/batch_norm.py [--busy 2] [--seconds 20] [--json FILE]

Forward and backward in float32, in every round in random order, by the ratios of times within rounds to the
contiguous kernel, which runs twice (A/A). The errors are those of the gradient of the weight against float64,
relative to its largest number. With `--busy N`, N processes keep cores busy beside it.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import busy  # first: it sets how torch's threads wait
import torch
from torch import Tensor, nn

from prepare.core.utils.environment import environment
from prepare.pipeline import Pipeline
from prepare.stages.bench import compare

SHAPES = [
    (2, 64, 128, 128),
    (8, 64, 56, 56),
    (8, 256, 28, 28),
    (32, 64, 32, 32),
    (2, 32, 32, 64, 64),
]
# In deviations of the numbers.
MEANS = [0.0, 1.0, 10.0]
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def variants_of(shape: tuple[int, ...]) -> dict[str, nn.Module]:
    """Return a batch norm for this shape: twice torch's, and the repaired one."""
    torch.manual_seed(0)
    norm = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)](shape[1])
    repaired = copy.deepcopy(norm)
    Pipeline.from_config({"repair_layout": {"force": True}}).apply(repaired, known_issues="ignore")
    return {"contiguous": norm, "channels-last": copy.deepcopy(norm), "repaired": repaired}


def last(x: Tensor) -> Tensor:
    """Return `x` in the channels-last format of its rank."""
    return x.to(memory_format=FORMATS[x.dim()])


def weight_gradient(norm: nn.Module, x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the weight in float64."""
    norm = copy.deepcopy(norm).to(x.dtype).train()
    norm(x).backward(grad)
    return norm.weight.grad.double()


def measure(shape: tuple[int, ...], mean: float, seconds: float) -> dict[str, Any]:
    """Return the errors and the ratios of the three variants."""
    variants = variants_of(shape)
    x, grad = torch.randn(shape) + mean, torch.randn(shape)
    exact = weight_gradient(variants["contiguous"], x.double(), grad.double())
    formats = {"channels-last": last, "repaired": last}
    errors = {}
    for name, norm in variants.items():
        to = formats.get(name, Tensor.contiguous)
        error = (weight_gradient(norm, to(x), to(grad)) - exact).abs().max() / exact.abs().max()
        errors[name] = error.item()
    timed = compare(variants, x, train=True, budget=seconds, format=formats)
    found = {
        row.name: {"seconds": row.seconds, "ratio": row.ratio, "interval": row.ratio_interval}
        for row in timed.rows
    }
    for name, error in errors.items():
        found[name]["error"] = error
    if timed.aa is not None:
        found["A/A"] = {"ratio": timed.aa.ratio, "interval": timed.aa.interval}
    return found


def main() -> None:
    """Measure every shape and mean, print each and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {}
    with busy.busy_processes(options.busy):
        for shape in SHAPES:
            for mean in MEANS:
                name = f"{' x '.join(map(str, shape))}, mean {mean:g}"
                found[name] = measure(shape, mean, options.seconds)
                print(f"{name}: {json.dumps(found[name])}", flush=True)
    if options.json:
        report = {"busy": options.busy, "norms": found, "environment": environment()}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
