"""What the step repair_layout buys: channels-last with it and without it, against contiguous.

    python benchmarks/layout_repair.py [--repeats 9] [--threads 2] [--only nnunet_plain] [--json FILE]

Networks of nnU-Net and MONAI with InstanceNorm, 2-d and 3-d, float32 and bfloat16, batch 1 and 2, an
evaluation and a training step (forward and backward). The variants of a case run interleaved, in an
order shuffled anew for every repeat; `contiguous` stands in the list twice, which shows the noise
(A/A). Medians and ratios of medians are printed; below 1 is faster than contiguous.
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

import torch
from torch import Tensor, nn

from prepare.pipeline import Pipeline

VARIANTS = ("contiguous", "contiguous (again)", "channels-last", "channels-last, repaired")
SIZES = {2: (192, 192), 3: (48, 48, 48)}


def nnunet(residual: bool, rank: int) -> nn.Module:  # noqa: FBT001
    """nnU-Net's two networks as its planner makes them, with four stages."""
    from dynamic_network_architectures.architectures.unet import (
        PlainConvUNet,
        ResidualEncoderUNet,
    )

    shared = {
        "input_channels": 1,
        "n_stages": 4,
        "features_per_stage": [32, 64, 128, 256],
        "conv_op": {2: nn.Conv2d, 3: nn.Conv3d}[rank],
        "kernel_sizes": 3,
        "strides": [1, 2, 2, 2],
        "num_classes": 2,
        "n_conv_per_stage_decoder": [1, 1, 1] if residual else [2, 2, 2],
        "conv_bias": True,
        "norm_op": {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[rank],
        "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "nonlin": nn.LeakyReLU,
        "nonlin_kwargs": {"inplace": True},
    }
    if residual:
        return ResidualEncoderUNet(n_blocks_per_stage=[1, 2, 2, 2], **shared)
    return PlainConvUNet(n_conv_per_stage=[2, 2, 2, 2], **shared)


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
    "nnunet_plain": lambda rank: nnunet(False, rank),
    "nnunet_resenc": lambda rank: nnunet(True, rank),
    "monai_unet": monai_unet,
    "monai_dynunet": monai_dynunet,
}


def prepared(name: str, rank: int, dtype: str, variant: str, *, train: bool) -> Callable[[], None]:
    """One step of one variant, ready to be timed."""
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


def measure(case: tuple, repeats: int) -> dict[str, float]:
    """Median seconds of each variant; raises NotImplementedError where torch cannot run contiguous."""
    name, rank, dtype, batch, train = case
    acts = {v: prepared(name, rank, dtype, v, train=train) for v in VARIANTS}
    given = torch.randn(batch, 1, *SIZES[rank], dtype=getattr(torch, dtype))
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for repeat in range(repeats + 2):
        for variant in random.Random(repeat).sample(VARIANTS, len(VARIANTS)):
            start = time.perf_counter()
            acts[variant](given)
            if repeat > 1:  # the first two rounds warm up
                times[variant].append(time.perf_counter() - start)
    return {variant: statistics.median(found) for variant, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="a part of a case's name")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    )
    print(f"{'':52} contiguous  A/A  without   with repair")
    found = {}
    for case in itertools.product(NETWORKS, (2, 3), ("float32", "bfloat16"), (1, 2), (False, True)):
        name, rank, dtype, batch, train = case
        kind = "training" if train else "evaluation"
        label = f"{name} {rank}-d {dtype} batch {batch} {kind}"
        if options.only not in label:
            continue
        try:
            seconds = measure(case, options.repeats)
        except NotImplementedError as error:
            print(f"{label:52} torch cannot: {str(error).splitlines()[0]}", flush=True)
            continue
        base = seconds[VARIANTS[0]]
        aa, without, repaired = (seconds[v] / base for v in VARIANTS[1:])
        found[label] = {"seconds": seconds, "ratio": repaired, "unrepaired": without, "aa": aa}
        print(
            f"{label:52} {base * 1000:7.1f} ms {aa:5.2f} {without:7.2f} {repaired:9.2f}", flush=True
        )
    print("\ngeometric mean against contiguous, and the largest")
    for title, key in (("A/A", "aa"), ("without repair", "unrepaired"), ("with repair", "ratio")):
        values = [row[key] for row in found.values()]
        mean = math.exp(statistics.fmean(map(math.log, values)))
        print(f"{title:16} {mean:.2f}  {max(values):.2f}")
    if options.json:
        report = {"torch": torch.__version__, "threads": options.threads, "cases": found}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
