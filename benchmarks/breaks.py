"""Where real networks lose channels-last, and what the step repair_layout leaves of it.

    python benchmarks/breaks.py

Predicts the layout flow of every network of `zoo_networks.py`, without computing anything: with weights and
input in channels-last as torch leaves them, and repaired. Writes `results/breaks.json`.
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


def look(network: Network, *, repaired: bool) -> dict[str, Any]:
    """How often the layout is lost in one forward, the bytes that are copied for it, and why."""
    steps: dict[str, dict] = {f"conv{network.rank}d_memory_format": {}, "input_format": {}}
    if repaired:
        steps["repair_layout"] = {}
    pipeline = Pipeline.from_config(steps)
    model = pipeline.apply(network.build().eval(), known_issues="ignore")
    flow = predict(model, pipeline.format(network.batch()))
    return {key: flow.summary[key] for key in ("breaks", "copied_bytes", "by_cause")}


def main() -> None:
    """Looks at all of them, and says what it sees."""
    warnings.simplefilter("ignore")
    found = {}
    for name, network in NETWORKS.items():
        try:
            found[name] = {
                word: look(network, repaired=word == "repaired")
                for word in ("as it is", "repaired")
            }
        except Exception as error:  # what cannot be predicted is part of what is found
            found[name] = {"reason": f"{type(error).__name__}: {first_line(error)}"}
        print(f"{name}: {found[name]}", flush=True)
    report = {"networks": found, "environment": environment()}
    FILE.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
