"""Count the verifications of the zoo's networks that end as `cannot tell`, and say why.

    python benchmarks/cannot_tell.py [--busy 4] [--only unet] [--every 3] [--label now] [--table]

Each network, with an input of half its size where it takes one, is prepared in channels-last with
`repair_layout`, in float32 and in bfloat16, and verified as a run does by default (`short`), in both modes. A
line of `results/cannot_tell.jsonl` is a verification; a second start leaves out what the file holds. With
`--busy N`, N processes keep cores busy beside it; with `--label` rows of another version of prepare, which
PYTHONPATH selects, go into the same file.
"""

import argparse
import itertools
import json
import os
import time
import warnings
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import busy  # first: it sets how torch's threads wait
import torch
from sensitivity import small
from zoo_networks import NETWORKS

from prepare.core.model.deep_copy import deep_copy
from prepare.pipeline import Pipeline
from prepare.stages.verify import verify

FILE = Path(__file__).parent / "results" / "cannot_tell.jsonl"
KEYS = ("label", "busy", "mode", "precision", "network")


def measure(name: str, precision: str, mode: str) -> dict[str, Any]:
    """Verify one network, and return the verdict and its causes."""
    network = small(name)
    torch.manual_seed(0)
    reference = network.build().train(mode == "train")
    half: dict[str, Any] = {} if precision == "float32" else {"half": {"dtype": precision}}
    formats = {f"conv{network.rank}d_memory_format": {}, "repair_layout": {}, "input_format": {}}
    pipeline = Pipeline.from_config({**half, **formats})
    model = pipeline.apply(deep_copy(reference), known_issues="ignore")
    load, begun = os.getloadavg()[0], time.monotonic()
    found = verify(reference, model, network.batch(), pipeline=pipeline, mode=mode)
    return {
        "status": found.status,
        "reason": found.reason,
        "reference": found.reference,
        "seconds": round(time.monotonic() - begun, 1),
        "load": round(load, 1),
        "checks": {
            check.what: f"{check.status}: {check.note}".removesuffix(": ")
            for check in found.checks
            if check.status != "pass"
        },
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the counts of verdicts by version, precision and mode, as lines of a table."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["label"], row["precision"], row["mode"]), []).append(row)
    lines = ["| version | precision | mode | networks | load | pass | cannot tell | fail |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for key, found in groups.items():
        counts = Counter(row["status"] for row in found)
        load = f"{median(row['load'] for row in found):.0f}"
        words = [*key, len(found), load, *(counts[w] for w in ("pass", "cannot tell", "fail"))]
        lines.append(f"| {' | '.join(map(str, words))} |")
    return lines


def main() -> None:
    """Verify what is not in the file yet, or print the table of what is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the names of networks")
    parser.add_argument("--every", type=int, default=1, help="take every n-th network only")
    parser.add_argument("--mode", nargs="+", default=["eval", "train"])
    parser.add_argument("--precision", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--label", default="now", help="the version of prepare")
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = (
        [json.loads(line) for line in options.out.read_text().splitlines()]
        if options.out.exists()
        else []
    )
    if options.table:
        print(*table(rows), sep="\n")
        return
    known = {tuple(row[key] for key in KEYS) for row in rows}
    with busy.busy_processes(options.busy):
        names = [name for name in NETWORKS if options.only in name][:: options.every]
        for name, mode, precision in itertools.product(names, options.mode, options.precision):
            case = (options.label, options.busy, mode, precision, name)
            if case not in known:
                row = dict(zip(KEYS, case, strict=True)) | measure(name, precision, mode)
                print(json.dumps(row), flush=True)
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
