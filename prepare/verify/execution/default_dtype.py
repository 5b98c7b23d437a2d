"""Give the tensors that a model creates another default dtype, in this thread alone."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

# Their results have the default dtype, whatever their arguments.
_FLOATING = frozenset(
    {torch.empty, torch.empty_strided, torch.empty_permuted, torch.zeros, torch.ones, torch.eye}
    | {
        torch.rand,
        torch.randn,
        torch.linspace,
        torch.logspace,
        torch.fft.fftfreq,
        torch.fft.rfftfreq,
    }
    | {torch.bartlett_window, torch.blackman_window, torch.hamming_window, torch.hann_window}
    | {torch.kaiser_window, torch.range, torch.normal}
)
# Their results have it for numbers that are floating.
_BY_VALUE = frozenset(
    {torch.arange, torch.full, torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor}
    | {torch.sparse_coo_tensor, torch.sparse_csr_tensor, torch.sparse_csc_tensor}
)
# A cast names its dtype; these in their own name.
_CASTS = frozenset({Tensor.float, Tensor.cfloat, Tensor.type})  # type: ignore[attr-defined]


class Float64Default(TorchFunctionMode):
    """Within it, what torch computes in the default dtype is float64: new tensors, and quotients of integers.

    Not `torch.set_default_dtype`, which is that of all threads: a model that another one runs meanwhile would
    compute in float64. This mode does not see scripted code, nor `torch.Tensor(...)`.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FLOATING and kwargs.get("dtype") is None and not _has_floats(args, kwargs):
            return func(*args, **kwargs | {"dtype": torch.float64})
        output = func(*args, **kwargs)
        wider = {torch.get_default_dtype(): torch.float64, torch.complex64: torch.complex128}
        dtype = wider.get(output.dtype) if isinstance(output, Tensor) else None
        if dtype is None or func in _CASTS or _has_floats(args, kwargs):
            return output
        if func in _BY_VALUE:
            return func(*args, **kwargs | {"dtype": dtype})
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            return output
        for convert in (_tensor_to_float64, _number_to_float64):
            with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):
                again = func(*tree_map(convert, args), **tree_map(convert, kwargs))
                if again.dtype == dtype:
                    return again
        return output.to(dtype)  # it requires its integers and numbers


def _has_floats(args: tuple, kwargs: dict) -> bool:
    """Return whether an argument determines the dtype of the result."""
    return any(
        isinstance(leaf, torch.dtype)
        or (isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()))
        for leaf in tree_leaves((args, kwargs))
    )


def _tensor_to_float64(value: Any) -> Any:
    return value.to(torch.float64) if isinstance(value, Tensor) else value


def _number_to_float64(value: Any) -> Any:
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value
