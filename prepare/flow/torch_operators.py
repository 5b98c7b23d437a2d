"""What is known of torch's operations: what each copies inside, and the word for what it did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

# The inputs that these make contiguous inside, where no one sees it. Read off nested profiler events
# of torch 2.13 on CPU; tests/test_flow.py compares the table with the profiler.
_MADE_CONTIGUOUS = {
    "_softmax": ("self",),
    "_log_softmax": ("self",),
    "native_layer_norm": ("input",),
    "avg_pool3d": ("self",),
    "im2col": ("self",),
    "index_select": ("self",),
    "_softmax_backward_data": ("grad_output", "output"),
    "_log_softmax_backward_data": ("grad_output", "output"),
    "native_layer_norm_backward": ("grad_out", "input"),
    "avg_pool3d_backward": ("grad_output",),
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
_SAME = ("cat", "stack", "add", "sub", "mul", "div", "where", "repeat", "masked_fill", "cumsum",
         "copy", "slice", "select", "roll", "flip", "matmul", "bmm", "mm")  # fmt: skip
_PARTS = (("grid_sampler", "grid_sample"), ("upsample", "interpolate"), ("_pad", "pad"),
          ("batch_norm", "batch_norm"), ("group_norm", "group_norm"), ("pool3d", "pool3d"),
          ("pool", "pool"))  # fmt: skip
# Operations whose speed or whose output's layout hangs on the layout of what they are given.
_SENSITIVE = ("convolution", "batch_norm", "group_norm", "pool", "upsample", "grid_sampler")
# Their first output is a gradient of an activation, the others are gradients of parameters.
_FIRST_ONLY = ("convolution_backward", "native_batch_norm_backward", "native_group_norm_backward",
               "native_layer_norm_backward", "_prelu_kernel_backward")  # fmt: skip
# These take a tensor for its shape or its place, and none of its values.
_FACTORIES = ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "empty_like",
              "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")  # fmt: skip
PARAMETERS = frozenset({"weight", "bias", "running_mean", "running_var"})


def is_sensitive(name: str) -> bool:
    """Whether the layout of this operation's input matters to it."""
    return any(part in name for part in _SENSITIVE)


def takes_values(name: str, operand: str) -> bool:
    """Whether what an operation gives is made of this operand's values."""
    return name not in _FACTORIES and (name, operand) != ("copy_", "self")


def is_convolution(name: str) -> bool:
    """Whether this is torch's one convolution, forward or backward."""
    return name in ("convolution", "_convolution", "convolution_backward")


def gives_parameter_gradient(name: str, index: int) -> bool:
    """Whether the output at `index` is the gradient of a parameter."""
    return index > 0 and name in _FIRST_ONLY


def cause_of(name: str, function: str, kind: str, backend: str = "") -> str:
    """One word for what happened: by the function that was called, else by the operation."""
    name = name.removesuffix("_backward").rstrip("_")
    if function in ("instance_norm", "layer_norm", "pad"):
        return function
    if "InstanceNorm" in kind:
        return "instance_norm"
    if is_convolution(name):
        rank = backend[-2:-1]
        return f"conv{rank}d_reference" if backend.startswith("Slow") else "convolution"
    if name in _CAUSES or name in _SAME:
        return _CAUSES.get(name, name)
    return next((word for part, word in _PARTS if part in name), "other")


def backend_of(arguments: Mapping[str, Any]) -> tuple[str, torch.memory_format | None]:
    """What runs a convolution, by torch's own name, and the layout it brings its tensors into.

    `Mkldnn` is oneDNN; `Slow2d`, `Slow3d` and the like are torch's reference paths. Empty for a
    1-d convolution, and where this torch does not say.
    """
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    tensors = arguments["input"], arguments["weight"]
    if tensors[0].dim() not in (4, 5):
        return "", None
    options = {name: arguments[name] for name in names} | {"bias": arguments.get("bias")}
    if "bias_sizes" in arguments:
        options["bias_sizes"] = arguments["bias_sizes"]
    try:
        backend = torch._C._select_conv_backend(*tensors, **options)
        name = backend.name
        if name == "???":  # torch 2.13 gives oneDNN's transposed convolution no name in Python
            name = "MkldnnTranspose" if options["transposed"] else "unknown"
        return name, torch._C._conv_determine_backend_memory_format(*tensors, backend)
    except (AttributeError, RuntimeError, TypeError):
        return "", None


def hidden_copies(
    name: str, arguments: Mapping[str, Any], memory_format: torch.memory_format | None
) -> Iterator[tuple[str, Tensor, str]]:
    """What a kernel copies inside: the operand's name, the tensor, and the layout it is copied into."""
    if is_convolution(name):
        if memory_format is None:
            return
        word = str(memory_format).removeprefix("torch.").removesuffix("_format")
        for operand in ("grad_output", "input", "weight"):
            tensor = arguments.get(operand)
            if tensor is not None and not tensor.is_contiguous(memory_format=memory_format):
                yield operand, tensor, word
        return
    for operand in _MADE_CONTIGUOUS.get(name, ()):
        tensor = arguments[operand]
        if tensor.dim() in (4, 5) and not tensor.is_contiguous():
            yield operand, tensor, "contiguous"
