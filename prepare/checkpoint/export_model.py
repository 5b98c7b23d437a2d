"""Undo a preparation in place, so that the model can be used without `prepare`."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from prepare.core.model.memory_format import canonical_stride
from prepare.core.model.tensors import NamedTensor, is_plain
from prepare.pipeline import Pipeline
from prepare.registry import STEPS
from prepare.step import TensorStep, Want
from prepare.steps import compile  # noqa: A004

_Model = TypeVar("_Model", bound=nn.Module)


def export(model: _Model) -> _Model:
    """Undo a preparation in place, so that the model can be used without `prepare`; return the model.

    Weights become contiguous, repaired modules get torch's own classes, and the input formatting and
    compiled calls are removed; your Parameters and hooks stay. Dtypes and devices stay as well: a cast
    cannot be undone. A file written by `torch.save(export(model))` loads without `prepare`.

    Raises:
        RefusedError: as `Pipeline.apply`; the model is unchanged.
    """
    compiled = {m: m._compiled_call_impl for m in model.modules() if m._compiled_call_impl}
    try:
        for module in compiled:
            compile.undo(module)
        Pipeline([_Contiguous()]).apply(model, strict=False, known_issues="ignore")
    except BaseException:
        for module, call in compiled.items():
            module._compiled_call_impl = call
        raise
    for name in STEPS:
        STEPS[name].undo(model)
    return model


class _Contiguous(TensorStep):
    """Makes channels-last tensors contiguous; other strides are those that the author chose."""

    name = "export"

    def want(self, tensor: NamedTensor) -> Want | None:
        values = tensor.tensor
        formats = {4: "channels_last", 5: "channels_last_3d"}
        if not is_plain(values) or values.dim() not in formats:
            return None
        channels_last = canonical_stride(values.shape, formats[values.dim()])
        return Want(memory_format="contiguous") if values.stride() == channels_last else None
