"""Act on a difference: write it down, then raise, warn, or put torch's own class back."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from prepare.core.utils.files import open_unlinked, write_bytes
from prepare.core.utils.suggest import choose
from prepare.core.utils.text import first_line
from prepare.errors import GuardError, GuardWarning, Problem, RefusedError, raise_problems
from prepare.guard.apart import apart
from prepare.guard.put_back import obstacle_to_put_back, put_back

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from prepare.guard.compare import WrongModule
    from prepare.guard.originals import Originals
    from prepare.stages.verify.execution.module_calls import RecordedCall

OnDifference = Literal["raise", "warn", "fallback"]
_log = logging.getLogger(__name__)


def check_options(action: str, seconds: float, max_bytes: int, share: float) -> None:
    """Raise a RefusedError if an option of a guard is wrong."""
    if action not in get_args(OnDifference):
        remedy = choose(str(action), get_args(OnDifference))
        raise RefusedError("on_difference", f"{action!r} is not allowed", remedy)
    raise_problems(RefusedError, _limits(seconds, max_bytes, share))


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

    def act(self, found: WrongModule, call: RecordedCall, module: nn.Module) -> bool:
        """Write `found` down, and act; return whether torch's own class was put back in `module`.

        Raises:
            GuardError: that is the action, or torch's own class cannot be put back, or was and did not help.
        """
        if self.folder is not None:
            found = replace(found, file=_save(self.folder, found, call, module))
        if self.action == "fallback":
            found = self._put_back(found, call.module, module)
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
        training = torch.is_grad_enabled() and module.training
        why = obstacle_to_put_back(module, training=training, optimizer=self.optimizer)
        if why:
            text = f"{found.text}, and torch's own cannot be put back: {why}"
            return replace(found, text=text)
        return replace(
            found, done=apart(lambda: self._exchange(name, module))
        )  # without interrupts

    def _exchange(self, name: str, module: nn.Module) -> str:
        done = put_back(module, self.pipeline, self.optimizer)
        self.originals.restore(name, module)
        self._is_back.add(name)
        return done


def _write(log: Path, line: str) -> None:
    """Add a line to a log that is no link; a difference is told also where that is not possible."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a", opener=open_unlinked) as file:
            file.write(line)
    except OSError as error:
        _log.warning("guard: %s is not written: %s", log, error)


def _save(folder: Path, found: WrongModule, call: RecordedCall, module: nn.Module) -> str:
    """Write the call and the weights for `torch.load`; return the path, empty if that is not possible."""
    path = folder / re.sub(r"[^\w.-]", "_", f"guard-{found.module}.pt")
    arguments = call.arguments.map(torch.Tensor.detach)
    content = {
        "module": found.module,
        "args": arguments.args,
        "kwargs": arguments.kwargs,
        "output_gradients": call.output_gradients,
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


def _limits(seconds: float, max_bytes: int, share: float) -> Iterator[Problem]:
    if not share > 0:
        yield Problem("share", f"{share} is not above 0", "give a part of the time, as in 0.01")
    if not seconds > 0:
        yield Problem(
            "seconds", f"{seconds} is not above 0", "give the seconds that a call may take"
        )
    if max_bytes < 1:
        yield Problem("max_bytes", f"{max_bytes} is not at least 1", "give a number of bytes")
