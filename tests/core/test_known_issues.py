"""Each known issue is true of this torch, and its entry is complete."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import convert_conv3d_weight_memory_format

from issue_checks import FLAT, gradient, is_last, last, with_norm
from paths import PYTHONPATH
from prepare.core.model.known_issues import IN_PLAN, ONLY, issues, make_issue, standing
from prepare.steps import repairs

BY_NAME = {issue.name: issue for issue in issues()}
HERE = {issue.name for issue in standing("cpu")}


def loses_layout(module, shape):
    return not is_last(module(last(torch.randn(shape))))


def instance_norm_has_wrong_gradients():
    reference, flat = gradient(with_norm(nn.InstanceNorm2d(8))), with_norm(nn.InstanceNorm2d(8))
    FLAT.apply(flat, known_issues="ignore")
    return (gradient(flat) - reference).abs().max() > 0.1 * reference.abs().max()


def group_norm_is_wrong_at_large_means():
    torch.manual_seed(0)
    given = torch.randn(1, 8, 32, 32) + 1000
    norm = nn.GroupNorm(4, 8)
    exact = norm.double()(given.double())
    norm.float()
    return (norm(last(given)) - exact).abs().max() > 100 * (norm(given) - exact).abs().max()


def batch_norm_loses_digits():
    torch.manual_seed(0)
    given, grad = torch.randn(4, 16, 128, 128) + 10, torch.randn(4, 16, 128, 128)

    def weight_gradient(given, grad):
        norm = nn.BatchNorm2d(16).to(given.dtype)
        norm(given).backward(grad)
        return norm.weight.grad.double()

    exact = weight_gradient(given.double(), grad.double())
    own, flat = weight_gradient(given, grad), weight_gradient(last(given), last(grad))
    return (flat - exact).abs().max() > 4 * (own - exact).abs().max()


def a_small_convolution_takes_the_reference_kernel():
    backend = torch._C._select_conv_backend(
        *(last(torch.randn(1, 16, 8, 8, 8)), last(torch.randn(16, 16, 3, 3, 3)), None),
        *([1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1),
    )
    return backend == torch._C._ConvBackend.Slow3d


def a_computed_weight_comes_out_contiguous():
    module = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3))
    original = module.parametrizations.weight.original1
    original.data = last(original.data)
    return not is_last(module.weight)


def _is_garbage(module, given, *, dtype=torch.float32):
    def weight_gradient(module, given):
        loss = module(given).float().square().mean()
        return torch.autograd.grad(loss, module.weight)[0].float()

    exact = weight_gradient(module, given)
    convert_conv3d_weight_memory_format(module, torch.channels_last_3d)
    found = weight_gradient(module.to(dtype), given.to(dtype))
    return not (found - exact).abs().max() < 0.5 * exact.abs().max()


def a_small_activation_in_bfloat16_gives_garbage():
    torch.manual_seed(0)
    return _is_garbage(
        nn.Conv3d(64, 64, 3, padding=1), torch.randn(2, 64, 2, 2, 2), dtype=torch.bfloat16
    )


def a_depthwise_transposed_convolution_gives_garbage():
    torch.manual_seed(0)
    module = nn.ConvTranspose3d(64, 64, 7, stride=2, padding=3, groups=64)
    return _is_garbage(module, torch.randn(2, 64, 4, 4, 4))


def an_infinite_activation_stays_in_the_statistics():
    norm = nn.BatchNorm2d(2)
    norm(torch.full((1, 2, 4, 4), torch.inf))
    return not torch.isfinite(norm.running_var).all()


def ends_the_process(module, shape):
    """Nothing to compare: `in_a_process` sees the end."""
    module(last(torch.randn(shape))).square().mean().backward()
    return False


def a_contiguous_norm_misreads_a_gradient_of_tokens():
    torch.manual_seed(0)
    given, right = torch.randn(1, 16, 8, 8), torch.randn(1, 16, 8, 8)
    tokens = right.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).unflatten(2, (8, 8))
    assert torch.equal(tokens, right)
    norms = [nn.BatchNorm2d(16), nn.BatchNorm2d(16)]
    for norm, grad in zip(norms, (right, tokens), strict=True):
        norm(given).backward(grad)
    exact, found = (norm.bias.grad for norm in norms)
    return (found - exact).abs().max() > 0.1 * exact.abs().max()


def a_grouped_convolution_misreads_one_sample():
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 8, 1, groups=2).to(memory_format=torch.channels_last)
    tokens = torch.randn(1, 24, 8)
    view = tokens.transpose(1, 2).reshape(1, 8, 4, 6)
    assert view.is_contiguous(memory_format=torch.channels_last)
    gradients = [
        torch.autograd.grad(conv(x).square().sum(), conv.weight)[0]
        for x in (view.contiguous(), view)
    ]
    return (gradients[1] - gradients[0]).abs().max() > 0.1 * gradients[0].abs().max()


def a_grouped_dilated_convolution_reads_unset_memory(kind=nn.Conv2d):
    torch.manual_seed(0)
    rank, memory_format = (4, "channels_last") if "2d" in kind.__name__ else (5, "channels_last_3d")
    flat, shape = (1,) * (rank - 4), (2, 32, *(1,) * (rank - 4), 48, 40)
    conv = kind(32, 32, (*flat, 3, 3), dilation=(*flat, 2, 2), groups=4, bias=False).bfloat16()
    given = torch.randn(shape).bfloat16()
    seen = []
    for module in (conv, copy.deepcopy(conv).to(memory_format=getattr(torch, memory_format))):
        junk = [torch.full((n,), torch.nan) for n in range(100, 5000, 100)]
        del junk
        loss = module(given).float().square().mean()
        seen.append(torch.autograd.grad(loss, module.weight)[0].double())
    exact, found = seen
    return not (found - exact).abs().max() < 0.1 * exact.abs().max()


REPRODUCED = {
    "conv2d_grouped_dilated_bfloat16_cpu": a_grouped_dilated_convolution_reads_unset_memory,
    "conv_grouped_dilated_bfloat16_cpu": lambda: any(
        a_grouped_dilated_convolution_reads_unset_memory(kind)
        for kind in (nn.ConvTranspose2d, nn.Conv3d, nn.ConvTranspose3d)
    ),
    "conv2d_grouped_view_cpu": a_grouped_convolution_misreads_one_sample,
    "group_norm_frozen_input_cpu": lambda: ends_the_process(nn.GroupNorm(2, 8), (2, 8, 8, 8)),
    "conv2d_strided_kernel_1_cpu": lambda: ends_the_process(
        nn.Conv2d(3, 64, 1, 2).to(memory_format=torch.channels_last), (2, 3, 128, 128)
    ),
    "norm_gradient_of_tokens_cpu": a_contiguous_norm_misreads_a_gradient_of_tokens,
    "batch_norm_sums_cpu": batch_norm_loses_digits,
    "batch_norm_statistics_float16": an_infinite_activation_stays_in_the_statistics,
    "conv3d_bfloat16_small_cpu": a_small_activation_in_bfloat16_gives_garbage,
    "depthwise_transposed_conv3d_cpu": a_depthwise_transposed_convolution_gives_garbage,
    "instance_norm_gradients_cpu": instance_norm_has_wrong_gradients,
    "group_norm_large_mean_cpu": group_norm_is_wrong_at_large_means,
    "instance_norm_copies": lambda: loses_layout(nn.InstanceNorm3d(8), (2, 8, 6, 6, 6)),
    "conv3d_reference_cpu": a_small_convolution_takes_the_reference_kernel,
    "pooling_3d_layout": lambda: loses_layout(nn.AvgPool3d(2), (2, 8, 6, 6, 6)),
    "softmax_layout": lambda: loses_layout(nn.Softmax(dim=1), (2, 8, 6, 6)),
    "computed_weight_layout": a_computed_weight_comes_out_contiguous,
    "circular_pad_layout": lambda: loses_layout(nn.CircularPad2d(1), (2, 8, 6, 6)),
}
# Known of other devices, or a matter of time alone, which no test asserts.
OF_TIME = {
    "conv2d_few_pixels_cpu",
    "conv3d_float16_cpu",
    "conv_bfloat16_avx2_cpu",
    "conv_kernel_is_stride",
}
NOT_HERE = {issue.name for issue in issues() if not issue.checked}
OVERWRITE = {issue.name for issue in issues() if issue.part == "memory"}
NEEDS_BFLOAT16 = {
    "conv2d_grouped_dilated_bfloat16_cpu", "conv_grouped_dilated_bfloat16_cpu", "conv3d_bfloat16_small_cpu",
}  # fmt: skip
NEEDS_AVX512 = {"depthwise_transposed_conv3d_cpu"}
CPU = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""


def test_every_entry_is_reproduced_here_or_says_that_it_cannot_be():
    assert set(BY_NAME) == set(REPRODUCED) | NOT_HERE | OF_TIME
    assert NOT_HERE.isdisjoint(REPRODUCED)
    for name in NOT_HERE:
        assert "not run here" in BY_NAME[name].evidence


@pytest.mark.parametrize("name", REPRODUCED)
def test_this_torch_has_what_is_known_of_it(name):
    if name not in HERE:
        pytest.skip("this torch is not in the entry's range")
    if name in NEEDS_BFLOAT16 and "avx512_bf16" not in CPU:
        pytest.skip("other kernels run where the processor has no bfloat16 instructions")
    if name in NEEDS_BFLOAT16 and "amx_bf16" in CPU:
        pytest.skip("other kernels run where the processor has AMX, and they are right")
    if name in NEEDS_AVX512 and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("other kernels run where torch does not use AVX-512")
    has_it = in_a_process(name) if name in OVERWRITE else REPRODUCED[name]()
    assert has_it, f"this torch no longer has {name}: give the entry an `until`"


def in_a_process(name):
    """Of its own, which may break down for what was overwritten in its memory; what is read there may be right."""
    program = (
        "import os, test_known_issues as here\n"
        f"os._exit(3 * any(here.REPRODUCED[{name!r}]() for _ in range(20)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parent, check=False,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
    )  # fmt: skip
    return done.returncode == 3 or done.returncode < 0


ALLOWED = {
    "effect": {"wrong", "inexact", "slow"},
    "part": {"outputs", "gradients", "memory", "time"},
    "backend": {"cpu", "cuda", "rocm", "mps", "xpu"},
    "only": {*ONLY},
    "sizes": {"", *IN_PLAN, "compiled", "first_call", "gradient_of_tokens", "many_rows", "over_2_31",
              "overflow", "view_of_one"},
    "formats": {"contiguous", "channels_last", "channels_last_3d"},
    "dtypes": {"float32", "float16", "bfloat16"},
}  # fmt: skip


@pytest.mark.parametrize("issue", issues(), ids=lambda issue: issue.name)
def test_every_entry_has_evidence_and_names_only_what_exists(issue):
    assert issue.what
    assert issue.evidence
    assert issue.backend
    assert issue.operations
    for field, words in ALLOWED.items():
        value = getattr(issue, field)
        assert {value} <= words if isinstance(value, str) else {*value} <= words, field
    assert {len(issue.cudnn), len(issue.rocm)} <= {0, 2}
    assert not issue.os or (issue.os[0] == "macos" and len(issue.os) == 3)
    assert {kind for kind, _ in issue.cure} <= {"repair", "step", "format", "flag", "version"}
    assert all(issubclass(getattr(nn, operation), nn.Module) for operation in issue.operations)
    assert not issue.repair or issue.repair in repairs.all_repairs()


ENTRY = {key: value for key, value in vars(issues()[0]).items() if key != "name"} | {"cure": {}}


def entry_stands(version="2.13.0", backend="cpu", machine=None, **fields):
    issue = make_issue("one", ENTRY | {"since": "2.3", "until": "2.14"} | fields)
    return issue.stands(backend, version, machine or {})


def test_an_entry_retires_with_the_torch_that_mends_it():
    assert not entry_stands("2.2.1")
    assert entry_stands("2.3.0+cpu")
    assert entry_stands("2.13.0")
    assert not entry_stands("2.14.0")
    assert not entry_stands(backend="cuda")
    assert not standing("cpu", "1.4.0")
    assert standing("cuda:1", "2.13.0")
