"""The table of probes: one for each known issue that can be shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from prepare.core.model.known_issues import REPAIR_STEP
from prepare.core.utils.text import first_line, size
from prepare.stages.doctor.cases import CaseOutcome, OperationCase, judge, loses_layout, pace

Run = Callable[[str], Iterator[CaseOutcome]]
_BFLOAT16 = "bfloat16"
# The reported size of a Conv3d that is wrong in 16 bits, and a small one.
_CHANNELS, _KERNEL = 16, (1, 3, 3)
_LARGE, _SMALL = (1, _CHANNELS, 124, 1282, 722), (1, _CHANNELS, 12, 66, 66)


@dataclass(frozen=True)
class Probe:
    """A question that a child process answers. `where` names the operation, `seconds` limits its time."""

    where: str
    run: Run
    seconds: float = 30.0


def _judged(*cases: OperationCase) -> Run:
    return lambda device: (judge(case, device) for case in cases)


def _inexact(*cases: OperationCase) -> Run:
    judged = _judged(*cases)
    return lambda device: (
        replace(
            each,
            bad=each.bad.replace("wrong", "inexact"),
            text=each.text.replace("wrong", "inexact"),
        )
        for each in judged(device)
    )


def _kept(*cases: OperationCase) -> Run:
    return lambda device: (loses_layout(case, device) for case in cases)


def _slower(
    where: str,
    case: OperationCase,
    *,
    factor: float = 2.0,
    than: str = "contiguous",
    change: Callable[[nn.Module], None] | None = None,
    **other: Any,
) -> Probe:
    """Time a case against the same with `other` fields, whose module `change` changes; or contiguous."""
    control = replace(case, **(other if other or change else {"format": "contiguous"}))
    return Probe(
        where,
        lambda device: iter([pace(case, control, device, factor=factor, than=than, change=change)]),
    )


def _repair(module: nn.Module) -> None:
    from prepare.pipeline import Pipeline

    Pipeline.from_config({REPAIR_STEP: {"force": True}}).apply(module, known_issues="ignore")


def _computed_weight(device: str) -> Iterator[CaseOutcome]:
    """Compute a weight by weight_norm from channels-last tensors, and look at its strides."""
    module = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3)).to(device)
    original = module.parametrizations.weight.original1
    original.data = original.data.to(memory_format=torch.channels_last)
    kept = module.weight.is_contiguous(memory_format=torch.channels_last)
    text = f"weight_norm {'keeps' if kept else 'loses'} channels_last"
    yield CaseOutcome("" if kept else "lost here", text)


def _gradient_of_tokens(device: str) -> Iterator[CaseOutcome]:
    """Give a contiguous batch norm a gradient that comes through tokens, and one that is contiguous."""
    torch.manual_seed(0)
    given, right = torch.randn(1, 16, 8, 8, device=device), torch.randn(1, 16, 8, 8, device=device)
    tokens = right.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).unflatten(2, (8, 8))
    gradients: list[Any] = []
    for gradient in (right, tokens):
        norm = nn.BatchNorm2d(16).to(device)
        gradients += torch.autograd.grad(norm(given), norm.bias, gradient)
    worst = float((gradients[1] - gradients[0]).abs().max() / gradients[0].abs().max())
    text = f"the same gradient in another layout changes that of bias by {worst:.1e} of its size"
    yield CaseOutcome("" if worst < 1e-4 else "wrong here", text)


def _grouped_view(device: str) -> Iterator[CaseOutcome]:
    """Give a grouped convolution one sample, and the same with another stride over the batch."""
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 8, 1, groups=2).double().to(device)
    nn.utils.convert_conv2d_weight_memory_format(conv, torch.channels_last)
    given = torch.randn(1, 8, 4, 6, device=device).double()
    given = given.to(memory_format=torch.channels_last)
    view = given.as_strided(given.shape, (8, *given.stride()[1:]))
    right, seen = (
        torch.autograd.grad(conv(x).square().sum(), conv.weight)[0] for x in (given, view)
    )
    worst = float((seen - right).abs().max() / right.abs().max())
    text = (
        f"the same sample as a view changes the gradient of the weight by {worst:.1e} of its size"
    )
    yield CaseOutcome("" if worst < 1e-4 else "wrong here", text)


def _large_conv3d(device: str) -> Iterator[CaseOutcome]:
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
                channel = out[:, :, index : index + 1].double().cpu()
                worst = max(worst, ((channel - exact).abs().max() / exact.abs().max()).item())
        name = "contiguous" if format_ is torch.contiguous_format else "channels_last_3d"
        bad = "wrong here" if not worst < 0.06 else ""
        yield CaseOutcome(bad, f"error {min(worst, 1e18):.1e} ({size(given.nbytes)}, {name})")


def _tf32_conv3d(device: str) -> Iterator[CaseOutcome]:
    """Judge Conv3d with TF32 allowed, at several numbers of channels and kernels."""
    torch.backends.cudnn.allow_tf32 = True
    for channels, kernel in ((8, 3), (32, 3), (64, 1), (32, 5)):
        build = partial(nn.Conv3d, channels, channels, kernel, padding=kernel // 2)
        for format_ in ("contiguous", "channels_last_3d"):
            yield judge(
                OperationCase(build, (2, channels, 8, 8, 8), format_, repeats=1, allowed=0.02),
                device,
            )


def _repeated_forward(device: str) -> Iterator[CaseOutcome]:
    """Run equal forwards of convolutions; their outputs must be equal bit by bit."""
    for groups, kernel in ((1, 1), (1, 3), (96, 3)):
        build = partial(nn.Conv2d, 96, 96, kernel, padding=kernel // 2, groups=groups)
        module, given = OperationCase(build, (8, 96, 28, 28)).placed(device)
        with torch.no_grad():
            outputs = [module(given) for _ in range(10)]
        differ = sum(not torch.equal(each, outputs[0]) for each in outputs[1:])
        text = f"{differ} of 9 repeated forwards differ (kernel {kernel}, {groups} groups)"
        yield CaseOutcome("wrong here" if differ else "", text)


def _compiled_transposed(device: str) -> Iterator[CaseOutcome]:
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


def _overflow(device: str) -> Iterator[CaseOutcome]:
    """Give an infinite activation to a batch norm in training, as a float16 overflow does."""
    norm = nn.BatchNorm2d(4).to(device)
    given = torch.ones(1, 4, 8, 8, device=device)
    given[0, 1, 3, 3] = torch.inf
    norm(given)
    kept = bool(torch.isfinite(norm.running_var).all())  # type: ignore[arg-type]
    text = f"the running variance is {'finite' if kept else 'NaN'} after an infinite activation"
    yield CaseOutcome("" if kept else "wrong here", text)


_conv3d = partial(nn.Conv3d, 32, 32, 3, padding=1)
_FLAT, _FLAT_3D = "channels_last", "channels_last_3d"
_VOLUME = (2, 32, 16, 32, 32)

KNOWN: dict[str, Probe] = {
    "instance_norm_gradients_cpu": Probe(
        "InstanceNorm at batch 1",
        _judged(
            OperationCase(partial(nn.InstanceNorm2d, 8), (1, 8, 10, 10), _FLAT),
            OperationCase(partial(nn.InstanceNorm3d, 8), (1, 8, 6, 6, 6), _FLAT_3D),
        ),
    ),
    "group_norm_large_mean_cpu": Probe(
        "GroupNorm of a large mean",
        _judged(
            OperationCase(partial(nn.GroupNorm, 4, 8), (1, 8, 32, 32), _FLAT, mean=1000.0,
                 against_contiguous=True)
        ),
    ),
    "group_norm_frozen_input_cpu": Probe(
        "GroupNorm of an input without a gradient",
        _judged(OperationCase(partial(nn.GroupNorm, 2, 8), (2, 8, 8, 8), _FLAT, trained_input=False)),
    ),
    "conv2d_strided_kernel_1_cpu": Probe(
        "Conv2d, kernel 1 and stride 2, of few channels",
        _judged(OperationCase(partial(nn.Conv2d, 3, 64, 1, stride=2), (2, 3, 128, 128), _FLAT, repeats=20)),
    ),
    "norm_gradient_of_tokens_cpu": Probe("BatchNorm2d below tokens, at batch 1", _gradient_of_tokens),
    "conv2d_grouped_view_cpu": Probe("a grouped Conv2d of a view, at batch 1", _grouped_view),
    "batch_norm_sums_cpu": Probe(
        "BatchNorm in training, of a large batch",
        _inexact(
            OperationCase(partial(nn.BatchNorm2d, 16), (4, 16, 128, 128), _FLAT, mean=10.0,
                 against_contiguous=True, allowed=1e-6)
        ),
    ),
    "instance_norm_copies": Probe(
        "InstanceNorm", _kept(OperationCase(partial(nn.InstanceNorm3d, 8), (2, 8, 6, 6, 6), _FLAT_3D))
    ),
    "conv3d_reference_cpu": Probe(
        "a small Conv3d at batch 1",
        _kept(OperationCase(partial(nn.Conv3d, 16, 16, 3, padding=1), (1, 16, 8, 8, 8), _FLAT_3D)),
    ),
    "conv2d_few_pixels_cpu": _slower(
        "Conv2d with few output pixels",
        OperationCase(lambda: nn.Sequential(nn.Conv2d(2048, 512, 1)), (1, 2048, 7, 7), _FLAT),
        factor=1.25, than="its repair", change=_repair,
    ),
    "pooling_3d_layout": Probe(
        "AvgPool3d and adaptive pooling",
        _kept(
            OperationCase(partial(nn.AvgPool3d, 2), (2, 8, 6, 6, 6), _FLAT_3D),
            OperationCase(partial(nn.AdaptiveAvgPool3d, 2), (2, 8, 6, 6, 6), _FLAT_3D),
        ),
    ),
    "softmax_layout": Probe(
        "Softmax", _kept(OperationCase(partial(nn.Softmax, dim=1), (2, 8, 6, 6), _FLAT))
    ),
    "circular_pad_layout": Probe(
        "CircularPad", _kept(OperationCase(partial(nn.CircularPad2d, 1), (2, 8, 6, 6), _FLAT))
    ),
    "layer_norm_layout": Probe(
        "LayerNorm over (C, H, W)",
        _kept(OperationCase(partial(nn.LayerNorm, (8, 6, 6)), (2, 8, 6, 6), _FLAT)),
    ),
    "computed_weight_layout": Probe("a computed weight", _computed_weight),
    "conv3d_bfloat16_small_cpu": Probe(
        "Conv3d with an input smaller than its kernel",
        _judged(
            OperationCase(partial(nn.Conv3d, 64, 64, 3, padding=1), (2, 64, 2, 2, 2), _FLAT_3D, _BFLOAT16,
                 repeats=20, allowed=0.5)
        ),
    ),
    "depthwise_transposed_conv3d_cpu": Probe(
        "depthwise ConvTranspose3d",
        _judged(
            OperationCase(partial(nn.ConvTranspose3d, 64, 64, 7, stride=2, padding=3, groups=64),
                 (2, 64, 4, 4, 4), _FLAT_3D, repeats=20)
        ),
    ),
    "conv_bfloat16_avx2_cpu": _slower(
        "Conv2d in bfloat16", OperationCase(partial(nn.Conv2d, 32, 32, 3), (2, 32, 32, 32), _FLAT, _BFLOAT16),
        than="float32", dtype="float32",
    ),
    "conv3d_float16_cpu": _slower(
        "Conv2d in float16", OperationCase(partial(nn.Conv2d, 32, 32, 3), (2, 32, 32, 32), _FLAT, "float16"),
        than="float32", dtype="float32",
    ),
    "conv3d_contiguous_mps": Probe(
        "Conv3d", _judged(*(OperationCase(partial(nn.Conv3d, n, n, 3), (1, n, 8, 8, 8)) for n in (4, 16, 32)))
    ),
    "batch_norm_backward_mps": Probe(
        "BatchNorm2d", _judged(OperationCase(partial(nn.BatchNorm2d, 8), (4, 8, 16, 16), _FLAT))
    ),
    "convolution_layout_xpu": Probe(
        "Conv2d with one input channel, or kernel 1",
        _judged(
            OperationCase(partial(nn.Conv2d, 1, 8, 3), (2, 1, 16, 16), _FLAT),
            OperationCase(partial(nn.Conv2d, 8, 8, 1), (2, 8, 16, 16), _FLAT),
        ),
    ),
    "conv3d_without_cudnn": _slower(
        "Conv3d in 16 bits", OperationCase(_conv3d, _VOLUME, "contiguous", _BFLOAT16),
        than=_FLAT_3D, format=_FLAT_3D,
    ),
    "conv3d_large_16_bit": Probe("Conv3d in 16 bits at large sizes", _large_conv3d),
    "conv3d_tf32": Probe("Conv3d with TF32", _tf32_conv3d),
    "conv2d_engine_5": Probe("Conv2d, forward twice", _repeated_forward),
    "conv2d_engine_5_off": _slower(
        "depthwise Conv2d in bfloat16",
        OperationCase(partial(nn.Conv2d, 96, 96, 3, groups=96), (16, 96, 56, 56), _FLAT, _BFLOAT16),
        than="float32", dtype="float32",
    ),
    "group_norm_layout_cuda": Probe(
        "GroupNorm", _kept(OperationCase(partial(nn.GroupNorm, 4, 8), (2, 8, 8, 8), _FLAT))
    ),
    "conv3d_dilated_bias": _slower(
        "dilated Conv3d with a bias",
        OperationCase(partial(_conv3d, dilation=2), _VOLUME, "contiguous", _BFLOAT16),
        than="bias=False", build=partial(_conv3d, dilation=2, bias=False),
    ),
    "conv2d_grouped_channels_last": _slower(
        "grouped Conv2d",
        OperationCase(partial(nn.Conv2d, 128, 128, 3, groups=32), (8, 128, 56, 56), _FLAT, _BFLOAT16),
    ),
    "conv2d_large_depthwise_channels_last": _slower(
        "depthwise Conv2d with a large kernel",
        OperationCase(partial(nn.Conv2d, 256, 256, 9, groups=256), (8, 256, 40, 40), _FLAT, _BFLOAT16),
    ),
    "upsample_nearest_channels_last": _slower(
        "Upsample, nearest",
        OperationCase(partial(nn.Upsample, scale_factor=2), (1, 192, 120, 208), _FLAT, _BFLOAT16),
        factor=1.25,
    ),
    "avg_pool2d_padded_backward": Probe(
        "AvgPool2d with padding",
        _judged(OperationCase(partial(nn.AvgPool2d, 2, stride=1, padding=1), (2, 8, 9, 9), _FLAT)),
    ),
    "conv_transpose2d_compiled": Probe("compiled ConvTranspose2d", _compiled_transposed, 100.0),
    "batch_norm_statistics_float16": Probe("BatchNorm2d after an overflow", _overflow),
    "channels_last_ignored_rocm": Probe(
        "Conv2d", _kept(OperationCase(partial(nn.Conv2d, 8, 16, 3), (2, 8, 16, 16), _FLAT))
    ),
    "channels_last_slow_rocm": _slower(
        "Conv2d", OperationCase(partial(nn.Conv2d, 64, 64, 3, padding=1), (8, 64, 56, 56), _FLAT, _BFLOAT16),
        factor=1.25,
    ),
    "avg_pool2d_backward_mps": Probe(
        "AvgPool2d", _judged(OperationCase(partial(nn.AvgPool2d, 2), (4, 3, 8, 8), _FLAT))
    ),
    "hardswish_backward_mps": Probe("Hardswish", _judged(OperationCase(nn.Hardswish, (4, 3, 8, 8), _FLAT))),
}  # fmt: skip
