"""Set the switches of torch's backends for the whole process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from prepare.errors import ConfigError, Problem, raise_problems
from prepare.registry import register
from prepare.step import ModelStep

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

# The function that restores the switches as they were before the first call of `act`.
_restore: list[Callable[[], None]] = []


def undo() -> None:
    """Set every switch to its value before this step first acted in this process."""
    while _restore:
        _restore.pop()()


@register("backends")
class Backends(ModelStep):
    """Sets switches of torch's backends; null leaves a switch as it is. They apply to the whole process.

    A job, a verification, a timing and a tuning restore them at their end, and a failed `apply` does. In
    training code they stay; to undo: `from prepare.steps import backends; backends.undo()`. A timing runs
    the unprepared model under the same switches, so compare their effect by the seconds of two runs.
    Helps: `cudnn_benchmark` for inputs of few sizes, `tf32` and `matmul_precision` on GPUs with TF32.
    Hurts: TF32 keeps 10 bits of a product's digits; a search for algorithms takes time for each new size.
    Source: `torch.backends`, `torch.set_float32_matmul_precision`.
    """

    cudnn_benchmark: bool | None = None
    """Search for the fastest algorithm of each convolution and input size."""
    cudnn_deterministic: bool | None = None
    """Use deterministic algorithms only."""
    tf32: bool | None = None
    """Use TF32 for float32 convolutions, recurrent layers and matrix products on a GPU."""
    matmul_precision: Literal["highest", "high", "medium"] | None = None
    """The precision of float32 matrix products, as for `torch.set_float32_matmul_precision`."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        step = super().from_options(options)
        raise_problems(ConfigError, step._conflicts())
        return step

    def _conflicts(self) -> Iterator[Problem]:
        where = f"steps.{self.name}"
        if self.cudnn_benchmark and self.cudnn_deterministic:
            wrong = "chooses an algorithm by its time, which differs from run to run, "
            wrong += "and cudnn_deterministic is set"
            yield Problem(f"{where}.cudnn_benchmark", wrong, "drop one of the two")
        uses = self.matmul_precision != "highest"
        if None not in (self.tf32, self.matmul_precision) and uses != self.tf32:
            how, state = "uses" if uses else "does not use", str(self.tf32).lower()
            wrong = f"{self.matmul_precision} {how} TF32, and tf32 is {state}"
            yield Problem(f"{where}.matmul_precision", wrong, "drop one of the two")

    def targets(self, model: torch.nn.Module) -> Iterable[str]:
        from prepare.core.forward.torch_state import SWITCHES

        differ = any(SWITCHES[name].read() != value for name, value in self._wanted().items())
        return ("",) if differ else ()

    def act(self, model: torch.nn.Module) -> None:
        from prepare.core.forward.torch_state import SWITCHES, saved_switches

        if not _restore:
            _restore.append(saved_switches())
        for name, value in self._wanted().items():
            SWITCHES[name].set(value)

    def _wanted(self) -> dict[str, Any]:
        """Return the value of each switch of `prepare.core.forward.torch_state` that is to be set."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        tf32 = values.pop("tf32")
        if tf32 is not None:
            values["cudnn_tf32"] = tf32
            values["matmul_precision"] = self.matmul_precision or ("high" if tf32 else "highest")
        return {name: value for name, value in values.items() if value is not None}
