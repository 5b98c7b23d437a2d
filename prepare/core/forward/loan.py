"""Lend a call other tensors in place of those of its caller, and take them back after it."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling, is_exporting

from prepare.core.forward.nested import (
    LEAVES,
    is_container,
    items_of,
    replace_items,
    report_left,
    report_unknown,
    set_item,
)
from prepare.core.forward.overlap import is_sparse, overlapping, span
from prepare.core.model.transforms import is_transformed

_Change = Callable[[Tensor], Tensor]
# In place of the version of a tensor that another graph has made: its values tell, or nothing does.
_UNKNOWN, _LOST = -1, -2


class Loan:
    """The tensors lent to one call of `module`, each in place of one of the caller's.

    The call gets the caller's own lists, dicts and dataclasses, with lent tensors in them: what it writes
    into them reaches the caller, and so does what it writes into a lent tensor. Only tuples and read-only
    mappings are made anew. Tensors that share elements share them in the call too, with their own strides.
    """

    def __init__(self, module: nn.Module, change: _Change, cast: _Change) -> None:
        self.module = module
        # torch.compile may run one part of a hook as it is, and trace another: this says what began.
        self.is_traced = is_dynamo_compiling()
        self.depth = 0 if self.is_traced else _depth()
        # A compiler chooses strides itself; a program that is exported gets them.
        self._change = cast if self.is_traced and not is_exporting() else change
        self._cast = cast
        self._lent: list[tuple[Tensor, Tensor, int | None]] = []
        self._to_return: list[tuple[Tensor, Tensor]] = []
        self._containers: list[Any] = []
        self._left: list[Tensor] = []
        self._apart: list[Tensor] = []

    def share(self, values: Any) -> None:
        """Lend the tensors in `values` that share elements as views of one tensor, or leave them alone."""
        if self.is_traced or torch.jit.is_tracing() or is_transformed():
            return
        with _counting_changes():
            for group in overlapping(values):
                self._share(group)

    def _share(self, group: list[Tensor]) -> None:
        dtypes = {tensor.dtype for tensor in group}
        if all(self._cast(tensor) is tensor for tensor in group):
            self._left += group
        elif len(dtypes) > 1 or is_sparse(group) or any(map(_is_special, group)):
            self._apart += group
        else:
            start, size = span(group)
            before = group[0].detach().as_strided((size,), (1,), start)
            memory = self._cast(before)
            self._lent.append((before, memory, memory._version))
            for tensor in group:  # what is written into one of them reaches the memory of all
                at = tensor.storage_offset() - start
                after = memory.as_strided(tensor.shape, tensor.stride(), at)
                self._lent.append((tensor, after, None))
                self._to_return.append((tensor, after))

    def give(self, value: Any) -> Any:
        """Return `value` with lent tensors in it; a container that can be changed is changed in place."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, LEAVES) or any(each is value for each in self._containers):
            return value
        if not is_container(value):
            report_unknown(value)
            return value
        is_fixed = isinstance(value, tuple) or (
            isinstance(value, Mapping) and not isinstance(value, MutableMapping)
        )
        if not is_fixed:
            self._hold(value)
        before = dict(items_of(value))
        after = {key: self.give(item) for key, item in before.items()}
        changed = {key: item for key, item in after.items() if item is not before[key]}
        if is_fixed:
            return replace_items(value, after, changed) if changed else value
        _set_items(value, before, changed)
        return value

    def end(self) -> None:
        """Give the caller its tensors back, and write into them what the call has written into lent ones."""
        for container in self._containers:
            self._release(container)
        for before, after, version in self._lent:
            if version is None:
                continue
            if not self.is_traced:
                is_written = after._version != version
            else:
                found = _traced_version(after)
                if found == _UNKNOWN:
                    _compare_and_write_back(before, after, self._change)
                is_written = found not in (_UNKNOWN, _LOST, version)
            if is_written:
                _write_back(before, after, self._change)
                if any(each is before for each in self._apart):
                    _report_apart(self.module)

    def _tensor(self, tensor: Tensor) -> Tensor:
        for before, after, _ in self._lent:
            if before is tensor:
                return after
        if any(each is tensor for each in self._left):
            return tensor
        if self.is_traced:
            after = self._change(tensor)
        else:
            with _counting_changes():
                after = self._change(tensor)
        if after is not tensor:
            self._lend(tensor, after)
        return after

    def _lend(self, tensor: Tensor, after: Tensor) -> None:
        version = _traced_version(after) if self.is_traced else after._version
        self._lent.append((tensor, after, version))
        self._to_return.append((tensor, after))

    def _hold(self, container: Any) -> None:
        self._containers.append(container)
        if not self.is_traced:
            with _LOCK:
                _HOLDERS.setdefault(id(container), []).append(self)

    def _release(self, container: Any) -> None:
        """Put the caller's tensors back, unless a call in another thread has the same container."""
        if self.is_traced:
            _put_back(container, self._to_return)
            return
        with _LOCK:
            holders = _HOLDERS[id(container)]
            holders.remove(self)
            if holders:
                holders[0]._to_return += self._to_return
                return
            del _HOLDERS[id(container)]
            _put_back(container, self._to_return)


class _Open(threading.local):
    """The loans of the calls that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.loans: list[Loan] = []


_OPEN = _Open()
_TRACED: list[Loan] = []
_LOCK = threading.Lock()
# The loans that have changed a container, by its id.
_HOLDERS: dict[int, list[Loan]] = {}


def lend(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    change: _Change,
    cast: _Change,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call of `module` with `change` applied to each tensor, until `take_back`.

    `cast` changes no strides: tensors that share elements get it, and a call that torch.compile traces.
    """
    loan = Loan(module, change, cast)
    if loan.is_traced:
        _TRACED.append(loan)
    else:
        loans = _OPEN.loans
        # A call that ended with KeyboardInterrupt has run no hook: it was not inside of this one.
        while loans and loans[-1].depth >= loan.depth:
            loans.pop().end()
        loans.append(loan)
    loan.share((args, kwargs))
    return tuple([loan.give(arg) for arg in args]), {k: loan.give(v) for k, v in kwargs.items()}


def take_back(module: nn.Module) -> None:
    """End the loan of the innermost call of `module`, if there is one."""
    if not _end_last(_TRACED, module):
        _end_last(_OPEN.loans, module)


def _end_last(loans: list[Loan], module: nn.Module) -> bool:
    """End the last loan to `module` and those after it, whose calls were interrupted; False without one."""
    if not any(loan.module is module for loan in loans):
        return False
    while True:
        loan = loans.pop()
        loan.end()
        if loan.module is module:
            return True


def _depth() -> int:
    """Return the number of Python frames below."""
    depth, frame = 0, sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        depth += 1
    return depth


def _set_items(container: Any, before: dict[Any, Any], changed: dict[Any, Any]) -> None:
    """Set the changed items of a container, or none of them if it does not take them as they are."""
    try:
        for key, item in changed.items():
            set_item(container, key, item)
        after = dict(items_of(container))
        taken = all(after[key] is item for key, item in changed.items())
    except Exception:
        taken = False
    if not taken:
        for key in changed:
            with suppress(Exception):
                set_item(container, key, before[key])
        report_left(container, "it takes no others")


def _put_back(container: Any, lent: list[tuple[Tensor, Tensor]]) -> None:
    """Replace each lent tensor in a container, wherever the call has put it, by the caller's."""
    for key, item in list(items_of(container)):
        for before, after in lent:
            if item is after:
                set_item(container, key, before)


@contextmanager
def _counting_changes() -> Iterator[None]:
    """Leave the inference mode: tensors that are made in it do not count their changes."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.no_grad())
        yield


def _is_special(tensor: Tensor) -> bool:
    """Return whether a view of the elements in memory would be another tensor, or lose the gradient."""
    wants_gradient = tensor.requires_grad and torch.is_grad_enabled()
    return wants_gradient or tensor.is_neg() or tensor.is_conj()


def _report_apart(module: nn.Module) -> None:
    kind = type(module).__name__
    warnings.warn(
        f"{kind}.forward wrote into one of two arguments that share memory, and the other one, cast to "
        "another dtype or device, did not see it; cast them before the call",
        stacklevel=2,
    )


_SEEN: list[int] = []


def _note_version(context: Any) -> None:
    tensor = context.get_local("tensor")
    if tensor.as_proxy().node.op != "placeholder":
        _SEEN.append(tensor.as_fake()._version)
        return
    # The graph of the cast has ended, and a comparison of values ends this one too.
    translator = context._ComptimeContext__tx
    may_end = not (translator.one_graph or translator.error_on_graph_break)
    _SEEN.append(_UNKNOWN if may_end else _LOST)
    if not may_end:
        warnings.warn(
            "Module.compile with fullgraph compiles hooks apart from forward: what forward writes into an "
            "argument that input_format has cast is lost; use the step `compile`",
            stacklevel=2,
        )


def _seen_version() -> int:
    return _SEEN.pop()


# As torch.compiler.assume_constant_result does, which imports the compiler.
_seen_version._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _traced_version(tensor: Tensor) -> int:  # noqa: ARG001
    """Return the version that a tensor has at this place of a trace; below 0 in a later graph."""
    if not is_dynamo_compiling():
        return _UNKNOWN
    from torch._dynamo.comptime import comptime

    comptime(_note_version)
    return _seen_version()


def _compare_and_write_back(before: Tensor, after: Tensor, change: _Change) -> None:
    """Write back where a call was compiled in parts: what these have written shows in the values alone."""
    if before.shape != after.shape or not torch.equal(change(before), after):
        _write_back(before, after, change)


def _write_back(before: Tensor, after: Tensor, change: _Change) -> None:
    """Write into the caller's tensor the elements that the call has changed in the lent one."""
    if before.shape != after.shape:  # `out=` of another shape
        before.resize_(after.shape)
    elif before.dtype != after.dtype:  # the other elements keep their precision
        same = (change(before) == after).to(before.device)
        after = after.to(before.device, before.dtype)
        with torch.no_grad():  # the gradient is that of the lent tensor in all elements
            after.copy_(torch.where(same, before, after))
    before.copy_(after)
