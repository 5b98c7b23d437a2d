"""Facts about torch's operators: the copies inside each, and the word for what it does to a layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

# The inputs that an operator makes contiguous inside its kernel, where no dispatch shows it. Read from
# the nested profiler events of torch 2.13 on CPU; a test compares the table with the profiler.
_MADE_CONTIGUOUS = {
    "_softmax": "self",
    "_log_softmax": "self",
    "native_layer_norm": "input",
    "avg_pool3d": "self",
    "im2col": "self",
    "index_select": "self",
}
_CAUSES = {
    "_softmax": "softmax",
    "_log_softmax": "softmax",
    "native_layer_norm": "layer_norm",
    "_prelu_kernel": "prelu",
    "clone": "clone",
    "_to_copy": "clone",
    "constant_pad_nd": "pad",
    "index": "index",
    "index_select": "index",
    "gather": "index",
    "view": "reshape",
    "_unsafe_view": "reshape",
    "unsqueeze": "view",
    "permute": "view",
    "transpose": "view",
}
_CAUSE_IS_NAME = ("cat", "stack", "add", "sub", "mul", "div", "where", "repeat", "masked_fill", "cumsum",
         "copy", "slice", "select", "roll", "flip", "matmul", "bmm", "mm")  # fmt: skip
_CAUSES_BY_PART = (("grid_sampler", "grid_sample"), ("upsample", "interpolate"), ("_pad", "pad"),
          ("batch_norm", "batch_norm"), ("group_norm", "group_norm"), ("pool3d", "pool3d"),
          ("pool", "pool"))  # fmt: skip
_FUNCTIONS = ("instance_norm", "layer_norm", "pad")
# Every word that an event may have as its cause; `odd_stride` is told by strides.
CAUSES = frozenset({*_FUNCTIONS, *_CAUSES.values(), *_CAUSE_IS_NAME, "convolution", "odd_stride", "other",
          "conv2d_reference", "conv3d_reference", *(word for _, word in _CAUSES_BY_PART)})  # fmt: skip
# Operators whose speed or output layout depends on the layout of their inputs.
_SENSITIVE = ("convolution", "batch_norm", "group_norm", "pool", "upsample", "grid_sampler")
# These operators use the shape or device of a tensor, and none of its values.
_FACTORIES = ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "empty_like",
              "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")  # fmt: skip
PARAMETERS = frozenset({"weight", "bias", "running_mean", "running_var"})


def is_layout_sensitive(name: str) -> bool:
    """Return True if the speed or the output layout of an operator depends on the layout of its inputs."""
    return any(part in name for part in _SENSITIVE)


def takes_values(name: str, operand: str) -> bool:
    """Return True if the output of an operator depends on the values of this operand."""
    return name not in _FACTORIES and (name, operand) != ("copy_", "self")


def is_convolution(name: str) -> bool:
    """Return True if the operator is torch's general convolution."""
    return name in ("convolution", "_convolution")


def cause_of(name: str, function: str, module_type: str, backend: str = "") -> str:
    """Return one word for the cause of an event: from the function that was called, or the operator."""
    name = name.rstrip("_")
    if function in _FUNCTIONS:
        return function
    if "InstanceNorm" in module_type:
        return "instance_norm"
    if is_convolution(name):
        rank = backend[-2:-1]
        return f"conv{rank}d_reference" if backend.startswith("Slow") else "convolution"
    if name in _CAUSES or name in _CAUSE_IS_NAME:
        return _CAUSES.get(name, name)
    return next((word for part, word in _CAUSES_BY_PART if part in name), "other")


def cudnn_format(*tensors: Tensor) -> torch.memory_format:
    """Return the memory format in which cuDNN convolves this input and weight, and returns its output.

    For other ranks than 4 and 5 it is contiguous. The rule is that of `cudnn_conv_suggest_memory_format` in
    ATen/native/ConvUtils.h.
    """
    formats = {suggest_memory_format(tensor) for tensor in tensors if tensor.dim() in (4, 5)}
    formats.discard(torch.contiguous_format)
    is_double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.contiguous_format if is_double or not formats else formats.pop()


def backend_of(arguments: Mapping[str, Any]) -> tuple[str, torch.memory_format | None]:
    """Return torch's name for the backend of a convolution, and the memory format the backend works on.

    `Mkldnn` is oneDNN; `Slow2d`, `Slow3d` and the like are torch's reference paths. The name is empty
    for a 1-d convolution, and if this version of torch cannot tell.
    """
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    tensors = arguments["input"], arguments["weight"]
    if tensors[0].dim() not in (4, 5):
        return "", None
    options = {name: arguments[name] for name in names} | {"bias": arguments.get("bias")}
    try:
        backend = torch._C._select_conv_backend(*tensors, **options)
        name = backend.name
        if name == "???":  # torch 2.13 has no Python name for oneDNN's transposed convolution
            name = "MkldnnTranspose" if options["transposed"] else "unknown"
        return name, torch._C._conv_determine_backend_memory_format(*tensors, backend)
    except (AttributeError, RuntimeError, TypeError):
        return "", None


def hidden_copies(
    name: str, arguments: Mapping[str, Any], memory_format: torch.memory_format | None
) -> Iterator[tuple[str, Tensor, str]]:
    """Yield each copy made inside a kernel: the operand's name, the tensor, and the layout of the copy."""
    if is_convolution(name):
        operands, layout = ["input", "weight"], memory_format
    else:
        operands = [_MADE_CONTIGUOUS[name]] if name in _MADE_CONTIGUOUS else []
        layout = torch.contiguous_format
    for operand in operands if layout is not None else ():
        tensor = arguments[operand]
        if tensor.dim() in (4, 5) and not tensor.is_contiguous(memory_format=layout):
            yield operand, tensor, str(layout).removeprefix("torch.").removesuffix("_format")
