"""Compare one recorded call of a module with torch's own module, by the judgement of a verification."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.autocast import autocast, device_of
from prepare.core.forward.call import Call
from prepare.core.forward.nested import map_tensors, tensors_in
from prepare.core.forward.stand_ins import copy_of, real_stand_in
from prepare.core.forward.unchanged import ModelState
from prepare.core.model.module_tree import copy_tree
from prepare.core.utils.text import size
from prepare.guard.apart import without_trace
from prepare.stages.verify.compare_modules import ModuleComparer, OtherTensorsError
from prepare.stages.verify.execution.determinism import make_deterministic
from prepare.stages.verify.execution.module_calls import CallInterceptor, LoneRun, RecordedCall
from prepare.stages.verify.execution.runner import ModelPair
from prepare.stages.verify.execution.single_run import contiguous

if TYPE_CHECKING:
    from prepare.guard.watch import WatchedCall
    from prepare.stages.verify.execution.single_run import RunResult

# Inputs, outputs, their gradients and two results, in float64, in multiples of the largest tensor.
_TENSORS = 8
# The part of a gradient by which a hook may change it.
_PASSED = 1e-4


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


@contextmanager
def _private(module: nn.Module, **options: Any) -> Iterator[ModelState]:
    """Restore a private copy, and what it shares with the model, at the end of the block."""
    state = ModelState(module)
    state.begin(**options)
    try:
        yield state
    finally:
        state.restore()


class _PrivateCalls(CallInterceptor):
    """Gives the calls of modules of private copies to `handle`, by what torch calls for a compiled module.

    So neither their hooks nor those of all modules run.
    """

    def redirect(self, tree: nn.Module) -> nn.Module:
        """Give it the calls of all modules of a tree."""
        for part in tree.modules():
            vars(part)["_compiled_call_impl"] = partial(self._call, part)
        return tree

    def _call(self, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.handle is None:
            return part.forward(*args, **kwargs)
        return self.handle(lambda: part.forward(*args, **kwargs), part, Call(args, kwargs))


@dataclass
class _Comparer(ModuleComparer):
    """Takes what the call returned as the first result of the prepared module; then it runs a copy."""

    record: WatchedCall = None  # type: ignore[assignment]
    takes_recorded: bool = True

    def compare(self, call: RecordedCall) -> dict[str, list[Any]]:
        self.takes_recorded = not (self.backward or self.record.draws)
        if self.takes_recorded:
            found = self._compare_once(call, keep=True)
            self.takes_recorded = False
            if not _wrong(found):
                return found
            if not _wrong(self._compare_once(call, keep=True)):
                return found  # a hook for example has changed it
        return super().compare(call)

    def run_prepared(self, call: RecordedCall, *, keep: bool) -> RunResult:
        if self.takes_recorded:
            return call.results()
        if self.record.watched.kind == "compiled":
            copied = call.arguments.map(torch.clone)
            with torch.no_grad():
                return RecordedCall(
                    "", copied, self.record.watched.module(*copied.args, **copied.kwargs)
                ).results()
        run = self._lone(self.models.prepared, call, real_stand_in, copy_of, amp=self.models.amp)
        result = run.run(call, backward=self.backward)
        if self.backward and keep:
            call.input_gradients = run.argument_gradients(call)
            outputs = (t for label, t, _ in run._roots if label.startswith("output "))
            pairs = zip(outputs, tensors_in(call.outputs), strict=False)
            if any(own.requires_grad and not kept.requires_grad for own, kept in pairs):
                self.record.detached = True
        return result

    def _lone(self, *args: Any, **options: Any) -> LoneRun:
        return super()._lone(*args, scope=_private, **options)


def snapshot(module: nn.Module) -> nn.Module:
    """Return the module as it is now, with the same Parameters, for `difference`: a run changes no other."""
    with torch.inference_mode(mode=False), torch.no_grad():
        tree = copy_tree(module, _unshared)
    parts = dict(module.named_modules(remove_duplicate=False))
    copies = {id(parts[name]): part for name, part in tree.named_modules(remove_duplicate=False)}
    for part in copies.values():
        table = vars(part)
        table.update((k, _unshared(v)) for k, v in table.items() if isinstance(v, Tensor))
        if "forward" in table:
            table["forward"] = _bound(table["forward"], copies)
    return tree


def difference(
    record: WatchedCall,
    original: nn.Module,
    call: RecordedCall,
    hooked: set[str],
    *,
    backward: bool,
) -> str:
    """Say by how much a call differs from `original`, torch's own; empty if they agree.

    With `backward` the gradients of the module's own code are compared. `call` has the names that modules
    have in the module itself, and so do `hooked`, whose calls were recorded. Runs on private copies.
    """
    calls, prepared = _PrivateCalls(), record.before
    trees = calls.redirect(original), calls.redirect(prepared)
    models = ModelPair(*trees, amp=record.amp)
    models.dtype = _dtype(call, prepared, record.amp)
    whole = not call.children
    comparer = _Comparer(models, calls, backward=backward, whole=whole, quick=True, record=record)
    comparer.names = {
        id(part): name
        for tree in trees
        for name, part in tree.named_modules()
        if not name or (name in hooked and not whole)
    }
    flags = {name: p.training for name, p in prepared.named_modules(remove_duplicate=False)}
    with without_trace():
        for tree in trees:
            make_deterministic(tree, flags)
        try:
            wrong = _wrong(comparer.compare(call))
        except OtherTensorsError:
            return "its outputs have other names or numbers than those of torch's own"
    if backward and (record.detached or not all(map(_is_passed, record.passed))):
        return "its gradients are stopped or changed by a hook"
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


def run_again(module: nn.Module, call: RecordedCall, amp: str) -> Any:
    """Return what the code of a module returns for a recorded call in the contiguous format."""
    calls = _PrivateCalls()
    tree, left = calls.redirect(snapshot(module)), list(call.children)
    names = {id(part): name for name, part in tree.named_modules()}

    def replay(run: Callable[[], Any], part: nn.Module, _: Call) -> Any:
        child = next((item for item in left if item.module == names[id(part)]), None)
        if child is None:
            return run()
        left.remove(child)
        return map_tensors(contiguous, child.outputs)

    arguments = call.arguments.map(contiguous)
    cast = autocast(amp, device_of([tree], arguments.tensors()))
    with without_trace(), torch.no_grad(), calls.handling(replay), cast:
        return tree.forward(*arguments.args, **arguments.kwargs)


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
    # Not `module.weight`, which a parametrization may compute. The input of a convolution is unfolded.
    kernel = max(
        (p[0, 0].numel() for p in module.parameters() if p.dim() > 3 and p.numel()), default=0
    )
    kernel *= not call.children
    unfolded = 2 * kernel * max((t.numel() for t in call.arguments.tensors()), default=0)
    weights = 0 if call.children else sum(tensor.numel() for tensor in module.parameters())
    needed = torch.float64.itemsize * (_TENSORS * largest + unfolded + 2 * weights)
    return f"it needs {size(needed)} alone, and the limit is {size(limit)}" * (needed > limit)


def autocast_of(module: nn.Module, tensors: list[Tensor]) -> str:
    """Return the dtype of the autocast that is on; none without one."""
    kind = device_of([module], tensors).type
    if not torch.is_autocast_enabled(kind):
        return "none"
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")


def _wrong(found: dict[str, list[Any]]) -> list[tuple[Any, str]]:
    return [(item, kind) for kind, items in found.items() for item in items if item.exceeds]


def _is_passed(pair: dict[str, Tensor | None]) -> bool:
    """Return whether a hook passes a gradient on, as far as it arrived."""
    before, after = pair["before"], pair["after"]
    if after is None:
        return True
    return before is not None and torch.allclose(
        before, after, rtol=_PASSED, atol=_PASSED * float(after.abs().max()), equal_nan=True
    )


def _dtype(call: RecordedCall, module: nn.Module, amp: str) -> torch.dtype:
    """Return the coarsest dtype of a call."""
    tensors = (*module.parameters(), *module.buffers(), *call.arguments.tensors())
    outputs = (tensor for tensor in call.results().outputs.values() if tensor is not None)
    dtypes = {t.dtype for t in (*tensors, *outputs) if t.is_floating_point()}
    if amp != "none":
        dtypes.add(getattr(torch, amp))
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def _unshared(tensor: Tensor) -> Tensor:
    """Return a copy of a buffer; a Parameter itself, and what has a graph."""
    return tensor if isinstance(tensor, nn.Parameter) or tensor.requires_grad else copy_of(tensor)


def _bound(value: Any, copies: dict[int, nn.Module], depth: int = 5) -> Any:
    """Return a function for the copies of the modules that it holds."""
    if isinstance(value, nn.Module) or not depth:
        return copies.get(id(value), value)
    bound = partial(_bound, copies=copies, depth=depth - 1)
    if isinstance(value, MethodType):
        return MethodType(bound(value.__func__), bound(value.__self__))
    if type(value) is partial:
        return partial(bound(value.func), *map(bound, value.args), **value.keywords)
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    cells = tuple(CellType(*map(bound, _content(cell))) for cell in value.__closure__)
    again = FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
    )
    again.__kwdefaults__ = value.__kwdefaults__
    return again


def _content(cell: CellType) -> Iterable[Any]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not assigned yet
        return ()
