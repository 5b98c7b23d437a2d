"""torch's own modules, with torch's own inputs: prepared, they compute what they computed before.

The modules and inputs are those of torch's tests (`module_db`), and so is the question of its
`test_memory_format`: outputs, gradients and buffers in channels-last are those of the contiguous module,
and an output is in a memory format that the next convolution accepts.
"""

import copy
import random
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._pytree import tree_leaves, tree_map

from prepare.pipeline import Pipeline

pytest.importorskip("expecttest", reason="torch's own tests ask for it")

# torch's own modules warn of torch's own functions.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
STEPS = {"converted": {}, "repaired": {"repair_layout": {}}, "kept": {"keep_layout": {}}}
DTYPES = (torch.float32, torch.bfloat16)
# Draws random numbers in every forward that do not depend on the layout, or returns uninitialised memory.
RANDOM = (
    nn.RReLU,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
# The seeded part of the samples that the quick tier runs.
PART = 0.02


def copies(tree, dtype: torch.dtype, *, grad: bool = False, channels_last: bool = False):
    """Return `tree` with copies of its tensors: in `dtype`, and as leaves or in channels-last on request."""

    def convert(x):
        if not isinstance(x, torch.Tensor):
            return x
        y = x.detach().clone()
        y = y.to(dtype) if x.is_floating_point() else y
        if channels_last and x.dim() in FORMATS:
            y = y.to(memory_format=FORMATS[x.dim()])
        return y.requires_grad_(grad and x.is_floating_point())

    return tree_map(convert, tree)


def tensors(tree) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def run(module: nn.Module, call: tuple[tuple, dict]) -> dict[str, torch.Tensor]:
    """Return the outputs, the gradients of inputs and parameters, and the buffers."""
    torch.manual_seed(0)
    leaves, outputs = tensors(call), tensors(module(*call[0], **call[1]))
    found = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    if module.training and (roots := [x for x in outputs if x.requires_grad]):
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in roots]
        torch.autograd.backward(roots, grads)
        found |= {
            f"gradient of input {i}": x.grad for i, x in enumerate(leaves) if x.grad is not None
        }
        found |= {
            f"gradient of {n}": p.grad for n, p in module.named_parameters() if p.grad is not None
        }
    return found | {f"buffer {n}": b.clone() for n, b in module.named_buffers()}


def samples(info, dtype: torch.dtype, *, training: bool) -> Iterator[tuple[nn.Module, tuple]]:
    """Yield a module and the inputs of its forward, for each sample that has images or volumes."""
    torch.manual_seed(0)
    for sample in info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
    ):
        call = sample.forward_input
        if call is None:
            continue
        if not {x.dim() for x in tensors((call.args, call.kwargs))} & FORMATS.keys():
            continue
        made = sample.constructor_input
        module = info.module_cls(*made.args, **made.kwargs)
        yield module.train(training).to(dtype), copies((call.args, call.kwargs), dtype)


def prepare(module: nn.Module, steps: dict) -> nn.Module:
    formats = {f"conv{d}d_memory_format": {} for d in (2, 3)}
    return Pipeline.from_config(formats | steps).apply(
        copy.deepcopy(module), strict=False, known_issues="ignore"
    )


def close(
    actual: torch.Tensor, before: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype
) -> bool:
    """Return True if `actual` is `before` up to torch's tolerance, or as near to `exact` as `before` is."""
    try:
        torch.testing.assert_close(actual, before, equal_nan=True, check_stride=False)
    except AssertionError:

        def error(x):
            return (x.double() - exact.double()).abs().nan_to_num(0).max().item()

        largest = exact.double().abs().nan_to_num(0, 0, 0).max().item()
        return error(actual) <= 4 * error(before) + torch.finfo(dtype).eps * largest
    return True


def in_a_format(output: torch.Tensor) -> bool:
    """Return True if a convolution accepts the memory format of `output`; a sample has no batch dimension."""
    batched = [x for x in (output, output.unsqueeze(0)) if x.dim() in FORMATS]
    return output.is_contiguous() or any(
        x.is_contiguous(memory_format=FORMATS[x.dim()]) for x in batched
    )


def differences(
    info, name: str, dtype: torch.dtype, *, training: bool, rng
) -> tuple[int, list[str]]:
    """Return how many tensors were compared, and a line for each that differs."""
    count, wrong = 0, []
    for number, (module, call) in enumerate(samples(info, dtype, training=training)):
        if rng is not None and rng.random() >= PART:
            continue
        try:
            if isinstance(module, LazyModuleMixin):
                module(*call[0], **call[1])  # this initialises its parameters
            before = run(copy.deepcopy(module), copies(call, dtype, grad=training))
            exact = run(copy.deepcopy(module).double(), copies(call, torch.float64, grad=training))
        except (RuntimeError, NotImplementedError):
            continue  # torch has no kernel for this dtype on this device
        prepared = prepare(module, STEPS[name])
        try:
            after = run(prepared, copies(call, dtype, grad=training, channels_last=True))
        except RuntimeError:
            # NLLLoss refuses channels-last inputs in its backward, prepared or not.
            with pytest.raises(RuntimeError):
                run(copy.deepcopy(module), copies(call, dtype, grad=training, channels_last=True))
            continue
        where = f"{info.module_cls.__name__} #{number} {name} {dtype} training={training}"
        assert after.keys() == before.keys(), where
        for key, value in after.items():
            count += 1
            if value.shape != before[key].shape or not close(value, before[key], exact[key], dtype):
                wrong.append(f"{where}: {key}")
            if key.startswith("output") and not in_a_format(value):
                wrong.append(f"{where}: the memory format of {key}")
    return count, wrong


@pytest.fixture(scope="module")
def infos():
    from torch.testing._internal.common_modules import module_db

    # Its import forbids all code of this process to set the flags of a backend.
    vars(torch.backends)["__allow_nonbracketed_mutation_flag"] = True
    return [info for info in module_db if not issubclass(info.module_cls, RANDOM)]


def check(infos, rng=None) -> int:
    total, wrong = 0, []
    for info in infos:
        for name in STEPS:
            for dtype in DTYPES:
                for training in (False, True):
                    count, found = differences(info, name, dtype, training=training, rng=rng)
                    total, wrong = total + count, wrong + found
    assert not wrong, "\n".join(wrong)
    return total


def test_a_part_of_torchs_modules_compute_the_same_when_prepared(infos):
    assert check(infos, random.Random(0)) > 150


@pytest.mark.slow
def test_all_of_torchs_modules_compute_the_same_when_prepared(infos):
    assert check(infos) > 3000
