"""Count the layout breaks of real networks in channels-last, and with repair_layout and keep_layout.

    python benchmarks/breaks.py [--real] [--only NAME [--norm-elements 4096]]

Predicts the layout flow of every network of `zoo_networks.py` and `video_networks.py` without computing
anything, with weights and input in channels-last: the original modules, repaired, and with the calls
replaced that the flow names; and in contiguous, where the copies are those that move data in any layout.
Where calls are replaced, outputs and gradients are verified. Writes `results/breaks.json`.

With `--real`: the video networks in the configurations of their library, at batch 1, not verified. Writes
`results/breaks_real.json`. With `--only`: the networks with this in their name, not verified, printed alone;
and as they would be if repaired norms copied samples of fewer than `--norm-elements`, in place of 12,288.
"""

import argparse
import copy
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from video_networks import REAL_NETWORKS, VIDEO_NETWORKS
from zoo_networks import NETWORKS, Network

from prepare.core.utils.machine import environment
from prepare.core.utils.text import first_line
from prepare.pipeline import Pipeline
from prepare.stages.flow import Flow, predict
from prepare.stages.verify import verify
from prepare.steps.keeping.calls import choose_calls
from prepare.steps.repairs import _norm_autograd

RESULTS = Path(__file__).parent / "results"


def predict_breaks(network: Network, *, verifies: bool = True) -> dict[str, Any]:
    """Return the breaks, copied bytes and causes without repairs, with them, and with replaced calls."""
    model = prepared(network, {})
    flow = predict(model, formatted(network, {}))
    contiguous = predict(network.build().eval(), network.batch())
    found = {"contiguous": figures(contiguous), "as it is": figures(flow)}
    steps: dict[str, Any] = {"repair_layout": {}}
    model, batch = prepared(network, steps), formatted(network, steps)
    choice = choose_calls(model, batch)
    found["repaired"], found["kept"] = figures(choice.before), figures(choice.after)
    found["calls"] = list(choice.names)
    if choice.names and verifies:
        steps["keep_layout"] = {"calls": list(choice.names)}
        found["verified"] = verified(network, steps)
    return found


def prepared(network: Network, steps: dict[str, Any]) -> nn.Module:
    """Return the network with these steps and all weights in channels-last."""
    torch.manual_seed(0)
    return pipeline_of(network, steps).apply(
        network.build().eval(), strict=False, known_issues="ignore"
    )


def formatted(network: Network, steps: dict[str, Any]) -> Any:
    """Return the input of the network in its format."""
    return pipeline_of(network, steps).format(network.batch())


def pipeline_of(network: Network, steps: dict[str, Any]) -> Pipeline:
    """Return the steps, and those that convert the weights and the input; 2-d ones of a 3-d network too."""
    formats = {f"conv{rank}d_memory_format": {} for rank in range(2, network.rank + 1)}
    return Pipeline.from_config({**steps, **formats, "input_format": {}})


def figures(flow: Flow) -> dict[str, Any]:
    """Return the figures of a flow that the tables show."""
    return {key: flow.summary[key] for key in ("breaks", "copied_bytes", "by_cause")}


def verified(network: Network, steps: dict[str, Any]) -> dict[str, str]:
    """Return the status of the verification of outputs, and of gradients."""
    reference = network.build().eval()
    model = copy.deepcopy(reference)
    pipeline = pipeline_of(network, steps)
    pipeline.apply(model, strict=False, known_issues="ignore")
    found = verify(reference, model, network.batch(), pipeline=pipeline)
    return {"status": found.status, "checks": str(len(found.checks))}


def main() -> None:
    """Predict all networks, print the results and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--norm-elements", type=int)
    options = parser.parse_args()
    is_real, only = options.real, options.only
    if options.norm_elements:
        _norm_autograd._MIN_ELEMENTS = options.norm_elements
    warnings.simplefilter("ignore")
    found = {}
    networks = REAL_NETWORKS if is_real else NETWORKS | VIDEO_NETWORKS
    for name, network in networks.items():
        if only not in name:
            continue
        try:
            found[name] = predict_breaks(network, verifies=not is_real and not only)
        except Exception as error:  # recorded as part of the result
            found[name] = {"reason": f"{type(error).__name__}: {first_line(error)}"}
        print(f"{name}: {found[name]}", flush=True)
    if only:
        return
    report = {"networks": found, "environment": environment()}
    file = RESULTS / ("breaks_real.json" if is_real else "breaks.json")
    file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
