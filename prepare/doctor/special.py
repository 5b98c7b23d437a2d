"""Probes that are more than one operation compared with float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from prepare.core.utils.text import first_line, size
from prepare.doctor.cases import CaseOutcome, OperationCase, judge

_CHANNELS, _KERNEL = 16, (1, 3, 3)
_LARGE, _SMALL = (1, _CHANNELS, 124, 1282, 722), (1, _CHANNELS, 12, 66, 66)


def computed_weight(device: str) -> Iterator[CaseOutcome]:
    """Compute a weight by weight_norm from channels-last tensors, and look at its strides."""
    module = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3)).to(device)
    original = module.parametrizations.weight.original1
    original.data = original.data.to(memory_format=torch.channels_last)
    kept = module.weight.is_contiguous(memory_format=torch.channels_last)
    text = f"weight_norm {'keeps' if kept else 'loses'} channels_last"
    yield CaseOutcome("" if kept else "slow here", text)


def large_conv3d(device: str) -> Iterator[CaseOutcome]:
    """Run the reported size, and judge its first, middle and last slices; a small one on a CPU."""
    shape = _SMALL if device == "cpu" else _LARGE
    for format_ in (torch.contiguous_format, torch.channels_last_3d):
        torch.manual_seed(0)
        conv = nn.Conv3d(_CHANNELS, _CHANNELS, _KERNEL, bias=False).bfloat16()
        given = torch.randn(shape, device=device, dtype=torch.bfloat16)
        exact_conv = nn.Conv3d(_CHANNELS, _CHANNELS, _KERNEL, bias=False).double()
        exact_conv.weight.data = conv.weight.data.double()
        with torch.no_grad():
            out = conv.to(device)(given.to(memory_format=format_))
            worst = 0.0
            for index in (0, shape[2] // 2, shape[2] - 1):
                exact = exact_conv(given[:, :, index : index + 1].double().cpu())
                found = out[:, :, index : index + 1].double().cpu()
                worst = max(worst, ((found - exact).abs().max() / exact.abs().max()).item())
        name = "contiguous" if format_ is torch.contiguous_format else "channels_last_3d"
        bad = "wrong here" if not worst < 0.06 else ""
        text = f"error {min(worst, 1e300):.1e} ({size(given.nbytes)}, {name})"
        yield CaseOutcome(bad, text, min(worst, 1e300), 0.06)


def tf32_conv3d(device: str) -> Iterator[CaseOutcome]:
    """Judge Conv3d with TF32 allowed, at several numbers of channels and kernels."""
    torch.backends.cudnn.allow_tf32 = True
    for channels, kernel in ((8, 3), (32, 3), (64, 1), (32, 5)):
        build = partial(nn.Conv3d, channels, channels, kernel, padding=kernel // 2)
        for format_ in ("contiguous", "channels_last_3d"):
            yield judge(
                OperationCase(build, (2, channels, 8, 8, 8), format_, repeats=1, allowed=0.02),
                device,
            )


def repeated_forward(device: str) -> Iterator[CaseOutcome]:
    """Run equal forwards of convolutions; their outputs must be equal bit by bit."""
    for groups, kernel in ((1, 1), (1, 3), (96, 3)):
        build = partial(nn.Conv2d, 96, 96, kernel, padding=kernel // 2, groups=groups)
        module, given = OperationCase(build, (8, 96, 28, 28)).placed(device)
        with torch.no_grad():
            outputs = [module(given) for _ in range(10)]
        differ = sum(not torch.equal(each, outputs[0]) for each in outputs[1:])
        text = f"{differ} of 9 repeated forwards differ (kernel {kernel}, {groups} groups)"
        yield CaseOutcome("wrong here" if differ else "", text)


def compiled_transposed(device: str) -> Iterator[CaseOutcome]:
    """Compile two ConvTranspose2d, and run forward and backward in channels-last."""
    layers = (nn.ConvTranspose2d(32, 16, 5, stride=2), nn.ReLU(), nn.ConvTranspose2d(16, 8, 5))
    module = nn.Sequential(*layers).to(device)
    for layer in (layers[0], layers[2]):
        layer.weight.data = layer.weight.data.to(memory_format=torch.channels_last)
    given = torch.randn(2, 32, 5, 5, device=device).to(memory_format=torch.channels_last)
    try:
        torch.compile(module)(given.requires_grad_()).sum().backward()
    except AssertionError as error:
        yield CaseOutcome("wrong here", f"the backward fails: {first_line(error)}")
    except Exception as error:  # a compiler that cannot run here says nothing about the issue
        yield CaseOutcome("", f"not run: {type(error).__name__}: {first_line(error)}")
    else:
        yield CaseOutcome("", "forward and backward run")


def overflow(device: str) -> Iterator[CaseOutcome]:
    """Give an infinite activation to a batch norm in training, as a float16 overflow does."""
    norm = nn.BatchNorm2d(4).to(device)
    given = torch.ones(1, 4, 8, 8, device=device)
    given[0, 1, 3, 3] = torch.inf
    norm(given)
    kept = bool(torch.isfinite(norm.running_var).all())  # type: ignore[arg-type]
    text = f"the running variance is {'finite' if kept else 'NaN'} after an infinite activation"
    yield CaseOutcome("" if kept else "wrong here", text)
