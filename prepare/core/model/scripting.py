"""Say in one line, before torch.jit.script fails, that it cannot compile what a step has put into a model."""

from typing import Any, ClassVar

from prepare.errors import PrepareError, Problem


def script_error(module: Any, step: str) -> PrepareError:
    """Return the error for a module whose class a step has changed."""
    return PrepareError.of([_problem(f"{type(module).__name__}({module.extra_repr()})", step)])


class NotScriptable:
    """A base of hooks: torch.jit.script asks a hook for its `__name__` before it compiles anything."""

    step: ClassVar[str]
    """The module in `prepare.steps` that has installed the hook, and can `undo` it."""

    @property
    def __name__(self) -> str:
        raise AttributeError(str(_problem(f"the hook {type(self).__qualname__}", self.step)))


def _problem(where: str, step: str) -> Problem:
    wrong = f"torch.jit.script cannot compile it: the step {step} runs code of its own there"
    undo = f"from prepare.steps import {step}; {step}.undo(model)"
    return Problem(where, wrong, f"use torch.jit.trace or torch.export, or undo the step: {undo}")
