"""Measure a guard: false alarms, the cost of a look, and the cost of a call with a known key.

    python benchmarks/guard.py all|alarms|cost|key [--looks 2000] [--networks NAME ...]
        [--machine quiet] [--json FILE]

`all` takes about 10 minutes. With `--json` the figures are written into FILE, those of a quiet and of a busy
machine side by side; what is not measured stays there.

`alarms` serves and trains small networks, each prepared in channels-last and repaired, in float32, in
bfloat16 and under autocast, with inputs of changing sizes; every module of every call is looked at.
`cost` trains networks of real size: the CPU time of looking at every module once, as a part of 1,000 steps,
and the part of the time of a minute of steps that looks take with the default options. `key` times a call of
a guarded model whose forward does nothing, with a key that is known, and without the guard.
"""

import argparse
import json
import math
import os
import random
import time
import timeit
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prepare.core.utils.environment import environment
from prepare.models.resnet import ResNet2d
from prepare.models.unet import UNet2d, UNet3d
from prepare.pipeline import Pipeline

_LAST = {
    "conv2d_memory_format": {},
    "conv3d_memory_format": {},
    "repair_layout": {},
    "input_format": {"attach": True},
}
_HALF = {"half": {"dtype": "bfloat16"}}
# Steps, the dtype of autocast, and whether the network is trained.
WAYS: dict[str, tuple[dict[str, Any], torch.dtype | None, bool]] = {
    "float32, serving": (_LAST, None, False),
    "float32, training": (_LAST, None, True),
    "bfloat16, serving": (_LAST | _HALF, None, False),
    "bfloat16, training": (_LAST | _HALF, None, True),
    "autocast, serving": (_LAST, torch.bfloat16, False),
    "autocast, training": (_LAST, torch.bfloat16, True),
}


class Attention(nn.Module):
    """A small vision transformer: patches, two blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, stride=4)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of five classes."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(tokens).mean(1))


class ConvNext(nn.Module):
    """Depthwise convolutions with layer norms over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, stride=4)
        self.deep, self.norm = nn.Conv2d(16, 16, 7, padding=3, groups=16), nn.LayerNorm(16)
        self.wide, self.act, self.narrow = nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of five classes."""
        x = self.stem(x)
        for _ in range(2):
            y = self.norm(self.deep(x).permute(0, 2, 3, 1))
            x = x + self.narrow(self.act(self.wide(y))).permute(0, 3, 1, 2)
        return self.head(x.mean((2, 3)))


class Convolutional(nn.Sequential):
    """Convolutions with one kind of norm and activation, a pool and an upsampling."""

    def __init__(self, rank: int, norm: type[nn.Module], act: nn.Module, *args: int) -> None:
        conv, transposed = (
            (nn.Conv2d, nn.Conv3d)[rank - 2],
            (nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 2],
        )
        pool = (nn.MaxPool2d, nn.AvgPool3d)[rank - 2]
        super().__init__(
            conv({2: 3, 3: 1}[rank], 16, 3, padding=1), norm(*args, 16), act, pool(2),
            conv(16, 16, 3, padding=1, groups=4), norm(*args, 16), act, transposed(16, 8, 2, stride=2),
            nn.Upsample(scale_factor=2, mode="nearest"), conv(8, 4, 1), nn.Softmax(1),
        )  # fmt: skip


def _monai(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import monai.networks.nets

        return getattr(monai.networks.nets, name)(**options)

    return build


_TWO = {"in_channels": 1, "out_channels": 2}
_UNET = {"channels": (4, 8, 16), "strides": (2, 2)}
# The builder, the rank, and the channels of the input.
SMALL: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "unet2d": (lambda: UNet2d(3, width=8, depth=2), 2, 3),
    "unet2d group": (lambda: UNet2d(3, width=8, depth=2, norm="group"), 2, 3),
    "unet3d": (lambda: UNet3d(1, width=4, depth=2), 3, 1),
    "unet3d instance": (lambda: UNet3d(1, width=4, depth=2, norm="instance"), 3, 1),
    "resnet": (lambda: ResNet2d(3, width=8), 2, 3),
    "attention": (Attention, 2, 3),
    "convnext": (ConvNext, 2, 3),
    "batch norm, silu": (lambda: Convolutional(2, nn.BatchNorm2d, nn.SiLU()), 2, 3),
    "instance norm, leaky": (lambda: Convolutional(2, nn.InstanceNorm2d, nn.LeakyReLU()), 2, 3),
    "group norm, gelu": (lambda: Convolutional(2, nn.GroupNorm, nn.GELU(), 4), 2, 3),
    "batch norm 3d, relu": (lambda: Convolutional(3, nn.BatchNorm3d, nn.ReLU()), 3, 1),
    "instance norm 3d, elu": (lambda: Convolutional(3, nn.InstanceNorm3d, nn.ELU()), 3, 1),
    "group norm 3d, mish": (lambda: Convolutional(3, nn.GroupNorm, nn.Mish(), 4), 3, 1),
    "monai unet": (_monai("UNet", spatial_dims=3, **_TWO, **_UNET, num_res_units=1), 3, 1),
    "monai unet 2d": (_monai("UNet", spatial_dims=2, **_TWO, **_UNET, norm="batch"), 2, 1),
    "monai attention unet": (_monai("AttentionUnet", spatial_dims=2, **_TWO, **_UNET), 2, 1),
    "monai segresnet": (
        _monai(
            "SegResNet", spatial_dims=3, init_filters=8, blocks_down=(1, 1), blocks_up=(1,), **_TWO
        ),
        3,
        1,
    ),
    "monai autoencoder": (
        _monai("AutoEncoder", spatial_dims=2, **_TWO, channels=(4, 8), strides=(2, 2)),
        2,
        1,
    ),
    "monai dynunet": (
        _monai(
            "DynUNet",
            spatial_dims=3,
            **_TWO,
            kernel_size=(3, 3, 3),
            strides=(1, 2, 2),
            upsample_kernel_size=(2, 2),
            filters=(8, 16, 32),
        ),
        3,
        1,
    ),
    "monai densenet": (
        _monai(
            "DenseNet",
            spatial_dims=2,
            in_channels=1,
            out_channels=2,
            init_features=8,
            growth_rate=4,
            block_config=(2, 2),
        ),
        2,
        1,
    ),
}


def alarms(names: list[str], looks: int) -> Iterator[dict[str, Any]]:
    """Yield the looks and the differences of each network in each way."""
    for name in names:
        for way in WAYS:
            start = time.process_time()
            guard = _looked_at(name, way, -(-looks // len(WAYS)))
            yield {
                "network": name,
                "way": way,
                "looks": guard.looks,
                "differences": [str(found) for found in guard.differences],
                "left_out": guard.left_out,
                "cpu_seconds": round(time.process_time() - start, 1),
            }


def _looked_at(name: str, way: str, looks: int) -> Any:
    build, rank, channels = SMALL[name]
    steps, autocast, training = WAYS[way]
    torch.manual_seed(0)
    numbers = random.Random(f"{name} {way}")
    model = build().train(training)
    pipeline = Pipeline.from_config(steps)
    pipeline.apply(model, strict=False, known_issues="ignore")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = pipeline.guard(model, every=1, on_difference="warn", seconds=1e9, share=math.inf)
    calls = 0
    with guard:
        while guard.looks < looks and calls < looks:
            calls += 1
            size = [
                numbers.choice((8, 16, 24) if rank == 3 else (16, 24, 32, 40, 48))
                for _ in range(rank)
            ]
            batch = torch.randn(numbers.choice((1, 2, 3)), channels, *size) * 2 ** numbers.uniform(
                -3, 3
            )
            guard._known.clear()  # each call is that of a new key
            with (
                torch.set_grad_enabled(training),
                torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None),
            ):
                try:
                    output = model(batch)
                except ValueError:  # a norm refuses one value per channel
                    continue
            if training:
                output.float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            guard()
    return guard


# The time of steps with the default options.
_SECONDS = 60.0


def cost(names: list[str]) -> Iterator[dict[str, Any]]:
    """Yield, for networks of real size, the CPU seconds of a training step and of looking at each module."""
    from zoo_networks import NETWORKS

    for name in names:
        network = NETWORKS[name]
        torch.manual_seed(0)
        model, batch = network.build().train(), network.batch()
        pipeline = Pipeline.from_config(_LAST)
        pipeline.apply(model, strict=False, known_issues="ignore")
        step = _trainer(model, batch)
        step()
        plain = [_cpu(step) for _ in range(3)]
        guard = pipeline.guard(
            model, every=1, on_difference="warn", seconds=1e9, max_bytes=1 << 32, share=math.inf
        )
        step()
        looking = _cpu(guard)
        record = _cpu(step) - min(plain)
        guard()
        guard.remove()
        start = time.perf_counter()
        with pipeline.guard(model, on_difference="warn") as default:
            steps = 0
            while time.perf_counter() - start < _SECONDS:
                step()
                steps += 1
        elapsed = time.perf_counter() - start
        yield {
            "network": name,
            "step": plain,
            "looks": guard.looks // 2,
            "look_at_all": looking,
            "recording": record,
            "share_of_1000_steps": (looking + max(record, 0.0)) / 1000 / min(plain),
            "default": {
                "steps": steps,
                "looks": default.looks,
                "share": default.seconds_used / elapsed,
                "says": next(
                    line for line in str(default).splitlines() if "training" in line
                ).strip(),
            },
            "left_out": guard.left_out,
            "differences": [str(found) for found in guard.differences],
        }


def _trainer(model: nn.Module, batch: Any) -> Callable[[], None]:
    from prepare.core.forward.call import call_of
    from prepare.core.forward.nested import tensors_in

    call = call_of(batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)

    def step() -> None:
        outputs = model(*call.args, **call.kwargs)
        sum(t.square().mean() for t in tensors_in(outputs) if t.is_floating_point()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _cpu(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


class _Nothing(nn.Module):
    """Returns its input, so that only the call itself counts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x


def key() -> Iterator[dict[str, Any]]:
    """Yield the CPU microseconds of a call with a known key, interleaved with one without a guard."""
    batch = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    plain, other, guarded = (_Nothing().eval() for _ in range(3))
    pipeline = Pipeline.from_config({"conv2d_memory_format": {}})
    pipeline.apply(guarded)
    guard = pipeline.guard(guarded)
    with torch.no_grad():
        guarded(batch)
        timers = {
            name: timeit.Timer(lambda model=model: model(batch), timer=time.process_time)
            for name, model in {"plain": plain, "again": other, "guarded": guarded}.items()
        }
        times: dict[str, list[float]] = {name: [] for name in timers}
        for _ in range(25):
            for name, timer in timers.items():
                times[name].append(timer.timeit(4000) / 4000 * 1e6)
    least = {name: min(values) for name, values in times.items()}
    yield {
        "microseconds": times,
        "look_up": least["guarded"] - least["plain"],
        "control": least["again"] - least["plain"],
        "looks": guard.looks,
    }


def main() -> None:
    """Measure, print each result, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["all", "alarms", "cost", "key"])
    parser.add_argument("--looks", type=int, default=2000, help="looks for each network")
    parser.add_argument("--networks", nargs="*", help="by default all small ones, or two real ones")
    parser.add_argument("--machine", choices=["quiet", "busy"], default="busy")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    real = ["transformers resnet-50", "monai segresnet 3-d"]
    parts = {
        "key": key,
        "cost": lambda: cost(options.networks or real),
        "alarms": lambda: alarms(options.networks or list(SMALL), options.looks),
    }
    for part in parts if options.what == "all" else [options.what]:
        load, results = os.getloadavg()[0], []
        for result in parts[part]():
            print(json.dumps(result), flush=True)
            results.append(result)
        if options.json:
            measured = {"load": load, "environment": environment(), "results": results}
            write(options.json, options.machine, part, measured)


def write(file: Path, machine: str, part: str, measured: dict[str, Any]) -> None:
    """Put what was measured into the file, in place of the same part on such a machine."""
    found = json.loads(file.read_text()) if file.exists() else {}
    found.setdefault(machine, {})[part] = measured
    file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
