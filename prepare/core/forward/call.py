"""The arguments of one call of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prepare.core.forward.nested import arguments, map_tensors, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True)
class Call:
    """`model(*args, **kwargs)`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def map(self, change: Callable[[Tensor], Tensor]) -> Call:
        """Return the call with `change` applied to every tensor, at any depth."""
        return Call(map_tensors(change, self.args), map_tensors(change, self.kwargs))

    def tensors(self) -> list[Tensor]:
        """Return every tensor, in order."""
        return list(tensors_in([*self.args, *self.kwargs.values()]))

    @property
    def batch(self) -> int | None:
        """Return the size of the first dimension of the first tensor with dimensions; None without one."""
        return next((len(tensor) for tensor in self.tensors() if tensor.dim()), None)


def call_of(batch: Any) -> Call:
    """Convert a tensor, a tuple of positional or a mapping of named arguments, or an Example to a call."""
    return Call(*arguments(batch))
