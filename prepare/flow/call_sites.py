"""Where an operation was called from: the innermost module, and the line of the user's code."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules import module as torch_module

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parent) + os.sep
_FUNCTIONAL = os.path.join(_TORCH, "nn", "functional.py")  # noqa: PTH118


@dataclass(slots=True)
class Place:
    """Where an operation ran. `function` is the one of torch.nn.functional that called it, if any.

    A place is made once for every call, so `reported` is of that call alone. What runs `inside` a
    module that is taken as a whole is no event of its own.
    """

    module: str
    type: str
    function: str = ""
    source: str = ""
    operation: str = ""
    cause: str = ""
    operand: str = ""
    before: tuple[int, ...] = ()
    reported: bool = False
    inside: bool = False

    def copy(self) -> Place:
        """The same place for another event, which is not reported yet."""
        return replace(self, reported=False)


class ModuleStack:
    """The modules whose forward is running, outermost first; follows them by torch's global hooks.

    Those leave no trace in the model, and with `always_call` they see a forward that raises as well
    (torch's ModuleTracker loses its way under no_grad).
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.root = type(model).__name__
        self.on_enter = self.on_exit = _nothing
        self._running: list[tuple[nn.Module, str]] = []
        self._handles: list[Any] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._enter),
            torch_module.register_module_forward_hook(self._exit, always_call=True),
        ]
        return self

    def __exit__(self, *raised: object) -> None:
        for handle in self._handles:
            handle.remove()

    def __bool__(self) -> bool:
        return bool(self._running)

    def name(self, module: nn.Module) -> str | None:
        """The dotted name of a module of this model; None for any other."""
        return self.names.get(id(module))

    def place(self) -> Place:
        """The place of the operation that runs now."""
        name, kind = "", self.root
        if self._running:
            module, name = self._running[-1]
            kind = type(module).__name__
        return Place(name, kind, *_caller())

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            # A module that is in no table (kept in a list) is named after the one that called it.
            above = self._running[-1][1] if self._running else ""
            self._running.append((module, self.names.get(id(module), above)))
            self.on_enter(module, args)

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            while self._running and self._running.pop()[0] is not module:
                pass
            self.on_exit(module, output)
        # Anything but None would take the place of the output.
        return None  # noqa: PLR1711, RET501


def _nothing(module: nn.Module, value: Any) -> None:
    """What happens on entering or leaving a module, unless something else is set."""


def _caller() -> tuple[str, str]:
    """The function of torch.nn.functional that runs, and `file:line` of the code outside of torch."""
    frame, function = sys._getframe(1), ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _FUNCTIONAL:
            function = code.co_name
        elif code.co_name == "_call_impl" and code.co_filename.startswith(_TORCH):
            return function, ""  # a module of torch's own, or compiled code, called it
        elif not code.co_filename.startswith((_TORCH, _OURS)) and code.co_filename[:1] != "<":
            return function, f"{_short(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return function, ""


def _short(path: str) -> str:
    """A path that is the same on another machine, where it can be."""
    for marker in ("site-packages" + os.sep, "dist-packages" + os.sep):
        if marker in path:
            return path.rpartition(marker)[2].replace(os.sep, "/")
    below = os.path.relpath(path)
    return (path if below.startswith("..") else below).replace(os.sep, "/")
