"""The inputs that an artefact is called with, in several layouts and sizes, and what its answers mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from prepare.core.model.memory_format import CHANNELS_LAST, canonical_stride
from prepare.core.utils.text import first_line
from prepare.stages.export.records import LayoutCheck
from prepare.stages.export.reference import Judgement, Reference
from prepare.stages.verify.execution.runner import CannotTellError
from prepare.stages.verify.inputs import resized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prepare.core.forward.call import Call
    from prepare.stages.export.load_again import ArtefactAnswer

CONTIGUOUS = "contiguous"


@dataclass(frozen=True)
class InputCase:
    """One call in one layout; `promised` says that the artefact has to take it.

    `size` is the name of its size in a workload.
    """

    layout: str
    call: Call
    promised: bool
    size: str = ""


def input_cases(call: Call, *, dynamic_batch: bool) -> Iterator[InputCase]:
    """Yield the call in every layout, then with one and two samples."""
    for layout, change in _LAYOUTS.items():
        changed = call.map(change)
        if layout == CONTIGUOUS or _strides(changed) != _strides(call):
            yield InputCase(layout, changed, promised=layout == CONTIGUOUS)
    for size in (1, 2):
        smaller = resized(call, size)
        if smaller is not call:
            yield InputCase(CONTIGUOUS, smaller.map(contiguous), promised=dynamic_batch)


def checked(judge: Reference, case: InputCase, answer: ArtefactAnswer) -> LayoutCheck:
    """Judge the answer to one input. A refusal passes, unless the artefact promised to take it."""
    known: dict[str, Any] = {
        "layout": case.layout,
        "batch": case.call.batch,
        "size": case.size,
    }
    if answer.crashed:
        return LayoutCheck(**known, answer="crashed", status="fail", note=answer.error)
    if answer.error:
        status = "fail" if case.promised else "pass"
        return LayoutCheck(**known, answer="refused", status=status, note=answer.error)
    try:
        judgement = judge.judge(answer.outputs, case.call)
    except CannotTellError as error:
        judgement = Judgement("cannot tell", note=str(error))
    except Exception as error:  # the reference itself cannot take this batch size
        note = f"the unprepared model raises {type(error).__name__}: {first_line(error)}"
        status = "cannot tell" if case.promised else "pass"
        return LayoutCheck(**known, answer="cannot tell", status=status, note=note)
    word = {"pass": "right", "fail": "wrong"}.get(judgement.status, "cannot tell")
    return LayoutCheck(**known, answer=word, **vars(judgement))


def conclusion(checks: tuple[LayoutCheck, ...]) -> Judgement:
    """Return the worst verdict of all checks."""
    for status in ("fail", "cannot tell"):
        if bad := next((check for check in checks if check.status == status), None):
            note = f"{_place(bad)}: {bad.answer}" + (f": {bad.note}" if bad.note else "")
            return Judgement(status, bad.error, bad.allowed, note)
    texts = {
        "wrong": "wrong, but not allowed by the contract",
        "refused": "refused clearly",
    }
    notes = [
        f"{text}: {', '.join(places)}"
        for word, text in texts.items()
        if (places := [_place(check) for check in checks if check.answer == word])
    ]
    errors = (check for check in checks if check.layout == CONTIGUOUS and check.error is not None)
    first = next(errors, None)
    error, allowed = (first.error, first.allowed) if first else (None, None)
    return Judgement("pass", error, allowed, "; ".join(notes))


def _place(check: LayoutCheck) -> str:
    batch = "" if check.batch is None else f" of batch {check.batch}"
    batch = f" at {check.size}" if check.size else batch
    return f"{check.layout} input{batch}"


def _strides(call: Call) -> list[tuple[int, ...]]:
    return [tensor.stride() for tensor in call.tensors()]


def contiguous(tensor: Tensor) -> Tensor:
    """Return a contiguous copy."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.dim() not in CHANNELS_LAST:
        return contiguous(tensor)
    strides = canonical_stride(tensor.shape, CHANNELS_LAST[tensor.dim()])
    fresh = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return fresh.copy_(tensor.detach())


def _transposed(tensor: Tensor) -> Tensor:
    """Return the values in memory in the opposite order of dimensions."""
    order = tuple(reversed(range(tensor.dim())))
    return contiguous(tensor.permute(order)).permute(order)


def _gaps(tensor: Tensor) -> Tensor:
    """Return the values in every second place of a row."""
    if not tensor.dim():
        return contiguous(tensor)
    *sizes, last = tensor.shape
    return tensor.new_zeros((*sizes, 2 * last))[..., ::2].copy_(tensor.detach())


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    CONTIGUOUS: contiguous,
    "channels_last": _channels_last,
    "transposed": _transposed,
    "gaps": _gaps,
}
