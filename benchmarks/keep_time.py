"""Time the decoders of video autoencoders in channels-last, with and without the step keep_layout.

    python benchmarks/keep_time.py [--busy 2] [--seconds 60] [--size 64] [--only wan] [--json FILE]

Decodes the latents of a clip of five frames: unprepared (contiguous), in channels-last with repair_layout,
and with keep_layout too. The variants run in every round, in random order, and are compared by the ratios of
their times within rounds (`prepare.stages.bench.compare`); the unprepared one runs twice (A/A). Every variant
is verified first, outputs and gradients. With `--busy N`, N processes keep cores busy beside it.
"""

import argparse
import copy
import json
import warnings
from pathlib import Path
from typing import Any

import busy  # first: it sets how torch's threads wait
import torch
from torch import Tensor, nn
from video_networks import VIDEO_NETWORKS
from zoo_networks import Network

from prepare.core.utils.environment import environment
from prepare.pipeline import Pipeline
from prepare.stages.bench import Comparison, compare
from prepare.stages.verify import verify
from prepare.steps.keeping.choose_calls import choose_calls

# Of 32 channels, where the other benchmark has 8: enough that time is not that of the calls alone.
_WIDTHS: dict[str, dict[str, Any]] = {
    "diffusers wan 2.1": {"base_dim": 32},
    "diffusers hunyuan video": {"block_out_channels": (32, 32, 32, 32), "norm_num_groups": 8},
    "diffusers easyanimate": {"block_out_channels": (32, 32, 32, 32), "norm_num_groups": 8},
    "diffusers ltx video": {
        "block_out_channels": (32, 32, 32, 32),
        "decoder_block_out_channels": (32, 32, 32, 32),
    },
}


class Decoder(nn.Module):
    """An autoencoder whose forward decodes latents."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, latents: Tensor) -> Tensor:
        return self.autoencoder.decode(latents, return_dict=False)[0]


def decoder_of(network: Network, size: int) -> tuple[nn.Module, Tensor]:
    """Return the decoder and the latents of a random clip of this size."""
    torch.manual_seed(0)
    autoencoder = network.build().eval()
    with torch.no_grad():
        clip = torch.randn(2, 3, 5, size, size)
        latents = autoencoder.encode(clip).latent_dist.mode()
    return Decoder(autoencoder), latents


def measure(network: Network, size: int, seconds: float) -> dict[str, Any]:
    """Return the verifications, the calls and the comparison of one network."""
    reference, latents = decoder_of(network, size)
    formats = {"conv2d_memory_format": {}, "conv3d_memory_format": {}, "input_format": {}}
    repaired = Pipeline.from_config({"repair_layout": {}, **formats})
    model = repaired.apply(copy.deepcopy(reference), strict=False, known_issues="ignore")
    chosen = choose_calls(model, repaired.format(latents), backward=False)
    steps = {"repair_layout": {}, "keep_layout": {"calls": list(chosen.names)}, **formats}
    kept = Pipeline.from_config(steps)
    variants = {
        "unprepared": reference,
        "repaired": model,
        "kept": kept.apply(copy.deepcopy(reference), strict=False, known_issues="ignore"),
    }
    pipelines = {"repaired": repaired, "kept": kept}
    statuses = {
        name: verify(reference, variants[name], latents, pipeline=pipeline).status
        for name, pipeline in pipelines.items()
    }
    timed = compare(
        variants,
        latents,
        budget=seconds,
        format={name: pipeline.format for name, pipeline in pipelines.items()},
    )
    return {
        "verified": statuses,
        "calls": list(chosen.names),
        "copied_bytes": [
            chosen.before.summary["copied_bytes"],
            chosen.after.summary["copied_bytes"],
        ],
        "rows": rows(timed),
    }


def rows(timed: Comparison) -> dict[str, Any]:
    """Return the verdict, ratio and interval of each variant, and of the A/A control."""
    found: dict[str, Any] = {
        row.name: {
            "seconds": row.seconds,
            "ratio": row.ratio,
            "interval": row.ratio_interval,
            "verdict": row.verdict,
            "rounds": len(row.samples),
        }
        for row in timed.rows
    }
    if timed.aa is not None:
        found["A/A"] = {"ratio": timed.aa.ratio, "interval": timed.aa.interval}
    return found


def main() -> None:
    """Measure the chosen networks, print each and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = {}
    with busy.busy_processes(options.busy):
        for name, wider in _WIDTHS.items():
            if options.only in name:
                network = VIDEO_NETWORKS[name].with_options(**wider)
                found[name] = measure(network, options.size, options.seconds)
                print(
                    f"{name}: {json.dumps(found[name]['rows'])} {found[name]['verified']}",
                    flush=True,
                )
    if options.json:
        report = {"size": options.size, "busy": options.busy, "networks": found}
        options.json.write_text(
            json.dumps(report | {"environment": environment()}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
