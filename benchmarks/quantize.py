"""Measure a stack of Linear modules with weights in 8 bits against float32, for a few numbers of rows.

    python benchmarks/quantize.py [--width 1024] [--layers 8] [--rows 1 64] [--seconds 20] [--json FILE]

Prints, for each number of rows of the input, the time ratio to float32 with its interval, the error of the
outputs, and the bytes of the weights. Rows of several variants are timed in turn; A/A shows the noise.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prepare.audit import audit
from prepare.pipeline import Pipeline
from prepare.stages.bench import compare

INT8, DYNAMIC = {"quantize": {}}, {"quantize": {"scheme": "int8_dynamic"}}
BFLOAT16 = {"half": {"dtype": "bfloat16"}, "input_format": {"attach": True}}
COMPILED: dict[str, Any] = {"compile": {}}
RECIPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": BFLOAT16,
    "int8_weight_only": INT8,
    "int8_dynamic": DYNAMIC,
    "compile": COMPILED,
    "bfloat16, compile": BFLOAT16 | COMPILED,
    "int8_weight_only, compile": INT8 | COMPILED,
    "int8_dynamic, compile": DYNAMIC | COMPILED,
}


def stack(width: int, layers: int) -> nn.Module:
    """Return Linear modules of so many columns, with an activation between them."""
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*parts).eval()


def measure(width: int, layers: int, rows: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Return the ratio, its interval, the error and the bytes of each recipe."""
    model, batch = stack(width, layers), torch.randn(rows, width)
    models = {
        name: Pipeline.from_config(steps).apply(copy.deepcopy(model))
        for name, steps in RECIPES.items()
    }
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(batch.double())
        errors = {
            name: float((each(batch).double() - exact).abs().max() / exact.abs().max())
            for name, each in models.items()
        }
    timed = compare(models, batch, budget=seconds)
    return {
        row.name: {
            "ratio": row.ratio,
            "interval": row.ratio_interval,
            "error": errors[row.name],
            "bytes": audit(models[row.name]).summary["bytes_after"],
        }
        for row in timed.rows
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {}
    for rows in options.rows:
        found[rows] = measure(options.width, options.layers, rows, options.seconds)
        print(f"{rows} rows: ratio to float32, 95 % interval, error of the outputs, MiB of weights")
        for name, row in found[rows].items():
            low, high = row["interval"] or (float("nan"),) * 2
            ratio = float("nan") if row["ratio"] is None else row["ratio"]
            numbers = f"{ratio:.2f}  {low:.2f} to {high:.2f}  {row['error']:.1e}"
            print(f"  {name:28} {numbers}  {row['bytes'] / 2**20:.1f}", flush=True)
    if options.json:
        run = {"width": options.width, "layers": options.layers, "torch": torch.__version__}
        options.json.write_text(json.dumps(run | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
