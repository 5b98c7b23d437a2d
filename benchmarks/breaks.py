"""Count the layout breaks of real networks in channels-last, with and without the step repair_layout.

    python benchmarks/breaks.py

Predicts the layout flow of every network of `zoo_networks.py` without computing anything, with weights and
input in channels-last: the original modules, and repaired. Writes `results/breaks.json`.
"""

import json
import warnings
from pathlib import Path
from typing import Any

from zoo_networks import NETWORKS, Network

from prepare.core.utils.environment import environment
from prepare.core.utils.text import first_line
from prepare.flow import predict
from prepare.pipeline import Pipeline

FILE = Path(__file__).parent / "results" / "breaks.json"


def predict_breaks(network: Network, *, repaired: bool) -> dict[str, Any]:
    """Return the layout breaks of one forward, the bytes that they copy, and their causes."""
    steps: dict[str, dict] = {f"conv{network.rank}d_memory_format": {}, "input_format": {}}
    if repaired:
        steps["repair_layout"] = {}
    pipeline = Pipeline.from_config(steps)
    model = pipeline.apply(network.build().eval(), known_issues="ignore")
    flow = predict(model, pipeline.format(network.batch()))
    return {key: flow.summary[key] for key in ("breaks", "copied_bytes", "by_cause")}


def main() -> None:
    """Predict all networks, print the results and write the file."""
    warnings.simplefilter("ignore")
    found = {}
    for name, network in NETWORKS.items():
        try:
            found[name] = {
                word: predict_breaks(network, repaired=word == "repaired")
                for word in ("as it is", "repaired")
            }
        except Exception as error:  # recorded as part of the result
            found[name] = {"reason": f"{type(error).__name__}: {first_line(error)}"}
        print(f"{name}: {found[name]}", flush=True)
    report = {"networks": found, "environment": environment()}
    FILE.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
