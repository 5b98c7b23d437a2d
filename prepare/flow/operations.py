"""Operations that ran, their operands, and the states of the operands' storages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prepare.flow.torch_operators import cause_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.multiprocessing.reductions import StorageWeakRef

    from prepare.flow.call_sites import CallSite


@dataclass(slots=True)
class StorageState:
    """The state of one storage. `weak` keeps the storage's address from being reused.

    `source` is the operation that wrote it. `left_at` is the call site where the data left a temporary
    reshape in another layout.
    """

    weak: StorageWeakRef
    state: str = "unknown"
    backward: bool = False
    source: str = ""
    left_at: CallSite | None = None


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument of an operation, the name of the argument, and the state of its storage."""

    label: str
    tensor: Tensor
    storage: StorageState | None

    @property
    def state(self) -> str:
        return self.storage.state if self.storage else "unknown"

    @property
    def left_at(self) -> CallSite | None:
        return self.storage.left_at if self.storage else None


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation that ran.

    `phase` is `forward`, `backward`, or `again` (a checkpointed segment that runs a second time).
    """

    name: str
    site: CallSite
    phase: str = "forward"
    backend: str = ""
    is_view: bool = False

    @property
    def cause(self) -> str:
        return cause_of(self.name, self.site.function, self.site.type, self.backend)
