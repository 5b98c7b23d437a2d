"""Find the innermost module and the line of the user's code that called an operation."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules import module as torch_module

_TORCH = str(Path(torch.__file__).parent) + os.sep
# The line that calls an operator of the step keep_layout, a repair, or einops is the model's.
_OTHER_FOLDERS = (
    str(Path(__file__).parent) + os.sep,
    *(str(Path(__file__).parents[2] / "steps" / each) + os.sep for each in ("keeping", "repairs")),
    *(f"{path}{os.sep}" for path in getattr(find_spec("einops"), "submodule_search_locations", ())),
)
_FUNCTIONAL = os.path.join(_TORCH, "nn", "functional.py")  # noqa: PTH118


@dataclass(slots=True)
class CallSite:
    """One call of an operation: the module, its class and the code that called it.

    `function` is the function of torch.nn.functional that called the operation, if any. `reported`: a
    break was reported for this call.
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

    def place(self) -> dict[str, Any]:
        """Return what a record says of the place."""
        at = {"module": self.module, "type": self.type}
        return at | {"operation": self.operation, "source": self.source}


class ModuleStack:
    """Stack of the modules whose forward is running, outermost first, maintained by torch's global hooks.

    Global hooks leave no trace in the model, and with `always_call` they also run when a forward raises
    (torch's ModuleTracker loses track under no_grad).
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.root = type(model).__name__
        self.on_enter: Callable[[nn.Module, Any], None] = lambda *_: None
        self.on_exit: Callable[[nn.Module, Any], None] = lambda *_: None
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

    def name(self, module: nn.Module) -> str | None:
        """Return the dotted name of a module of this model, or None for any other module."""
        return self.names.get(id(module))

    def call_site(self) -> CallSite:
        """Return the call site of the operation that is running."""
        name, class_name = "", self.root
        if self._running:
            module, name = self._running[-1]
            class_name = type(module).__name__
        return CallSite(name, class_name, *_caller())

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            # A module that is not registered (kept in a list) is named after its caller.
            caller = self._running[-1][1] if self._running else ""
            self._running.append((module, self.names.get(id(module), caller)))
            self.on_enter(module, args)

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            while self._running and self._running.pop()[0] is not module:
                pass
            self.on_exit(module, output)
        # A hook that returns anything but None replaces the output.
        return None  # noqa: PLR1711, RET501


def _caller() -> tuple[str, str]:
    """Return the running function of torch.nn.functional, and `file:line` of the code outside of torch."""
    frame: FrameType | None = sys._getframe(1)
    function = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _FUNCTIONAL:
            function = code.co_name
        elif code.co_name == "_call_impl" and code.co_filename.startswith(_TORCH):
            return function, ""  # the caller is a module of torch, or compiled code
        elif (
            not code.co_filename.startswith((_TORCH, *_OTHER_FOLDERS))
            and code.co_filename[:1] != "<"
        ):
            return function, f"{short_path(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return function, ""


def short_path(path: str) -> str:
    """Shorten a path to one that is the same on other machines, where possible."""
    for marker in ("site-packages" + os.sep, "dist-packages" + os.sep):
        if marker in path:
            return path.rpartition(marker)[2].replace(os.sep, "/")
    relative = os.path.relpath(path)
    return (path if relative.startswith("..") else relative).replace(os.sep, "/")
