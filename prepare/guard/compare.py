"""Compare one recorded call of a module with torch's own module, by the judgement of a verification."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from prepare.core.forward.autocast import device_of
from prepare.core.forward.compiled import is_compiled
from prepare.core.model.module_tree import copy_tree
from prepare.core.utils.text import size
from prepare.stages.verify.compare_modules import ModuleComparer, OtherTensorsError, comparable
from prepare.stages.verify.execution.module_calls import CallInterceptor, RecordedCall
from prepare.stages.verify.execution.runner import ModelPair

if TYPE_CHECKING:
    from prepare.stages.verify.execution.single_run import RunResult

# Inputs, outputs, their gradients and two results, in float64, in multiples of the largest tensor.
_TENSORS = 8


@dataclass(frozen=True)
class WrongModule:
    """A module that computes something else than torch's own: its name, what differs, in which call.

    `text` holds the numbers, `call` the shapes, dtypes and modes; `file` the recorded call for `torch.load`,
    empty without one. `done` says what was put back; empty if nothing was.
    """

    module: str
    text: str
    call: str
    file: str = ""
    done: str = ""

    def __str__(self) -> str:
        file = f"; torch.load reads that call from {self.file}" if self.file else ""
        done = f"; {self.done}" if self.done else ""
        return f"{self.module}: {self.text} in a call with {self.call}{file}{done}"


class _Comparer(ModuleComparer):
    """Takes what the call returned as the first result of the prepared module, and does not run it again."""

    def run_prepared(self, call: RecordedCall, *, keep: bool) -> RunResult:
        module = self.models.prepared
        if keep and not any(part.training for part in module.modules()):
            return call.results()
        if is_compiled(module):
            copied = call.arguments.map(torch.clone)
            with torch.no_grad():
                return RecordedCall("", copied, module(*copied.args, **copied.kwargs)).results()
        return super().run_prepared(call, keep=False)


def difference(
    call: RecordedCall,
    module: nn.Module,
    original: nn.Module,
    interceptor: CallInterceptor,
    *,
    amp: str,
    backward: bool,
) -> str:
    """Say by how much a call of `module` differs from `original`, torch's own; empty if they agree.

    With `backward` the gradients are compared too, and `module` itself runs again: other threads must not
    call it meanwhile. Both are restored, and so are random numbers and buffers.
    """
    whole = is_compiled(module) or not call.children
    prepared = module if backward or is_compiled(module) else copy_tree(module)
    models = ModelPair(original, prepared, amp=amp)
    models.dtype = _dtype(call, module, amp)
    comparer = (ModuleComparer if backward else _Comparer)(
        models, interceptor, backward=backward, whole=whole, quick=True
    )
    if not whole:  # a forward that an attribute of the copy holds calls the modules of the original
        comparer.names.update({id(part): name for name, part in module.named_modules()})
    flags = {name: part.training for name, part in module.named_modules(remove_duplicate=False)}
    with comparable(models, flags):
        try:
            found = comparer.compare(call)
        except OtherTensorsError:
            return "its outputs have other names or numbers than those of torch's own"
    wrong = [(item, kind) for kind, items in found.items() for item in items if item.exceeds]
    if not wrong:
        return ""
    worst, kind = max(wrong, key=lambda pair: pair[0].excess)
    what = kind.removeprefix("module ")
    if worst.note:
        return f"one of its {what} {worst.note}"
    error = (
        "infinitely far" if math.isinf(worst.error) else f"off by {worst.error:.2g} of their scale"
    )
    return f"its {what} are {error}, and {worst.allowed:.2g} is allowed"


def relative(call: RecordedCall, module: nn.Module, model: nn.Module) -> RecordedCall:
    """Return the call with the names that its modules have in `module` itself."""
    names = {id(part): name for name, part in module.named_modules()}
    children = [
        replace(child, module=names[id(model.get_submodule(child.module))])
        for child in call.children
    ]
    return replace(call, module="", children=children)


def too_large(call: RecordedCall, module: nn.Module, limit: int) -> str:
    """Say why a comparison in float64 does not fit into `limit` bytes; empty if it fits."""
    children = [tensor for child in call.children for tensor in child.arguments.tensors()]
    tensors = [*call.arguments.tensors(), *children, *call.results().outputs.values()]
    largest = max((tensor.numel() for tensor in tensors if tensor is not None), default=0)
    weight = getattr(module, "weight", None)
    unfolded = 0
    if (
        isinstance(weight, torch.Tensor) and weight.dim() > 3
    ):  # a convolution, whose input is unfolded
        kernel = weight[0, 0].numel()
        unfolded = 2 * kernel * max((t.numel() for t in call.arguments.tensors()), default=0)
    weights = 0 if call.children else sum(tensor.numel() for tensor in module.parameters())
    needed = torch.float64.itemsize * (_TENSORS * largest + unfolded + 2 * weights)
    return f"it needs {size(needed)} alone, and the limit is {size(limit)}" * (needed > limit)


def autocast_of(module: nn.Module, call: RecordedCall) -> str:
    """Return the dtype of the autocast that is on; none without one."""
    kind = device_of([module], call.arguments.tensors()).type
    if not torch.is_autocast_enabled(kind):
        return "none"
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")


def _dtype(call: RecordedCall, module: nn.Module, amp: str) -> torch.dtype:
    """Return the coarsest dtype of a call."""
    tensors = (*module.parameters(), *module.buffers(), *call.arguments.tensors())
    outputs = (tensor for tensor in call.results().outputs.values() if tensor is not None)
    dtypes = {t.dtype for t in (*tensors, *outputs) if t.is_floating_point()}
    if amp != "none":
        dtypes.add(getattr(torch, amp))
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
