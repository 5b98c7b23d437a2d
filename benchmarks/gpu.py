"""Time the zoo, repairs and decoders on a CUDA device, into one file.

    python benchmarks/gpu.py [--budget SECONDS] [--precision float32 float16 bfloat16] [--out FILE]
    python benchmarks/gpu.py --dry-run

Networks whose library is missing are skipped and listed: monai, diffusers, transformers,
dynamic-network-architectures, torchvision, timm. Writes `results/gpu.json`, and prints its tables. The file
holds the clocks of the device before and after each case, and a case that was throttled is left out.
`gpu_layouts.py` times repair_layout on and off in training, and decoders, after the zoo.
Without a CUDA device it exits with an error. `--dry-run` runs every part with small networks on the CPU, to
see that it runs; its file is not a measurement.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_layouts
import torch
import zoo
from torch import nn
from zoo_networks import IMAGE, NETWORKS, Network
from zoo_tables import line_of, tables

from prepare.core.utils.machine import environment

FILE = Path(__file__).parent / "results" / "gpu.json"
LIMIT = 600.0
LIBRARIES = {
    "nnunet": "dynamic_network_architectures",
    **dict.fromkeys(("wan", "hunyuan"), "diffusers"),
}
# The most different networks of the zoo, in the order of timing: the time may run out.
CHOSEN = (
    "nnunet plain 3-d",
    "nnunet resenc 2-d",
    "monai unet 3-d",
    "monai segresnet 3-d",
    "transformers resnet-50",
    "transformers convnext",
    "diffusers unet2d",
    "monai densenet121 2-d",
)


def torchvision(name: str) -> Callable[[], nn.Module]:
    """Return a function that builds a torchvision network with random weights."""

    def make() -> nn.Module:
        from torchvision import models

        return models.get_model(name, weights=None)

    return make


def timm(name: str) -> Callable[[], nn.Module]:
    """Return a function that builds a timm network with random weights."""

    def make() -> nn.Module:
        import timm as library

        return library.create_model(name, pretrained=False)

    return make


def networks(batch: int) -> dict[str, Network]:
    """Return the networks to time, with a batch of that size where the input allows it."""
    found = {name: NETWORKS[name] for name in CHOSEN}
    found["torchvision resnet50"] = Network(torchvision("resnet50"), 2, IMAGE)
    found["torchvision mobilenet_v3_large"] = Network(torchvision("mobilenet_v3_large"), 2, IMAGE)
    found["timm convnext_tiny"] = Network(timm("convnext_tiny"), 2, IMAGE)
    found["timm efficientnet_b0"] = Network(timm("efficientnet_b0"), 2, IMAGE)
    # Further inputs of a network are made for one sample.
    return {
        name: one if one.more is not dict else replace(one, shape=(batch, *one.shape[1:]))
        for name, one in found.items()
    }


def missing(name: str) -> str:
    """Return the library that a network needs and that is not installed, or an empty string."""
    library = name.partition(" ")[0]
    library = LIBRARIES.get(library, library)
    return "" if importlib.util.find_spec(library) else library


def small() -> dict[str, Network]:
    """Return two small networks, for a dry run."""
    from prepare.models.unet import UNet2d, UNet3d

    return {
        "small unet 2-d": Network(lambda: UNet2d(width=4, depth=2), 2, (2, 1, 16, 16)),
        "small unet 3-d": Network(lambda: UNet3d(width=4, depth=2), 3, (1, 1, 8, 8, 8)),
    }


def clocks() -> list[str] | None:
    """Return clocks, temperature and reasons of throttling, as `nvidia-smi` prints them; None without it."""
    query = "clocks.sm,clocks.mem,temperature.gpu,clocks_throttle_reasons.active"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [part.strip() for part in done.stdout.partition("\n")[0].split(",")]


def throttled(state: list[str] | None) -> bool:
    """Return whether the device is slowed down for its power or its temperature.

    The reasons are bits: 0x4 power cap, 0x8 hardware slowdown, 0x20 and 0x40 temperature, 0x80 power brake.
    """
    return state is not None and bool(int(state[-1], 16) & 0xEC)


def kept_layouts(device: str) -> dict[str, str]:
    """Return for each operation whether its output keeps the channels-last layout of its input."""
    modules: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "Conv2d": (lambda: nn.Conv2d(8, 8, 3), (2, 8, 8, 8)),
        "Conv3d": (lambda: nn.Conv3d(8, 8, 3), (2, 8, 8, 8, 8)),
        "ConvTranspose2d": (lambda: nn.ConvTranspose2d(8, 8, 2, 2), (2, 8, 8, 8)),
        "ConvTranspose3d": (lambda: nn.ConvTranspose3d(8, 8, 2, 2), (2, 8, 8, 8, 8)),
        "BatchNorm2d": (lambda: nn.BatchNorm2d(8), (2, 8, 8, 8)),
        "BatchNorm3d": (lambda: nn.BatchNorm3d(8), (2, 8, 8, 8, 8)),
        "InstanceNorm2d": (lambda: nn.InstanceNorm2d(8), (2, 8, 8, 8)),
        "InstanceNorm3d": (lambda: nn.InstanceNorm3d(8), (2, 8, 8, 8, 8)),
        "GroupNorm": (lambda: nn.GroupNorm(2, 8), (2, 8, 8, 8)),
        "Softmax": (lambda: nn.Softmax(1), (2, 8, 8, 8)),
        "MaxPool2d": (lambda: nn.MaxPool2d(2), (2, 8, 8, 8)),
        "MaxPool3d": (lambda: nn.MaxPool3d(2), (2, 8, 8, 8, 8)),
        "AvgPool2d": (lambda: nn.AvgPool2d(2), (2, 8, 8, 8)),
        "AvgPool3d": (lambda: nn.AvgPool3d(2), (2, 8, 8, 8, 8)),
        "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(2), (2, 8, 8, 8)),
        "AdaptiveAvgPool3d": (lambda: nn.AdaptiveAvgPool3d(2), (2, 8, 8, 8, 8)),
        "Upsample": (lambda: nn.Upsample(scale_factor=2), (2, 8, 8, 8)),
        "SiLU": (nn.SiLU, (2, 8, 8, 8)),
    }
    return {name: _kept(build(), shape, device) for name, (build, shape) in modules.items()}


def _kept(module: nn.Module, shape: tuple[int, ...], device: str) -> str:
    """Say whether a channels-last input gives an output in that format."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]
    with torch.no_grad():
        out = module.to(device)(torch.randn(shape, device=device).to(memory_format=last))
    kept = out.is_contiguous(memory_format=last)
    return f"{'keeps' if kept else 'loses'} {str(last).removeprefix('torch.')}"


def measure_all(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Time every case that fits into the limit; return the cases and the reasons of the others."""
    began, cases, left_out = time.perf_counter(), [], {}
    chosen = small() if options.dry_run else networks(options.batch)
    for precision in options.precision:
        for train in (False, True):
            compiled = not train and not options.dry_run
            case = {"train": train, "precision": precision, "compile": compiled}
            for name, network in chosen.items():
                label = f"{name}, {precision}, {'training step' if train else 'inference'}"
                if not options.dry_run and (library := missing(name)):
                    left_out[label] = f"{library} is not installed"
                    continue
                if time.perf_counter() - began > options.limit:
                    left_out[label] = f"no time was left of {options.limit:.0f} s"
                    continue
                before = clocks()
                try:
                    how = {"budget": options.budget, "tune_budget": options.budget}
                    data = zoo.measure(network, case, **how, device=device)
                except Exception as error:  # one network may fail: the others continue
                    traceback.print_exc()
                    left_out[label] = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
                    continue
                after = clocks()
                if throttled(before) or throttled(after):
                    left_out[label] = f"the device was throttled: {before}, then {after}"
                    continue
                cases.append({"network": name, **data, "clocks": [before, after]})
                print(f"{label}: {line_of(cases[-1])}", flush=True)
    return {"cases": cases, "left_out": left_out}


def measure_layouts(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Time each format with and without repairs; return the cases and the reasons of the others."""
    began, cases, left_out = time.perf_counter(), {}, {}
    for name, case in (gpu_layouts.SMALL if options.dry_run else gpu_layouts.CASES).items():
        if library := missing(name):
            left_out[name] = f"{library} is not installed"
        elif time.perf_counter() - began > options.limit:
            left_out[name] = f"no time was left of {options.limit:.0f} s"
        else:
            try:
                budget = options.budget
                cases[name] = gpu_layouts.measure(
                    case, device, budget=budget, clocks=clocks, throttled=throttled
                )
            except Exception as error:  # one network may fail: the others continue
                traceback.print_exc()
                left_out[name] = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
                continue
            print(f"{name}: {gpu_layouts.line_of(cases[name])}", flush=True)
    return {"layout_cases": cases, "layouts_left_out": left_out}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = ["float32", "float16", "bfloat16"]
    parser.add_argument("--precision", nargs="+", choices=every, default=every)
    parser.add_argument("--batch", type=int, default=8, help="samples, where a network takes more")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds to time a case")
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT - 60,
        help="seconds after which no case of a part begins",
    )
    parser.add_argument("--out", type=Path, help="the file to write")
    parser.add_argument("--dry-run", action="store_true", help="small networks on the CPU")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here: nothing was measured, and nothing is reported")
    warnings.simplefilter("ignore")
    device = "cpu" if options.dry_run else "cuda"
    found = {"dry_run": options.dry_run, "environment": environment()}
    found |= {"layouts": kept_layouts(device), **measure_all(options, device)}
    found |= measure_layouts(options, device)
    file = options.out or (FILE.with_name("gpu-dry-run.json") if options.dry_run else FILE)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n")
    print("dry run, no measurement" if options.dry_run else torch.cuda.get_device_name())
    for name, kept in found["layouts"].items():
        print(f"{name} {kept}")
    print(*tables(found["cases"]), sep="\n")
    for label, reason in (found["left_out"] | found["layouts_left_out"]).items():
        print(f"left out: {label}: {reason}")


if __name__ == "__main__":
    main()
