"""Act on a difference: write it down, then raise, warn, or put torch's own class back."""

from __future__ import annotations

import logging
import re
import warnings
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from prepare.core.forward.compiled import is_compiled
from prepare.core.forward.nested import map_tensors
from prepare.core.utils.files import open_unlinked, write_bytes
from prepare.core.utils.suggest import choose
from prepare.core.utils.text import first_line
from prepare.errors import GuardError, GuardWarning, Problem, RefusedError, raise_problems
from prepare.guard.apart import apart
from prepare.pipeline.optimizer_state import relayout

if TYPE_CHECKING:
    from pathlib import Path

    from torch.optim import Optimizer

    from prepare.guard.originals import Originals
    from prepare.guard.watch import WatchedCall

# The phases whose steps change the code of a module.
_CODE = ("structure", "runtime")
OnDifference = Literal["raise", "warn", "fallback"]
_log = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class ContiguousArguments:
    """A forward pre-hook that makes the arguments contiguous; as plain data it can be copied and pickled."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return map_tensors(_contiguous, args), map_tensors(_contiguous, kwargs)


@dataclass
class Response:
    """Acts on differences; `differences` holds those that were found."""

    pipeline: Any
    originals: Originals
    action: OnDifference
    optimizer: Optimizer | None
    folder: Path | None
    differences: list[WrongModule] = field(default_factory=list)
    _warned: set[str] = field(default_factory=set)
    _is_back: set[str] = field(default_factory=set)

    def act(self, found: WrongModule, record: WatchedCall) -> bool:
        """Write `found` down, and act; return whether torch's own class was put back in the module.

        Raises:
            GuardError: that is the action, or torch's own class cannot be put back, or was and did not help.
        """
        if self.folder is not None:
            found = replace(found, file=_save(self.folder, found, record))
        if self.action == "fallback":
            found = self._put_back(found, record.watched.name, record.watched.module)
        self.differences.append(found)
        _log.warning("%s", found)
        if self.folder is not None:
            _write(self.folder / "guard.log", f"{found}\n")
        if not found.done and self.action != "warn":
            raise GuardError("", str(found))
        if found.module not in self._warned:
            self._warned.add(found.module)
            warnings.warn(str(found), GuardWarning, stacklevel=2)
        return bool(found.done)

    def _put_back(self, found: WrongModule, name: str, module: nn.Module) -> WrongModule:
        if name in self._is_back:
            return replace(found, text=f"{found.text}, also with torch's own class put back")
        is_step = torch.is_grad_enabled() and module.training and self.optimizer is None
        if is_step and any(not tensor.is_contiguous() for tensor in _own(module)):
            why = "its weights would change their layout in training: give guard the optimizer="
            return replace(found, text=f"{found.text}, and torch's own cannot be put back: {why}")
        return replace(found, done=apart(lambda: self._exchange(name, module)))  # uninterrupted

    def _exchange(self, name: str, module: nn.Module) -> str:
        """Put torch's own class back in `module`, not in those inside it; return what was done."""
        self._is_back.add(name)
        if is_compiled(module):
            vars(module).pop("_compiled_call_impl")
            return "it runs uncompiled from now on"
        # A view of the module without its children, on which a step is undone that would reach into them.
        view = object.__new__(type(module))
        kept = {key: part for key, part in module._modules.items() if key == "parametrizations"}
        vars(view).update(vars(module) | {"_modules": kept})
        self.pipeline.undo(view, phases=_CODE)
        module.__class__ = type(view)
        for key in vars(module).keys() - vars(view).keys():  # a method that a step had put on it
            del vars(module)[key]
        with torch.no_grad():
            for tensor in _own(module):
                tensor.data = tensor.data.contiguous()
        if ContiguousArguments() not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(ContiguousArguments(), with_kwargs=True)
        if self.optimizer is not None:
            relayout(self.optimizer)
        self.originals.restore(name, module)
        return f"its own {type(module).__name__} runs there in the contiguous format from now on"


def check_options(action: str, seconds: float, max_bytes: int, share: float) -> None:
    """Raise a RefusedError if an option of a guard is wrong."""
    remedy = choose(str(action), actions := get_args(OnDifference))
    checks = [
        (action in actions, "on_difference", f"{action!r} is not allowed", remedy),
        (share > 0, "share", f"{share} is not above 0", "give a part of the time, as in 0.01"),
        (seconds > 0, "seconds", f"{seconds} is not above 0", "give the seconds of a call"),
        (max_bytes >= 1, "max_bytes", f"{max_bytes} is not at least 1", "give a number of bytes"),
    ]
    raise_problems(RefusedError, [Problem(*told) for is_right, *told in checks if not is_right])


def _own(module: nn.Module) -> list[Tensor]:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in tensors if tensor is not None]


def _contiguous(tensor: Tensor) -> Tensor:
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.contiguous() if is_strided else tensor


def _write(log: Path, line: str) -> None:
    """Add a line to a log that is no link; a difference is told also where that is not possible."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a", opener=open_unlinked) as file:
            file.write(line)
    except OSError as error:
        _log.warning("guard: %s is not written: %s", log, error)


def _save(folder: Path, found: WrongModule, record: WatchedCall) -> str:
    """Write the call and the weights for `torch.load`; return the path, empty if that is not possible."""
    path = folder / re.sub(r"[^\w.-]", "_", f"guard-{found.module}.pt")
    arguments, module = record.call.arguments.map(torch.Tensor.detach), record.watched.module
    content = {
        "module": found.module,
        "args": arguments.args,
        "kwargs": arguments.kwargs,
        "output_gradients": record.call.output_gradients,
        "weights": module.state_dict(),
        "training": module.training,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(content, buffer := BytesIO())
        write_bytes(path, buffer.getvalue())
    except Exception as error:  # an argument may be of any class
        _log.info("guard: the call of %s is not saved: %s", found.module, first_line(error))
        return ""
    return str(path)
