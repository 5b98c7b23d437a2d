"""Lend a call other tensors in place of those of its caller, and take them back after it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from prepare.core.forward.nested import (
    LEAVES,
    is_container,
    items_of,
    replace_items,
    report_left,
    report_unknown,
    set_item,
)

_Change = Callable[[Tensor], Tensor]


class Loan:
    """The tensors lent to one call of `module`, each in place of one of the caller's.

    The call gets the caller's own lists, dicts and dataclasses, with lent tensors in them: what it writes
    into them reaches the caller, and so does what it writes into a lent tensor. Only tuples and read-only
    mappings are made anew.
    """

    def __init__(self, module: nn.Module, change: _Change, change_in_trace: _Change) -> None:
        self.module = module
        # torch.compile may run one part of a hook as it is, and trace another: this says what began.
        self.is_traced = is_dynamo_compiling()
        self.depth = 0 if self.is_traced else _depth()
        self._change = change_in_trace if self.is_traced else change
        self._lent: list[tuple[Tensor, Tensor, int]] = []
        self._to_return: list[tuple[Tensor, Tensor]] = []
        self._containers: list[Any] = []

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
            if not self.is_traced and after._version != version:
                _write_back(before, after, self._change)

    def _tensor(self, tensor: Tensor) -> Tensor:
        for before, after, _ in self._lent:
            if before is tensor:
                return after
        if self.is_traced:  # torch then does not count the changes of a tensor
            after, version = self._change(tensor), 0
        else:
            with ExitStack() as stack:
                if (
                    torch.is_inference_mode_enabled()
                ):  # tensors made in it do not count their changes
                    stack.enter_context(torch.inference_mode(mode=False))
                    stack.enter_context(torch.no_grad())
                after = self._change(tensor)
            version = 0 if after is tensor else after._version
        if after is not tensor:
            self._lent.append((tensor, after, version))
            self._to_return.append((tensor, after))
        return after

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
    change_in_trace: _Change,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call of `module` with `change` applied to each tensor, until `take_back`.

    What a call that torch.compile traces writes into a tensor of `change_in_trace` is lost.
    """
    loan = Loan(module, change, change_in_trace)
    if loan.is_traced:
        _TRACED.append(loan)
    else:
        loans = _OPEN.loans
        # A call that ended with KeyboardInterrupt has run no hook: it was not inside of this one.
        while loans and loans[-1].depth >= loan.depth:
            loans.pop().end()
        loans.append(loan)
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
