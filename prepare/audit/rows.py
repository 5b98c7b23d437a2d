"""One row of an audit: one tensor of one module, and its status."""

from typing import Any, NamedTuple

# From worst to best; a row has the worst status that applies.
STATUSES = ("ineffective", "skipped", "converted", "already", "untouched")


class AuditRow(NamedTuple):
    """One tensor of one module. Shapes and strides are in elements, dtype and device are names.

    `stride` is exact, `layouts` are all the formats that it satisfies; both, and `shape`, are None or
    empty for a tensor without strides. `before` holds stride, dtype and device before `apply`.
    """

    module: str
    type: str
    tensor: str
    kind: str
    shape: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    dtype: str
    device: str
    layouts: tuple[str, ...]
    shared_with: tuple[str, ...]
    before: dict[str, Any] | None
    status: str
    steps: tuple[str, ...]
    reason: str | None

    @property
    def path(self) -> str:
        """The dotted name, as in `state_dict`, with "(computed)" after a computed weight."""
        path = f"{self.module}.{self.tensor}" if self.module else self.tensor
        return f"{path} (computed)" if self.kind == "computed" else path
