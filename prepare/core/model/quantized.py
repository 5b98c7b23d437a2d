"""Read and imitate quantized weights: tensors whose data has 8 bits, and whose dtype says float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prepare.core.model.tensors import inner_difference, is_wrapper, name_of

# The largest magnitude of a symmetric int8; with a reduced range, that of 7 bits.
_LARGEST, _REDUCED = 127, 63

# The words for one weight or several.
QUANTIZED = "in 8 bits, and a file of weights holds float values"


def is_quantized(tensor: Tensor) -> bool:
    """Return whether this is a tensor of torchao with quantized data; torchao is not imported."""
    return is_wrapper(tensor) and isinstance(getattr(tensor, "qdata", None), Tensor)


def is_int8(tensor: Any) -> bool:
    """Return whether this is a matrix in int8 whose rounding can be imitated here."""
    return (
        is_quantized(tensor)
        and tensor.qdata.dtype is torch.int8
        and len(getattr(tensor, "block_size", ())) == tensor.dim() == 2
    )


def quantizes_inputs(tensor: Tensor) -> bool:
    """Return whether a Linear with this weight quantizes its inputs as well."""
    return is_quantized(tensor) and getattr(tensor, "act_quant_kwargs", None) is not None


def quantized_weight(module: nn.Module) -> Tensor | None:
    """Return the weight of a module if it is quantized."""
    weight = module._parameters.get("weight")
    return weight if weight is not None and is_quantized(weight) else None


def dtype_text(tensor: Any) -> str:
    """Return the name of the dtype, `float32`; that of quantized data with its scales, `int8 per row`.

    A sparse tensor whose values have another dtype than it reports is `bfloat16 with float32 values`.
    """
    if not is_quantized(tensor):
        return f"{name_of(tensor.dtype)} {inner_difference(tensor)}".rstrip()
    dtype, shape = name_of(tensor.qdata.dtype), tuple(tensor.shape)
    block = tuple(getattr(tensor, "block_size", shape))
    return scale_text(dtype, shape, block, inputs=quantizes_inputs(tensor))


def scale_text(dtype: str, shape: tuple[int, ...], block: tuple[int, ...], *, inputs: bool) -> str:
    """Return the dtype of quantized data and how many values share a scale; `inputs` are int8 too."""
    if len(shape) == 2 and block == (1, shape[1]):
        scales = "per row"
    elif len(shape) == 2 and block[0] == 1:
        scales = f"per {block[1]} values"
    else:
        scales = "per tensor" if block == shape else f"per block of {'x'.join(map(str, block))}"
    return f"{dtype} {scales}" + (" with int8 inputs" if inputs else "")


def data_of(tensor: Any) -> list[Tensor]:
    """Return the plain tensors that hold a tensor's values: quantized data with its scales, or itself."""
    if not is_quantized(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's data; those of quantized data and its scales."""
    return sum(data.nbytes for data in data_of(tensor))


def float_values(quantized: Any) -> Tensor:
    """Return the values for which a quantized weight stands, in float32."""
    values: Tensor = quantized.dequantize(torch.float32)
    return values


def rounded_like(values: Tensor, quantized: Any) -> Tensor:
    """Round float `values` as the weight `quantized` was: symmetric, with as many values for a scale.

    Computed here from the float values, so that a fault of `quantized` is not part of it.
    """
    largest = _REDUCED if getattr(quantized, "reduce_range", False) else _LARGEST
    rows, columns = quantized.block_size
    blocks = values.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    return _rounded(blocks, (1, 3), largest).reshape(values.shape)


def rounded_inputs(values: Tensor, quantized: Any) -> Tensor:
    """Round the inputs of a Linear as it rounds them with the weight `quantized`: one scale for each row."""
    reduced = getattr(quantized.act_quant_kwargs, "reduce_range", False)
    return _rounded(values, (-1,), _REDUCED if reduced else _LARGEST)


def steps_between_values(quantized: Any) -> Tensor:
    """Return the distance between two neighbouring values of a quantized weight, for each element."""
    rows, columns = quantized.block_size
    steps: Tensor = quantized.scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return steps


def _rounded(values: Tensor, dims: tuple[int, ...], largest: int) -> Tensor:
    step = values.abs().amax(dims, keepdim=True) / largest
    step = step.clamp_min(torch.finfo(torch.float32).tiny)
    return (values / step).round() * step
