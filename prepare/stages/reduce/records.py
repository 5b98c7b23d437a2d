"""A call of one module as plain data, and the result of a reduction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from prepare.core.utils import files

# More than any script needs.
_LIMIT = 1 << 24
# The largest error that rounding explains, relative to the largest number of a tensor. In float32, sums of a
# few thousand products stay below 1e-5.
ALLOWED = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 6e-2}
WRONG, RAISES, CRASHES, HANGS, SLOW = FAULTS = ("wrong", "raises", "crashes", "hangs", "slow")


@dataclass(frozen=True, kw_only=True)
class ModuleCall:
    """A call of a module of torch.nn with one tensor.

    `options` are the arguments of its constructor that differ from the defaults, in `arguments` those
    without a default. The input is normal with this `mean` and `deviation`. With `repeats` above 1 the call
    is repeated until it fails. `allowed` is None for the default of the dtype.
    """

    name: str
    kind: str
    arguments: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]
    format: str = "contiguous"
    dtype: str = "float32"
    device: str = "cpu"
    training: bool = True
    backward: bool = True
    mean: float = 0.0
    deviation: float = 1.0
    repeats: int = 1
    allowed: float | None = None
    slow: bool = False

    @property
    def limit(self) -> float:
        """The relative error that is allowed."""
        return self.allowed or ALLOWED[self.dtype]

    def value(self, key: str, default: Any = None) -> Any:
        """Return an argument or option of the constructor."""
        return dict(self.arguments + self.options).get(key, default)

    @property
    def size(self) -> tuple[float, ...]:
        """Numbers that a reduction makes smaller, the most important first."""
        channels = [value for _, value in self.arguments if isinstance(value, int)]
        rest = (self.repeats, self.backward, self.dtype != "float32", self.format != "contiguous")
        return (math.prod(self.shape) + sum(channels), len(self.options), *map(float, rest))


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """A reduced fault.

    `fault` is one of FAULTS, `text` what the script said when it failed. `module` is the dotted name in the
    network, `call` the reduced call. `known` names a known issue of the same operation; empty if there is
    none.
    """

    script: str
    fault: str = ""
    module: str = ""
    call: ModuleCall | None = None
    text: str = ""
    known: str = ""

    def save(self, path: str | Path) -> None:
        """Write the script. Raises FileError."""
        files.write_text(path, self.script)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the script, which is all that a run's folder keeps of a reduction. Raises FileError."""
        return cls(script=files.read_text(path, limit=_LIMIT))
