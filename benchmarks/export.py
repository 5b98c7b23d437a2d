"""Export networks of the zoo with every exporter, and say which artefacts are right.

    python benchmarks/export.py [--only NETWORK ...] [--to EXPORTER ...] [--seconds 9]

The recipe is channels-last with repairs and formatted inputs. The raw file is `results/export.json`; cases
that it holds are left out, unless `--again` is given. `--seconds` also times each right artefact against both
models, which needs a quiet machine: a time that other programs disturbed is marked as such in the table.
"""

import argparse
import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from zoo_networks import NETWORKS, Network

from prepare.core.utils.environment import environment
from prepare.core.utils.json_records import write_json
from prepare.core.utils.machine import disturbance
from prepare.pipeline import Pipeline
from prepare.stages.export import export

FILE = Path(__file__).parent / "results" / "export.json"
EXPORTERS = ("torch_export", "onnx", "openvino", "aoti")
CHOSEN = (
    *("monai unet 2-d", "monai segresnet 2-d", "nnunet plain 2-d", "transformers mobilenet-v2"),
    *("transformers segformer", "diffusers unet2d", "monai unet 3-d"),
)
# Layouts in the order of the table.
LAYOUTS = ("contiguous", "channels_last", "transposed", "gaps")


def measure(network: Network, to: str, seconds: float = 0.0) -> dict[str, Any]:
    """Export one network, and return the verdicts as plain data."""
    torch.manual_seed(0)
    rank = network.rank
    steps = {f"conv{rank}d_memory_format": {}, "repair_layout": {}, "input_format": {}}
    model = network.build().eval()
    with tempfile.TemporaryDirectory() as folder:
        done = export(
            model,
            network.batch(),
            to=to,
            folder=folder,
            pipeline=Pipeline.from_config(steps),
            budget=seconds,
        )
    worst = done.worst
    row = done.time and done.time.row("artefact")
    return {
        "status": done.status,
        "reason": done.reason,
        "layouts": done.contract.layouts,
        "taken_out": [item.step for item in done.taken_out],
        "bytes": done.bytes,
        "error": worst and worst.error,
        "allowed": worst and worst.allowed,
        "stages": {stage.name: stage.status for stage in done.stages},
        "ratio": row and row.ratio,
        "interval": row and row.ratio_interval,
        "busy": disturbance(done.time.settings) if done.time else "",
    }


def table(cases: list[dict[str, Any]]) -> list[str]:
    """Return one line for each network, with the verdict of each exporter."""
    lines = [f"| network | {' | '.join(EXPORTERS)} |", "|---" * (len(EXPORTERS) + 1) + "|"]
    for name in dict.fromkeys(case["network"] for case in cases):
        of_network = {case["to"]: case for case in cases if case["network"] == name}
        cells = [_cell(of_network.get(to)) for to in EXPORTERS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    counted = [f"{word}: {sum(_word(case) == word for case in cases)}" for word in _WORDS]
    lines += ["", f"{len(cases)} exports; {', '.join(counted)}."]
    if busy := sum(bool(case.get("busy")) for case in cases):
        lines.append(f"{busy} times were taken while the machine was busy (*), and mean little.")
    return lines


_WORDS = ("right", "wrong", "refused", "cannot tell")


def _word(case: dict[str, Any]) -> str:
    if case["layouts"].get("contiguous") == "refused":
        return "refused"
    return {"pass": "right", "fail": "wrong"}.get(case["status"], case["status"])


def _cell(case: dict[str, Any] | None) -> str:
    if case is None:
        return ""
    text = _word(case)
    if text == "right":
        share = case["error"] / case["allowed"]
        text += f" ({share:.0%} of the limit)" if share >= 0.01 else " (<1% of the limit)"
    if case.get("ratio"):
        text += f", {case['ratio']:.2f}{'*' if case.get('busy') else ''} of the time"
    for answer, words in (("wrong", "answers wrongly"), ("refused", "refuses")):
        if layouts := [each for each in LAYOUTS if case["layouts"].get(each) == answer]:
            text += f"; {words} {', '.join(layouts)}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=CHOSEN, metavar="NETWORK")
    parser.add_argument("--to", nargs="+", choices=EXPORTERS, default=EXPORTERS)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--json", type=Path, default=FILE)
    options = parser.parse_args()
    found = {"cases": []}
    if options.json.exists():
        found = json.loads(options.json.read_text())
    for to in options.to:
        for name in options.only:
            known = [c for c in found["cases"] if (c["network"], c["to"]) == (name, to)]
            if known and not options.again:
                continue
            case = {"network": name, "to": to} | measure(NETWORKS[name], to, options.seconds)
            print(f"{name}, {to}: {case['status']} {case['reason']}", flush=True)
            kept = [each for each in found["cases"] if each not in known]
            found = {"environment": environment(), "cases": [*kept, case]}
            write_json(options.json, found)
            gc.collect()
    print("\n".join(table(found["cases"])))


if __name__ == "__main__":
    main()
