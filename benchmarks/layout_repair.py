"""Time channels-last with and without the step repair_layout, against contiguous.

    python benchmarks/layout_repair.py [--minutes 25] [--threads 2] [--only nnunet_plain 2-d] [--json FILE]
    python benchmarks/layout_repair.py --small [--busy 2] [--minutes 3.5] [--json FILE]

Networks of nnU-Net and MONAI with InstanceNorm, 2-d and 3-d, float32 and bfloat16, batch 1 and 2, an
evaluation and a training step (forward and backward). The variants of a case run interleaved, in a new
random order in every round; `contiguous` runs twice per round, which shows the noise (A/A). A figure
is the median of the ratios to contiguous in the same round, so a machine that slows down slows both;
below 1 is faster than contiguous.

With `--small` inputs are 64 squared and 32 cubed, at batch 1. With `--busy N`, N processes keep cores busy
beside it. Threads spin as the command line lets them, unless the environment says otherwise.

The cases share the minutes: each runs rounds for its share, from `--least` to `--most`. The file is
written after each case; with `--resume` the cases in it are not measured again.
`python benchmarks/tables.py` updates the tables in the docs.
"""

import argparse
import itertools
import json
import math
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import busy  # first: it sets how torch's threads wait
import torch
from torch import Tensor, nn
from zoo_networks import nnunet

from prepare.core.utils.json_records import write_json
from prepare.core.utils.machine import how_threads_wait
from prepare.core.utils.text import first_line
from prepare.pipeline import Pipeline

VARIANTS = ("contiguous", "contiguous (again)", "channels-last", "channels-last, repaired")
# Usual sizes. nnU-Net plans slices of 512 x 512 for CT, and volumes of 128 cubed for a GPU: 64
# is what finishes on a CPU. DynUNet is MONAI's nnU-Net. MONAI's tutorials run its UNet on slices of
# 256 x 256, and on volumes of 96 cubed.
SIZES = {
    "nnunet_plain": {2: 512, 3: 64},
    "nnunet_resenc": {2: 512, 3: 64},
    "monai_unet": {2: 256, 3: 96},
    "monai_dynunet": {2: 512, 3: 64},
}
SMALL = {name: {2: 64, 3: 32} for name in SIZES}
Case = tuple[str, int, str, int, bool]


def monai_unet(rank: int) -> nn.Module:
    from monai.networks.nets import UNet

    return UNet(
        spatial_dims=rank,
        in_channels=1,
        out_channels=2,
        channels=(32, 64, 128, 256),
        strides=(2, 2, 2),
        num_res_units=2,
    )


def monai_dynunet(rank: int) -> nn.Module:
    from monai.networks.nets import DynUNet

    return DynUNet(
        spatial_dims=rank,
        in_channels=1,
        out_channels=2,
        kernel_size=[3] * 4,
        strides=[1, 2, 2, 2],
        upsample_kernel_size=[2, 2, 2],
        filters=[32, 64, 128, 256],
    )


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "nnunet_plain": lambda rank: nnunet(rank, residual=False)(),
    "nnunet_resenc": lambda rank: nnunet(rank, residual=True)(),
    "monai_unet": monai_unet,
    "monai_dynunet": monai_dynunet,
}


def prepared(name: str, rank: int, dtype: str, variant: str, *, train: bool) -> Callable:
    """Return a function that runs one step of a variant on a batch."""
    torch.manual_seed(0)
    model = NETWORKS[name](rank).train(train)
    step = f"conv{rank}d_memory_format"
    steps: dict[str, dict] = {} if dtype == "float32" else {"half": {"dtype": dtype}}
    steps[step] = {} if "channels" in variant else {"memory_format": "contiguous"}
    if "repaired" in variant:
        steps["repair_layout"] = {}
    pipeline = Pipeline.from_config(steps | {"input_format": {}})
    pipeline.apply(model, known_issues="ignore")
    return lambda batch: _step(model, pipeline.format(batch), train=train)


def _step(model: nn.Module, batch: Tensor, *, train: bool) -> None:
    with torch.set_grad_enabled(train):
        output = model(batch)
    if train:
        first = output[0] if isinstance(output, list | tuple) else output
        first.float().square().mean().backward()
        model.zero_grad(set_to_none=True)


def label(case: Case) -> str:
    name, rank, dtype, batch, train = case
    return f"{name} {rank}-d {dtype} batch {batch} {'training' if train else 'evaluation'}"


def measure(case: Case, until: float, least: int, most: int) -> dict[str, list[float]]:
    """Return the seconds of each variant in each round.

    Raises:
        NotImplementedError: torch cannot run the contiguous variant.
    """
    name, rank, dtype, batch, train = case
    acts = {v: prepared(name, rank, dtype, v, train=train) for v in VARIANTS}
    given = torch.randn(batch, 1, *[SIZES[name][rank]] * rank, dtype=getattr(torch, dtype))
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for count in range(most + 1):
        for variant in random.Random(count).sample(VARIANTS, len(VARIANTS)):
            start = time.perf_counter()
            acts[variant](given)
            if count:  # the first round warms up
                times[variant].append(time.perf_counter() - start)
        if count >= least and time.monotonic() > until:
            break
    return times


def ratio(seconds: dict[str, list[float]], variant: str) -> float:
    """Return the median ratio of a variant's time to contiguous in the same round."""
    pairs = zip(seconds[variant], seconds[VARIANTS[0]], strict=True)
    return statistics.median(own / base for own, base in pairs)


def summary(cases: list[dict]) -> dict[str, tuple[float, float]]:
    """Return the geometric mean and the maximum of the ratios of each variant but the first."""
    found = {}
    for variant in VARIANTS[1:]:
        ratios = [ratio(case["seconds"], variant) for case in cases]
        found[variant] = (math.exp(statistics.fmean(map(math.log, ratios))), max(ratios))
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=25, help="for all cases together")
    parser.add_argument("--least", type=int, default=3, help="rounds of a case, time or not")
    parser.add_argument("--most", type=int, default=41, help="rounds of a case")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="64 squared and 32 cubed, batch 1")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="busy processes beside it")
    parser.add_argument("--only", nargs="*", default=[], help="words that a case's name has")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--resume", action="store_true", help="keep the cases that --json holds")
    return parser.parse_args()


def report_to_extend(options: argparse.Namespace) -> dict:
    """Return the report to extend: the saved one if its conditions are the same, else an empty one."""
    report = {
        "torch": torch.__version__,
        "threads": options.threads,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "busy": options.busy,
        "waiting": how_threads_wait(),
        "sizes": {name: {f"{rank}-d": n for rank, n in of.items()} for name, of in SIZES.items()},
    }
    if options.resume and options.json and options.json.exists():
        before = json.loads(options.json.read_text())
        if {key: before.get(key) for key in report} == report:
            return before
        print("the file was measured under other conditions: starting again")
    return report | {"cases": [], "not_run": []}


def show(name: str, seconds: dict[str, list[float]], end: float) -> None:
    base = statistics.median(seconds[VARIANTS[0]]) * 1e3
    ratios = " ".join(f"{ratio(seconds, variant):7.2f}" for variant in VARIANTS[1:])
    left = max(0.0, end - time.monotonic()) / 60
    rounds = len(seconds[VARIANTS[0]])
    print(f"{name:51} {base:7.1f} ms {ratios} {rounds:7} {left:13.1f}", flush=True)


def main() -> None:
    options = parse()
    if options.small:
        SIZES.update(SMALL)
    with busy.busy_processes(options.busy):
        run(options)


def run(options: argparse.Namespace) -> None:
    """Measure the chosen cases, print each and write them."""
    torch.set_num_threads(options.threads)
    report = report_to_extend(options)
    print(", ".join(f"{key} {report[key]}" for key in ("torch", "threads", "cpu")), end=", ")
    print(f"Python {platform.python_version()}")
    done = {found["case"] for found in report["cases"] + report["not_run"]}
    batches = (1,) if options.small else (1, 2)
    every = itertools.product(NETWORKS, (2, 3), ("float32", "bfloat16"), batches, (False, True))
    chosen = [case for case in every if all(word in label(case) for word in options.only)]
    cases = [case for case in chosen if label(case) not in done]
    end = time.monotonic() + options.minutes * 60
    print(f"{'':51} contiguous     A/A  without    with  rounds  minutes left")
    for place, case in enumerate(cases):
        now = time.monotonic()
        share = max(0.0, end - now) / (len(cases) - place)
        try:
            seconds = measure(case, now + share, options.least, options.most)
        except NotImplementedError as error:
            why = first_line(error)
            report["not_run"].append({"case": label(case), "why": why})
            print(f"{label(case):51} torch cannot: {why}", flush=True)
        else:
            rounded = {variant: [round(s, 6) for s in t] for variant, t in seconds.items()}
            report["cases"].append({"case": label(case), "seconds": rounded})
            show(label(case), seconds, end)
        if options.json:
            write_json(options.json, report)
    if not report["cases"]:
        return
    print("\ngeometric mean against contiguous, and the largest")
    for variant, (mean, largest) in summary(report["cases"]).items():
        print(f"{variant:24} {mean:.2f}  {largest:.2f}")


if __name__ == "__main__":
    main()
