"""Time formats with and without repair_layout on a CUDA device: training under autocast, and decoders.

`gpu.py` calls this and keeps its figures in the one file that it writes. The variants of a case run once in
each round, in random order; contiguous runs twice, which shows the noise. Before each call the L2 cache is
overwritten. The file holds the seconds of each call, and the clocks before and after each round; a round in
which the device was throttled is dropped and counted.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from zoo_networks import diffusers, monai, nnunet

from prepare.core.forward.call import tensors_in
from prepare.pipeline import Pipeline

FORMATS = {2: "conv2d_memory_format", 3: "conv3d_memory_format"}
CONTIGUOUS, AGAIN = "contiguous", "contiguous (again)"
LAST, REPAIRED = "channels-last", "channels-last, repaired"
# More bytes than the L2 cache of an H100 (50 MiB) or an H200.
L2_BYTES = 256 << 20
ENOUGH = 5


class Decoder(nn.Module):
    """The decoder of an autoencoder as a module of its own."""

    def __init__(self, autoencoder: nn.Module) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, latents: Tensor) -> Tensor:
        return self.autoencoder.decode(latents, return_dict=False)[0]


@dataclass(frozen=True)
class LayoutCase:
    """A network in training under bfloat16 autocast, or a decoder in bfloat16 without gradients."""

    build: Callable[[], nn.Module]
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    decodes: bool = False
    more: tuple[tuple[str, int], ...] = ()


def decoder(name: str, **options: Any) -> Callable[[], nn.Module]:
    """Return a function that builds the decoder of a diffusers autoencoder."""
    return lambda: Decoder(diffusers(name, **options)())


_FEATURES = (32, 64, 128, 256, 320, 320)
_UNET = {"in_channels": 1, "out_channels": 2, "num_res_units": 2}
_WAN_SMALL = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1,
    "attn_scales": [], "temperal_downsample": [False, True], "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4}  # fmt: skip
_HUNYUAN_SMALL = {"latent_channels": 4, "block_out_channels": [8] * 4, "layers_per_block": 1,
    "norm_num_groups": 4}  # fmt: skip
_TIME = (("timestep", 10),)
CASES = {
    "nnunet plain 3-d": LayoutCase(
        nnunet(3, residual=False, features=_FEATURES[:4]), (3,), (2, 1, 128, 128, 128)
    ),
    "nnunet resenc 2-d": LayoutCase(
        nnunet(2, residual=True, features=_FEATURES[:4]), (2,), (12, 1, 512, 512)
    ),
    "monai unet 3-d": LayoutCase(
        monai("UNet", spatial_dims=3, channels=(32, 64, 128, 256), strides=(2, 2, 2), **_UNET),
        (3,),
        (2, 1, 96, 96, 96),
    ),
    "monai segresnet 3-d": LayoutCase(
        monai("SegResNet", spatial_dims=3, init_filters=32, in_channels=1, out_channels=2),
        (3,),
        (1, 1, 128, 128, 128),
    ),
    "diffusers unet2d": LayoutCase(
        diffusers("UNet2DModel", sample_size=64), (2,), (16, 3, 64, 64), more=_TIME
    ),
    "wan decoder": LayoutCase(
        decoder("AutoencoderKLWan"), (2, 3), (1, 16, 5, 60, 104), decodes=True
    ),
    "hunyuan decoder": LayoutCase(
        decoder("AutoencoderKLHunyuanVideo"), (2, 3), (1, 16, 5, 32, 32), decodes=True
    ),
}
SMALL = {
    "nnunet plain 3-d": LayoutCase(
        nnunet(3, residual=False, features=(4, 8, 8, 8)), (3,), (1, 1, 16, 16, 16)
    ),
    "nnunet resenc 2-d": LayoutCase(
        nnunet(2, residual=True, features=(4, 8, 8, 8)), (2,), (2, 1, 32, 32)
    ),
    "monai unet 3-d": LayoutCase(
        monai("UNet", spatial_dims=3, channels=(4, 8), strides=(2,), **_UNET),
        (3,),
        (1, 1, 16, 16, 16),
    ),
    "monai segresnet 3-d": LayoutCase(
        monai("SegResNet", spatial_dims=3, init_filters=8, in_channels=1, out_channels=2),
        (3,),
        (1, 1, 16, 16, 16),
    ),
    "diffusers unet2d": LayoutCase(
        diffusers(
            "UNet2DModel",
            sample_size=16,
            block_out_channels=(32, 32),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=8,
        ),
        (2,),
        (1, 3, 16, 16),
        more=_TIME,
    ),
    "wan decoder": LayoutCase(
        decoder("AutoencoderKLWan", **_WAN_SMALL), (2, 3), (1, 4, 2, 8, 8), decodes=True
    ),
    "hunyuan decoder": LayoutCase(
        decoder("AutoencoderKLHunyuanVideo", **_HUNYUAN_SMALL),
        (2, 3),
        (1, 4, 2, 4, 4),
        decodes=True,
    ),
}


def measure(
    case: LayoutCase,
    device: str,
    *,
    budget: float,
    clocks: Callable[[], list[str] | None],
    throttled: Callable[[list[str] | None], bool],
) -> dict[str, Any]:
    """Return the seconds of each variant by round, the clocks, and the median ratios to contiguous."""
    torch.manual_seed(0)
    model = case.build().train(not case.decodes)
    if case.decodes:
        model = model.bfloat16()
    formats = {FORMATS[rank]: {} for rank in case.ranks}
    repaired = {**formats, "repair_layout": {"force": True}}
    steps = {CONTIGUOUS: {}, AGAIN: {}, LAST: formats, REPAIRED: repaired}
    calls = {
        name: _call(case, _prepared(model, each, device), device) for name, each in steps.items()
    }
    for call in calls.values():
        call()
        call()
    flush = torch.empty(L2_BYTES if device != "cpu" else 1 << 20, dtype=torch.int8, device=device)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    states, dropped, began = [clocks()], 0, time.perf_counter()
    while time.perf_counter() - began < budget or (
        len(seconds[LAST]) < ENOUGH and dropped < ENOUGH
    ):
        taken = {
            name: _timed(calls[name], flush) for name in random.sample(list(calls), len(calls))
        }
        states.append(clocks())
        if throttled(states[-2]) or throttled(states[-1]):
            dropped += 1
            continue
        for name, value in taken.items():
            seconds[name].append(value)
    ratios = {
        name: statistics.median(a / b for a, b in zip(each, seconds[CONTIGUOUS], strict=True))
        for name, each in seconds.items()
        if each
    }
    return {"shape": case.shape, "decodes": case.decodes, "ratios": ratios, "seconds": seconds,
            "clocks": states, "dropped_rounds": dropped}  # fmt: skip


def line_of(found: dict[str, Any]) -> str:
    """Return the ratios of a case as one line."""
    ratios = ", ".join(f"{name} {value:.2f}" for name, value in found["ratios"].items())
    return f"{ratios or 'no round was left'} ({found['dropped_rounds']} rounds dropped)"


def _prepared(model: nn.Module, steps: dict[str, Any], device: str) -> nn.Module:
    model = copy.deepcopy(model)
    pipeline = Pipeline.from_config(
        {"device": {"device": device}, **steps, "input_format": {"attach": True}}
    )
    return pipeline.apply(model, known_issues="ignore")


def _call(case: LayoutCase, model: nn.Module, device: str) -> Callable[[], None]:
    dtype = torch.bfloat16 if case.decodes else torch.float32
    given = torch.randn(case.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    more = {name: torch.tensor([value], device=device) for name, value in case.more}
    return partial(_decode if case.decodes else _train, model, given, more)


def _decode(model: nn.Module, given: Tensor, more: dict[str, Any]) -> None:
    with torch.no_grad():
        model(given, **more)


def _train(model: nn.Module, given: Tensor, more: dict[str, Any]) -> None:
    model.zero_grad(set_to_none=True)
    with torch.autocast(given.device.type, torch.bfloat16):
        out = model(given, **more)
    first = next(tensors_in(out if isinstance(out, (Tensor, tuple, list)) else vars(out)))
    first.float().square().mean().backward()


def _timed(call: Callable[[], None], flush: Tensor) -> float:
    """Return the seconds of one call that begins with a cold L2 cache."""
    flush.zero_()
    _wait(flush.device)
    began = time.perf_counter()
    call()
    _wait(flush.device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
