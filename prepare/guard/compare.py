"""Compare one recorded call of a module with torch's own module, by the judgement of a verification."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.autocast import autocast, device_of
from prepare.core.forward.call import Call
from prepare.core.forward.nested import map_tensors
from prepare.core.forward.stand_ins import copy_of, real_stand_in
from prepare.core.forward.unchanged import ModelState
from prepare.core.model.tensors import is_plain
from prepare.core.utils.text import size
from prepare.stages.verify.compare_modules import ModuleComparer, OtherTensorsError
from prepare.stages.verify.execution import module_calls
from prepare.stages.verify.execution.determinism import DeterministicMode, make_deterministic
from prepare.stages.verify.execution.module_calls import NotAloneError, RecordedCall, copy_once
from prepare.stages.verify.execution.runner import ModelPair
from prepare.stages.verify.execution.single_run import contiguous, seed_everything

if TYPE_CHECKING:
    from prepare.guard.watch import WatchedCall
    from prepare.stages.verify.execution.single_run import RunResult

# Inputs, outputs, their gradients and two results, in float64, in multiples of the largest tensor.
_TENSORS = 8
# The part of a tensor, or of a gradient, by which a hook may change it.
_PASSED = 1e-4
_CHANGES = (
    "when its code runs again it returns something else: it keeps state outside of the module"
)


@contextmanager
def _private(module: nn.Module, **options: Any) -> Iterator[ModelState]:
    """Restore a private copy, and what it shares with the model, at the end of the block."""
    state = ModelState(module)
    state.begin(**options)
    try:
        yield state
    finally:
        state.restore()


class _PrivateCalls(module_calls.CallInterceptor):
    """Gives the calls of modules of private copies to `handle`, by what torch calls for a compiled module.

    Of hooks run only those of torch and of this package on modules inside: they compute weights, and cast.
    """

    def redirect(self, tree: nn.Module) -> nn.Module:
        """Give it the calls of all modules of a tree."""
        for part in tree.modules():
            vars(part)["_compiled_call_impl"] = partial(self._call, part)
        tree._forward_pre_hooks.clear()  # its arguments and outputs are those of its code
        tree._forward_hooks.clear()
        return tree

    def _call(self, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = Call(args, kwargs)
        run = partial(_run, part, call)
        return run() if self.handle is None else self.handle(run, part, call)

    def children(self, tree: nn.Module, record: WatchedCall, limit: int) -> list[RecordedCall]:
        """Run the code of a tree, and return the calls that it makes itself, with copies of their tensors."""
        names, calls, copies = _names(tree), list[RecordedCall](), dict[Any, Any]()
        keep = partial(copy_once, copies)

        def handle(run: Callable[[], Any], part: nn.Module, call: Call) -> Any:
            if id(part) not in names:
                return run()
            self.handle, child = None, RecordedCall(names[id(part)], call.map(keep))
            output = run()
            self.handle, child.outputs = handle, map_tensors(keep, output)
            calls.append(child)
            if sum(copy.nbytes for _, copy in copies.values()) > limit:
                raise NotAloneError(f"the calls in it need more than {size(limit)}")
            return output

        with _private(tree), self.handling(handle), DeterministicMode():
            seed_everything(0)
            _forward(tree, record, torch.clone)
        return calls


@dataclass
class _Comparer(ModuleComparer):
    """Takes what the call returned as the first result of the prepared module; then it runs a copy."""

    record: WatchedCall = None  # type: ignore[assignment]
    takes_recorded: bool = False

    def compare(self, call: RecordedCall) -> dict[str, list[Any]]:
        """Compare one call.

        Raises:
            NotAloneError: state that no copy holds changes the results.
        """
        if self.backward or not self.record.is_exact:
            return super().compare(call)
        self.takes_recorded = True
        with suppress(OtherTensorsError):
            if not _wrong(found := self._compare_once(call)):
                return found
        self.takes_recorded = False
        if not _wrong(found := super().compare(call)) and not self.record.is_compiled:
            raise NotAloneError(_CHANGES)
        return found

    def run_prepared(self, call: RecordedCall, *, keep: bool) -> RunResult:
        """Run the copy, or take the recorded outputs; a compiled module has no copy."""
        if self.takes_recorded:
            return call.results()
        if self.record.is_compiled:
            module, given = self.record.watched.module, call.arguments.map(torch.clone)
            with torch.no_grad(), _private(module):
                return RecordedCall("", given, module(*given.args, **given.kwargs)).results()
        run = self._lone(self.models.prepared, call, real_stand_in, copy_of, amp=self.models.amp)
        return run.run(call, backward=self.backward)

    def _lone(self, *args: Any, **options: Any) -> module_calls.LoneRun:
        run = super()._lone(*args, scope=_private, **options)
        run.stand_in = partial(_without_hooks, run.stand_in)
        return run


def changed_by_hooks(record: WatchedCall) -> str:
    """Say that a hook that was added since the guard was made changes a call; empty if none does."""
    is_changed = record.is_changed or not all(map(_is_passed, record.pairs))
    return "a hook that was added later changes its inputs, outputs or gradients" * is_changed


def difference(record: WatchedCall, original: nn.Module, limit: int) -> str:
    """Say by how much a call differs from `original`, torch's own; empty if they agree.

    A call of a training step is compared with its gradients. Private copies run, in at most `limit` bytes.

    Raises:
        NotAloneError: it cannot be told.
    """
    calls, prepared = _PrivateCalls(), record.before
    trees = calls.redirect(original), calls.redirect(prepared)
    flags = {name: p.training for name, p in prepared.named_modules(remove_duplicate=False)}
    for tree in trees:
        make_deterministic(tree, flags)
    is_whole = record.is_compiled or not prepared._modules
    children = [] if is_whole else calls.children(prepared, record, limit)
    call = replace(record.call, children=children)
    models = ModelPair(*trees, amp=record.amp)
    models.dtype = _dtype(call, prepared, record.amp)
    comparer = _Comparer(models, calls, backward=not record.key, quick=True, record=record)
    comparer.names = {id(tree): "" for tree in trees}
    for tree in trees if children else ():
        comparer.names |= _names(tree)
    if why := _too_large(call, prepared, limit):
        raise NotAloneError(why)
    try:
        wrong = _wrong(comparer.compare(call))
    except OtherTensorsError:
        return "its outputs have other names or numbers than those of torch's own"
    if not wrong:
        return ""
    worst, kind = max(wrong, key=lambda pair: pair[0].excess)
    what = kind.removeprefix("module ")
    if worst.note:
        return f"one of its {what} {worst.note}"
    is_finite = math.isfinite(worst.error)
    far = f"off by {worst.error:.2g} of their scale" if is_finite else "infinitely far"
    return f"its {what} are {far}, and {worst.allowed:.2g} is allowed"


def run_again(original: nn.Module, record: WatchedCall) -> Any:
    """Return what torch's own module returns for a recorded call in the contiguous format."""
    return _forward(_PrivateCalls().redirect(original), record, contiguous)


def autocast_of(module: nn.Module, tensors: list[Tensor]) -> str:
    """Return the dtype of the autocast that is on; none without one."""
    kind = device_of([module], tensors).type
    if not torch.is_autocast_enabled(kind):
        return "none"
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")


def _run(part: nn.Module, call: Call) -> Any:
    """Run the code of a module inside, between the hooks of torch and of this package."""
    args, kwargs = call.args, call.kwargs
    for key, hook in part._forward_pre_hooks.items():
        if _is_known(hook):
            is_both = key in part._forward_pre_hooks_with_kwargs
            given = hook(part, args, kwargs) if is_both else hook(part, args)
            if given is not None and is_both:
                args, kwargs = given
    output = part.forward(*args, **kwargs)
    for hook in part._forward_hooks.values():
        if _is_known(hook) and (changed := hook(part, args, output)) is not None:
            output = changed
    return output


def _without_hooks(stand_in: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Return a stand-in without the hooks of the user on the gradient of a weight."""
    if (made := stand_in(tensor)) is not tensor:
        made._backward_hooks = None
    return made


def _is_known(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(("torch.nn.", "prepare."))


def _forward(tree: nn.Module, record: WatchedCall, convert: Callable[[Tensor], Tensor]) -> Any:
    arguments = record.call.arguments
    cast = autocast(record.amp, device_of([tree], arguments.tensors()))
    with torch.inference_mode(mode=False), torch.set_grad_enabled(record.grad), cast:
        arguments = arguments.map(convert)
        return tree.forward(*arguments.args, **arguments.kwargs)


def _names(tree: nn.Module) -> dict[int, str]:
    """Return the names of the modules in it, by id; a parametrization is code of the module that has it."""
    named = tree.named_modules()
    return {id(part): n for n, part in named if n and ".parametrizations." not in f".{n}."}


def _too_large(call: RecordedCall, module: nn.Module, limit: int) -> str:
    """Say why a comparison in float64 does not fit into `limit` bytes; empty if it fits."""
    children = [tensor for child in call.children for tensor in child.arguments.tensors()]
    tensors = [*call.arguments.tensors(), *children, *call.results().outputs.values()]
    largest = max((tensor.numel() for tensor in tensors if tensor is not None), default=0)
    weights = unfolded = 0
    if not call.children:
        # Not `module.weight`, which a parametrization may compute. The input of a convolution is unfolded.
        parameters = [p for p in module.parameters() if p.numel()]
        weights = sum(p.numel() for p in parameters)
        kernel = max((p[0, 0].numel() for p in parameters if p.dim() > 3), default=0)
        unfolded = 2 * kernel * max((t.numel() for t in call.arguments.tensors()), default=0)
    needed = torch.float64.itemsize * (_TENSORS * largest + unfolded + 2 * weights)
    return f"it needs {size(needed)} alone, and the limit is {size(limit)}" * (needed > limit)


def _wrong(found: dict[str, list[Any]]) -> list[tuple[Any, str]]:
    return [(item, kind) for kind, items in found.items() for item in items if item.exceeds]


def _is_passed(pair: list[Tensor | None]) -> bool:
    """Return whether hooks pass a tensor on, or a gradient, as far as that arrived."""
    before, after = pair
    if after is None or before is None:
        return after is None
    if before.shape != after.shape or not (is_plain(before) and is_plain(after)):
        return before.shape == after.shape
    exact = torch.promote_types(after.dtype, torch.float64)
    before, after = (t.detach().to(after.dtype).to(exact) for t in (before, after))
    scale = float(before.nan_to_num(0, 0, 0).abs().max()) if before.numel() else 0.0
    return torch.allclose(before, after, rtol=_PASSED, atol=_PASSED * scale, equal_nan=True)


def _dtype(call: RecordedCall, module: nn.Module, amp: str) -> torch.dtype:
    """Return the coarsest dtype of a call."""
    tensors = (*module.parameters(), *module.buffers(), *call.arguments.tensors())
    outputs = (tensor for tensor in call.results().outputs.values() if tensor is not None)
    dtypes = {t.dtype for t in (*tensors, *outputs) if t.is_floating_point()}
    if amp != "none":
        dtypes.add(getattr(torch, amp))
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
