"""Measure which systematic errors a verification finds, by kind of network.

For each network and precision it verifies a clean preparation on a small input in mode train, and then
preparations whose backward is too large by a fraction at one convolution: one at least, and more until the
time of the network is over. It writes every result to `benchmarks/results/sensitivity.json`, from which
`tables.py` makes a table. Networks that are in that file already are left out, unless `--only` names them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from zoo_networks import NETWORKS, Network

from prepare.core.model.deep_copy import deep_copy
from prepare.core.utils.environment import environment
from prepare.pipeline import Pipeline
from prepare.stages.verify import Verification, verify

FRACTIONS = {"float32": (0.003, 0.01), "bfloat16": (0.03, 0.1)}
# Networks that cannot take half of their input.
WHOLE = {
    "transformers vit", "diffusers unet2d condition", "monai vnet 3-d", "monai mednext 3-d",
    "monai densenet121 3-d", "monai resnet18 3-d", "monai basicunet 3-d",
}  # fmt: skip
KINKS = {"ReLU", "ReLU6", "LeakyReLU", "PReLU", "Hardswish", "MaxPool2d", "MaxPool3d"}
OUT = Path(__file__).parent / "results" / "sensitivity.json"


class _Scaled(torch.autograd.Function):
    """Identity with a gradient that is too large by a fraction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def plant(module: nn.Module, fraction: float) -> Callable[[], None]:
    """Scale the gradient of the module's output by 1 + fraction; return a function that undoes it."""

    def scaled(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return _Scaled.apply(output, 1 + fraction)

    return module.register_forward_hook(scaled).remove


def small(name: str) -> Network:
    """Return the network of the zoo with an input of half its size."""
    network = NETWORKS[name]
    if name in WHOLE:
        return network
    shape = (*network.shape[:2], *(size // 2 for size in network.shape[2:]))
    return replace(network, shape=shape)


def measure(name: str, precision: str, *, modules: int, limit: float) -> dict[str, Any]:
    """Verify one network without and with planted errors, at convolutions spread over its depth."""
    begun, network = time.monotonic(), small(name)
    torch.manual_seed(0)
    reference = network.build().train()
    steps: dict[str, Any] = {f"conv{network.rank}d_memory_format": {}, "repair_layout": {}}
    steps |= {"half": {"dtype": "bfloat16"}} if precision == "bfloat16" else {}
    pipeline = Pipeline.from_config({**steps, "input_format": {}})
    model = pipeline.apply(deep_copy(reference), known_issues="ignore")

    def verified() -> Verification:
        return verify(
            reference, model, network.batch(), pipeline=pipeline, mode="train", seconds=600.0
        )

    clean = verified()
    found: list[dict[str, Any]] = []
    convolutions = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Conv3d)]
    for place in convolutions[len(convolutions) // 3 :: max(1, len(convolutions) // modules)]:
        for fraction in FRACTIONS[precision]:
            if not found or time.monotonic() - begun < limit:
                undo = plant(model.get_submodule(place), fraction)
                result = verified()
                found.append(
                    {
                        "module": place,
                        "fraction": fraction,
                        "status": result.status,
                        "blamed": result.culprit,
                    }
                )
                undo()
    used = {type(module).__name__ for module in reference.modules()}
    return {
        "network": name,
        "shape": network.shape,
        "precision": precision,
        "kinks": sorted(used & KINKS),
        "clean": clean.status,
        "reason": clean.reason,
        "whole": {c.what: c.sensitivity for c in clean.checks if c.sensitivity is not None},
        "outputs": clean.sensitivity("outputs"),
        "gradients": clean.sensitivity("gradients"),
        "planted": found,
    }


def main() -> None:
    """Parse the arguments, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="networks; by default all not in --out")
    parser.add_argument("--precision", nargs="*", default=["float32"], choices=FRACTIONS)
    parser.add_argument("--modules", type=int, default=1, help="places of planted errors")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for each network")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    by_case = {(row["precision"], row["network"]): row for row in rows}
    for case in [
        (precision, name) for precision in args.precision for name in args.only or NETWORKS
    ]:
        if case in by_case and not args.only:
            continue
        begun, (precision, name) = time.monotonic(), case
        row = measure(name, precision, modules=args.modules, limit=args.limit)
        took = round(time.monotonic() - begun, 1)
        by_case[case] = row | {"seconds": took, "date": environment()["date"][:10]}
        print(json.dumps(by_case[case]), flush=True)
        written = {"environment": environment(), "rows": list(by_case.values())}
        args.out.write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
