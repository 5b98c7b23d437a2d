"""Time the zoo on a CUDA device in under ten minutes, into one file.

    python benchmarks/gpu.py [--budget SECONDS] [--precision float32 float16 bfloat16]

Networks whose library is missing are skipped and listed: monai, diffusers, transformers,
dynamic-network-architectures, torchvision, timm. Writes `results/gpu.json`, and prints its tables.
Without a CUDA device it exits with an error; it never falls back to another device.
"""

import argparse
import importlib.util
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import zoo
from torch import nn
from zoo_networks import IMAGE, NETWORKS, Network
from zoo_tables import line_of, tables

FILE = Path(__file__).parent / "results" / "gpu.json"
LIMIT = 600.0
LIBRARIES = {"nnunet": "dynamic_network_architectures"}
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


def measure_all(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Time every case that fits into the limit; return the cases and the reasons of the others."""
    began, cases, left_out = time.perf_counter(), [], {}
    for precision in options.precision:
        for train in (False, True):
            case = {"train": train, "precision": precision, "compile": not train}
            for name, network in networks(options.batch).items():
                label = f"{name}, {precision}, {'training step' if train else 'inference'}"
                if library := missing(name):
                    left_out[label] = f"{library} is not installed"
                    continue
                if time.perf_counter() - began > options.limit:
                    left_out[label] = f"no time was left of {options.limit:.0f} s"
                    continue
                try:
                    how = {"budget": options.budget, "tune_budget": options.budget}
                    data = zoo.measure(network, case, **how, device=device)
                except Exception as error:  # one network may fail: the others continue
                    traceback.print_exc()
                    left_out[label] = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
                    continue
                cases.append({"network": name, **data})
                print(f"{label}: {line_of(cases[-1])}", flush=True)
    return {"cases": cases, "left_out": left_out}


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
        "--limit", type=float, default=LIMIT - 60, help="seconds after which no case begins"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device here: nothing was measured, and nothing is reported")
    warnings.simplefilter("ignore")
    found = measure_all(options, "cuda")
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(*tables(found["cases"]), sep="\n")
    for label, reason in found["left_out"].items():
        print(f"left out: {label}: {reason}")


if __name__ == "__main__":
    main()
