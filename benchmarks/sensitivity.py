"""Measure which systematic errors a verification finds, by network.

For each network and precision it verifies a clean preparation, and then preparations whose backward is too
large by a fraction at one convolution, each in mode train. It prints a table by network, and writes every
verification to `benchmarks/results/sensitivity.json`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from zoo_networks import NETWORKS

from prepare.core.model.deep_copy import deep_copy
from prepare.core.utils.environment import environment
from prepare.pipeline import Pipeline
from prepare.verify import Verification, verify

FRACTIONS = {"float32": (0.01, 0.02, 0.1), "bfloat16": (0.003, 0.01, 0.1)}
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


def measure(name: str, precision: str, *, modules: int, seconds: float) -> dict[str, Any]:
    """Verify one network without and with planted errors, at convolutions spread over its depth."""
    network = NETWORKS[name]
    torch.manual_seed(0)
    reference = network.build().train()
    steps: dict[str, Any] = {f"conv{network.rank}d_memory_format": {}, "repair_layout": {}}
    steps |= {"half": {"dtype": "bfloat16"}} if precision == "bfloat16" else {}
    pipeline = Pipeline.from_config({**steps, "input_format": {}})
    model = pipeline.apply(deep_copy(reference), known_issues="ignore")

    def verified() -> Verification:
        return verify(
            reference, model, network.batch(), pipeline=pipeline, mode="train", seconds=seconds
        )

    clean = verified()
    found: dict[str, dict[str, str]] = {}
    convolutions = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Conv3d)]
    for place in convolutions[:: max(1, len(convolutions) // modules)][:modules]:
        for fraction in FRACTIONS[precision]:
            undo = plant(model.get_submodule(place), fraction)
            found.setdefault(place, {})[str(fraction)] = verified().status
            undo()
    return {
        "network": name,
        "precision": precision,
        "clean": clean.status,
        "reason": clean.reason,
        "outputs": clean.sensitivity("outputs"),
        "gradients": clean.sensitivity("gradients"),
        "planted": found,
    }


def main() -> None:
    """Parse the arguments, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="networks; all by default")
    parser.add_argument("--precision", nargs="*", default=list(FRACTIONS), choices=FRACTIONS)
    parser.add_argument("--modules", type=int, default=3, help="places of planted errors")
    parser.add_argument("--seconds", type=float, default=300.0, help="the limit of a verification")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    rows = []
    for name in args.only or NETWORKS:
        for precision in args.precision:
            begun = time.monotonic()
            row = measure(name, precision, modules=args.modules, seconds=args.seconds)
            rows.append(row | {"seconds": round(time.monotonic() - begun, 1)})
            print(json.dumps(rows[-1]), flush=True)
            args.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
