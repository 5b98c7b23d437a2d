"""Time convolutions against their rewrites: exactly equal operations, chosen as the step rewrite_conv does.

    python benchmarks/rewrites.py layers [SECONDS]  # single convolutions
    python benchmarks/rewrites.py busy [SECONDS]    # the same beside two busy processes
    python benchmarks/rewrites.py networks          # one image through Wan's decoder, and a vision tower
    python benchmarks/rewrites.py heldout           # is the choice right, over 60 shapes of no network

Each writes its part of benchmarks/results/rewrites.json; `python benchmarks/tables.py` writes the tables of
benchmarks/results/rewrites.md from it. Every line is from interleaved rounds in random order; `A/A` is the
convolution against itself. Times are medians in ms, of processor time if OMP_NUM_THREADS=1, else of the
clock; ratios are medians per round.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import busy  # first: it sets how torch's threads wait
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from prepare.pipeline import Pipeline
from prepare.steps.repairs import all_rewrites, find_rewrite
from prepare.steps.repairs.base import FORMATS

RESULTS = Path(__file__).parent / "results" / "rewrites.json"
MODES = ("forward", "without input gradient", "with input gradient")
FASTER = ("faster than channels-last", "faster than contiguous")
# name, convolution, input
LAYERS = {
    "Qwen3-VL patch, 1024": (
        lambda: nn.Conv3d(3, 1152, (2, 16, 16), (2, 16, 16)),
        (1024, 3, 2, 16, 16),
    ),
    "Qwen3-VL patch, 64": (
        lambda: nn.Conv3d(3, 1152, (2, 16, 16), (2, 16, 16)),
        (64, 3, 2, 16, 16),
    ),
    "Qwen2-VL patch, 256": (
        lambda: nn.Conv3d(3, 1280, (2, 14, 14), (2, 14, 14), bias=False),
        (256, 3, 2, 14, 14),
    ),
    "Wan's DiT patch": (lambda: nn.Conv3d(16, 1536, (1, 2, 2), (1, 2, 2)), (1, 16, 5, 60, 104)),
    "VideoMAE tubelets": (
        lambda: nn.Conv3d(3, 768, (2, 16, 16), (2, 16, 16)),
        (1, 3, 16, 224, 224),
    ),
    "ViT-B/16, batch 1": (lambda: nn.Conv2d(3, 768, 16, 16), (1, 3, 224, 224)),
    "ViT-B/16, batch 4": (lambda: nn.Conv2d(3, 768, 16, 16), (4, 3, 224, 224)),
    "ViT-B/16, batch 32": (lambda: nn.Conv2d(3, 768, 16, 16), (32, 3, 224, 224)),
    "ConvNeXt 2x2 stride 2, batch 4": (lambda: nn.Conv2d(192, 384, 2, 2), (4, 192, 28, 28)),
    "1x1, 256 to 256": (lambda: nn.Conv2d(256, 256, 1), (1, 256, 32, 32)),
    "(3, 1, 1), 64 channels": (
        lambda: nn.Conv3d(64, 64, (3, 1, 1), padding=(1, 0, 0)),
        (1, 64, 8, 32, 32),
    ),
}


def fitting(module: nn.Module) -> str:
    """Return the rewrite of a layer of the table."""
    names = ("linear", "pointwise", "lower_rank")
    return next(name for name in names if find_rewrite(name).fits(module))


def rounds(calls: dict[str, Any], seconds: float) -> dict[str, list[float]]:
    """Return the times of every call in each round, for about that many seconds, at least 3 rounds."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    order, times = random.Random(0), {name: [] for name in calls}
    for call in calls.values():
        call()
    start = time.perf_counter()
    while len(next(iter(times.values()))) < 3 or time.perf_counter() - start < seconds:
        for name in order.sample([*calls], len(calls)):
            begin = clock()
            calls[name]()
            times[name].append(clock() - begin)
    return times


def call_of(module: Any, x: torch.Tensor, mode: str) -> Any:
    """Return a function for one call: forward, or forward and backward with the input's gradient or not."""
    if mode == "forward":

        def forward() -> None:
            with torch.inference_mode():
                module(x)

        return forward
    given = x.clone().requires_grad_(mode == "with input gradient")
    leaves = [each for each in (given, *module.parameters()) if each.requires_grad]
    grad = torch.randn_like(module(given))
    return lambda: torch.autograd.grad(module(given), leaves, grad)


HEAD = ("layer", "dtype", "mode", "contiguous", "channels-last", "rewrite", "A/A", *FASTER)
BUSY = "the same, busy"
# Without instructions for bfloat16 a call takes seconds: those of few patches only.
IN_BFLOAT16 = ("Qwen3-VL patch, 64", "ViT-B/16, batch 1")
TRAINED = ("Qwen3-VL patch, 64", "Qwen2-VL patch, 256", "VideoMAE tubelets", "ViT-B/16, batch 4")


def cases() -> Iterator[tuple[str, torch.dtype, str]]:
    """Yield the lines of the table of layers."""
    for name in LAYERS:
        yield name, torch.float32, MODES[0]
    for mode in MODES[1:]:
        yield from ((name, torch.float32, mode) for name in TRAINED)
    yield from ((name, torch.bfloat16, MODES[0]) for name in IN_BFLOAT16)


def layers(seconds: float = 3.0) -> Iterator[dict[str, Any]]:
    """Yield the lines of the table of single layers."""
    for name, dtype, mode in cases():
        make, shape = LAYERS[name]
        torch.manual_seed(0)
        module, x = make().to(dtype), torch.randn(shape, dtype=dtype)
        last = FORMATS[len(shape)]
        formatted = copy.deepcopy(module).to(memory_format=last)
        product = copy.deepcopy(module)
        find_rewrite(fitting(product)).repair(product, {})
        calls = {
            "contiguous": call_of(module, x, mode),
            "again": call_of(module, x, mode),
            "channels-last": call_of(formatted, x.contiguous(memory_format=last), mode),
            "rewrite": call_of(product, x, mode),
        }
        whole = (
            mode == MODES[0] and x.shape[2:] == module.kernel_size
        )  # a product, and nothing else
        if whole:
            calls["F.linear"] = call_of(as_linear(module), x.flatten(1), mode)
        times = rounds(calls, seconds)
        yield {
            "layer": name,
            "dtype": str(dtype).removeprefix("torch."),
            "mode": mode,
            **{key: milliseconds(times[key]) for key in HEAD[3:6]},
            "A/A": ratio(times, "again", "contiguous"),
            FASTER[0]: ratio(times, "channels-last", "rewrite"),
            FASTER[1]: ratio(times, "contiguous", "rewrite"),
            **({"rewrite / F.linear": ratio(times, "rewrite", "F.linear")} if whole else {}),
        }


def as_linear(conv: nn.Module) -> nn.Linear:
    """Return the linear layer of a convolution whose kernel is as large as its input."""
    weight = conv.weight.flatten(1)
    linear = nn.Linear(*reversed(weight.shape), bias=conv.bias is not None, dtype=weight.dtype)
    linear.weight, linear.bias = nn.Parameter(weight), conv.bias
    return linear


def layers_busy(seconds: float = 3.0) -> Iterator[dict[str, Any]]:
    """Yield the lines of the table of single layers, timed beside two busy processes."""
    with busy.busy_processes(2):
        yield from layers(seconds)


def milliseconds(times: list[float]) -> float:
    """Return the median in ms, with three digits."""
    return float(f"{1e3 * median(times):.3g}")


def ratio(times: dict[str, list[float]], one: str, other: str) -> float:
    """Return the median of the ratios per round."""
    return round(median(a / b for a, b in zip(times[one], times[other], strict=True)), 3)


class Decoder(nn.Module):
    """The decoder of Wan's autoencoder."""

    def __init__(self) -> None:
        import diffusers

        super().__init__()
        self.vae = diffusers.AutoencoderKLWan(base_dim=32, dim_mult=[1, 2, 4, 4])

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.vae.decode(z, return_dict=False)[0]


def wan(dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the decoder and the latents of one image, a small one in bfloat16.

    Without instructions for bfloat16 one unprepared call with latents of 32 x 32 takes 299 s.
    """
    torch.manual_seed(0)
    size = 32 if dtype == torch.float32 else 8
    return Decoder().eval().to(dtype), torch.randn(1, 16, 1, size, size, dtype=dtype)


def tower(dtype: torch.dtype) -> tuple[Any, Any]:
    """Return a vision tower of Qwen3-VL with the real patch embedding and few layers, and 256 patches."""
    from transformers.models.qwen3_vl import Qwen3VLVisionConfig, Qwen3VLVisionModel

    torch.manual_seed(0)
    config = Qwen3VLVisionConfig(depth=2, deepstack_visual_indexes=[1])
    example = {
        "hidden_states": torch.randn(256, 1536, dtype=dtype),
        "grid_thw": torch.tensor([[1, 16, 16]]),
    }
    return Qwen3VLVisionModel(config).eval().to(dtype), example


BEST, COMPILED, REWRITES = "formats + rewrite_conv", "torch.compile", all_rewrites()
FORMATTED: dict[str, Any] = {
    "conv2d_memory_format": {},
    "conv3d_memory_format": {},
    "repair_layout": {},
    "keep_layout": {},
    "input_format": {},
}
KINDS = {
    "formats": FORMATTED,
    BEST: {**FORMATTED, "rewrite_conv": {}},
    "rewrite_conv": {"rewrite_conv": {}},
}


def caller(model: Any, example: Any, change: Any) -> Any:
    """Return a function for one call of a network, that returns its first tensor."""

    def call() -> torch.Tensor:
        given = change(example)
        with torch.inference_mode():
            output = model(**given) if isinstance(given, dict) else model(given)
        return next(each for each in tree_leaves(output) if torch.is_tensor(each))

    return call


def networks(seconds: float = 20.0) -> Iterator[dict[str, Any]]:
    """Yield whole networks: unprepared, compiled, formats, and rewrites, each chosen for the example."""
    for build, dtype in (
        (wan, torch.float32),
        (tower, torch.float32),
        (wan, torch.bfloat16),
    ):
        model, example = build(dtype)
        calls = {"unprepared": caller(model, example, lambda given: given)}
        calls["again"] = calls["unprepared"]
        chosen = {}
        for name, steps in KINDS.items():
            pipeline, prepared = Pipeline.from_config(steps), build(dtype)[0]
            pipeline.apply(prepared, example=example, known_issues="ignore", strict=False)
            options = pipeline.to_config().get("rewrite_conv", {})
            chosen[name] = {
                key: len(value) for key, value in options.items() if key in REWRITES and value
            }
            calls[name] = caller(prepared, example, pipeline.format)
        if build is tower:  # compiling the decoder takes longer than all the rest
            calls[COMPILED] = caller(torch.compile(model), example, lambda given: given)
        difference = (calls[BEST]() - calls["unprepared"]()).abs().max().item()
        times = rounds(calls, seconds)
        yield {
            "network": build.__name__,
            "dtype": str(dtype).removeprefix("torch."),
            **{key: milliseconds(times[key]) for key in calls if key != "again"},
            "A/A": ratio(times, "again", "unprepared"),
            "faster": ratio(times, "unprepared", BEST),
            "formats are faster": ratio(times, "unprepared", "formats"),
            "difference": float(f"{difference:.2g}"),
            "chosen": chosen[BEST],
            "rounds": len(times["again"]),
        }


def held_out(number: int = 60, seconds: float = 1.0) -> Iterator[dict[str, Any]]:
    """Yield random shapes for which the step chose, each timed again afterwards."""
    numbers = random.Random(2026)
    for index in range(number):
        rank = numbers.choice((2, 3))
        conv = (nn.Conv2d, nn.Conv3d)[rank - 2]
        channels, outputs = numbers.choice((3, 3, 16, 64, 128)), numbers.choice((64, 128, 384, 768))
        kernel = numbers.choice(
            ((1,) * rank, (2,) * rank, (4,) * rank, (8,) * rank, (1, 2, 2)[-rank:])
        )
        most = max(1, int((2**17 / channels) ** (1 / rank)) // max(kernel))
        sizes = [size * numbers.randint(1, max(1, most)) for size in kernel]
        batch = numbers.choice((1, 4, 32) if sizes[0] < 64 else (1, 4))
        torch.manual_seed(index)
        make = lambda: nn.Sequential(conv(channels, outputs, kernel, kernel))  # noqa: B023, E731
        x = torch.randn(batch, channels, *sizes)
        steps = (
            {f"conv{rank}d_memory_format": {}, "input_format": {}} if numbers.random() < 0.5 else {}
        )
        plain, prepared, forced = make().eval(), make().eval(), make().eval()
        base = Pipeline.from_config(steps)
        base.apply(plain, known_issues="ignore")
        choice = Pipeline.from_config({**steps, "rewrite_conv": {}})
        choice.apply(prepared, example=x, known_issues="ignore")
        force = Pipeline.from_config({**steps, "rewrite_conv": {"force": True}})
        force.apply(forced, known_issues="ignore")
        given = base.format(x) if steps else x
        times = rounds(
            {
                "conv": call_of(plain, given, "forward"),
                "rewrite": call_of(forced, given, "forward"),
            },
            seconds,
        )
        yield {
            "layer": f"{conv.__name__}({channels}, {outputs}, {kernel})",
            "input": list(x.shape),
            "channels-last": bool(steps),
            "rewrite / convolution": ratio(times, "rewrite", "conv"),
            "chosen": type(prepared[0]) is not conv,
        }


def write(part: str, rows: Iterator[dict[str, Any]]) -> None:
    """Write a part of the results, line by line."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found[part] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "rows": [],
    }
    for row in rows:
        print(row, flush=True)
        found[part]["rows"].append(row)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def table(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> list[str]:
    """Return rows as a table in Markdown; what a row has not is empty."""
    body = ([str(row.get(key, "")) for key in keys] for row in rows)
    return [f"| {' | '.join(cells)} |" for cells in (keys, ["---"] * len(keys), *body)]


def table_of_layers(found: dict[str, Any]) -> list[str]:
    """Return the table of single convolutions, with the ratio beside busy processes in its last column."""
    beside = (row[FASTER[1]] for row in found["busy"]["rows"])
    rows = zip(found["layers"]["rows"], beside, strict=True)
    return table([{**row, BUSY: ratio} for row, ratio in rows], (*HEAD, BUSY))


def table_of_limits(found: dict[str, Any]) -> list[str]:
    """Return in a sentence how far the rewrites are from a product alone."""
    key = "rewrite / F.linear"
    ratios = sorted(
        row[key] for part in ("layers", "busy") for row in found[part]["rows"] if key in row
    )
    text = (
        f"{ratios[0]} to {ratios[-1]} times that of `F.linear` alone on matrices of the same sizes"
    )
    return [f"The time of Qwen's rewritten patch embeddings is {text}, quiet and busy."]


def table_of_networks(found: dict[str, Any]) -> list[str]:
    """Return the table of whole networks."""
    keys = ("network", "dtype", "unprepared", COMPILED, *KINDS, "A/A", "faster", "difference")
    return table(found["networks"]["rows"], keys)


def table_of_choices(found: dict[str, Any]) -> list[str]:
    """Return in a sentence how many choices over the held-out shapes were right."""
    rows = found["heldout"]["rows"]
    wins = [row for row in rows if row["rewrite / convolution"] < 0.9]
    chosen = [row for row in rows if row["chosen"]]
    wrong = [row for row in chosen if row["rewrite / convolution"] > 1.03]
    right = sum(row["chosen"] for row in wins)
    text = f"{right} of {len(wins)} wins of more than 10 % were chosen, and {len(wrong)} of {len(chosen)}"
    return [f"Over {len(rows)} held-out shapes {text} chosen ones were more than 3 % slower."]


if __name__ == "__main__":
    what = sys.argv[1] if len(sys.argv) > 1 else "layers"
    seconds = [float(each) for each in sys.argv[2:]]
    parts = {
        "layers": layers,
        "busy": layers_busy,
        "networks": networks,
        "heldout": lambda *a: held_out(60, *a),
    }
    write(what, parts[what](*seconds))
