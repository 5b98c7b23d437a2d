"""Follow each activation from operation to operation, and report where it leaves the layout.

Each storage has a *state*:

    in_layout  its data is in the wanted layout
    reshaped   computed from such data, temporarily in another shape or order (attention)
    lost       computed from such data, but in another layout: a break was reported
    weight     computed from parameters alone
    unknown    the model's input, and what is computed from it before it is in the layout

A view moves no data and is never a break. If a tensor leaves a temporary reshape in another layout, report
a break only when a layout-sensitive operator (a convolution, a norm, a pool) consumes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.multiprocessing.reductions import StorageWeakRef

from prepare.stages.flow.layouts import describe_layout, has_odd_strides, layout_of
from prepare.stages.flow.torch_operators import cause_of, is_layout_sensitive

if TYPE_CHECKING:
    from torch import Tensor

    from prepare.stages.flow.call_sites import CallSite
    from prepare.stages.flow.records import FlowBuilder


@dataclass(slots=True)
class StorageState:
    """The state of one storage. `weak` keeps the storage's address from being reused.

    `source` is the operation that wrote it. `left_at` is the call site where the data left a temporary
    reshape in another layout.
    """

    weak: StorageWeakRef
    state: str = "unknown"
    source: str = ""
    left_at: CallSite | None = None


class Operand(NamedTuple):
    """A tensor argument of an operation, the name of the argument, and the state of its storage."""

    label: str
    tensor: Tensor
    storage: StorageState | None

    @property
    def state(self) -> str:
        return self.storage.state if self.storage else "unknown"


class Operation(NamedTuple):
    """One operation that ran."""

    name: str
    site: CallSite
    backend: str = ""
    is_view: bool = False

    @property
    def cause(self) -> str:
        return cause_of(self.name, self.site.function, self.site.type, self.backend)


class LayoutStates:
    """The states of all storages, updated by each operation."""

    def __init__(self, wanted: Mapping[int, str], builder: FlowBuilder) -> None:
        self.wanted, self.builder = wanted, builder
        self._storages: dict[int, StorageState] = {}

    def of(self, tensor: Tensor) -> StorageState | None:
        """Return the state of a tensor's storage, or None if the storage is not known."""
        key = _key(tensor)
        return None if key is None else self._storages.get(key)

    def register(self, tensor: Tensor, state: str, source: str) -> None:
        """Set the state of a tensor that is not an output: a parameter, or an input."""
        key = _key(tensor)
        if key is not None and key not in self._storages:
            weak = StorageWeakRef(tensor.untyped_storage())
            self._storages[key] = StorageState(weak, state, source)

    def is_in_layout(self, tensor: Tensor) -> bool:
        """Return True if a tensor has the layout that is wanted for its rank, and no other."""
        return layout_of(tensor) == self.wanted.get(tensor.dim())

    def follow(self, operation: Operation, operands: list[Operand], outputs: list[Tensor]) -> None:
        """Update the states after an operation."""
        is_sensitive = is_layout_sensitive(operation.name)
        # The operands that may determine the layout of the outputs.
        acting = [operand for operand in operands if is_sensitive or operand.state != "weight"]
        in_layout = [operand for operand in acting if self._counts_as_in_layout(operand)]
        if is_sensitive:
            self._check_sensitive(operation, acting, in_layout)
        for output in outputs:
            storage = self.of(output)
            if operation.is_view and storage:
                if acting:
                    self._follow_view(operation, storage, acting[0].tensor, output)
            elif not acting:
                self._set_state(operation, output, "weight" if operands else "unknown")
            else:
                self._follow_output(operation, acting, in_layout, output)

    def _check_sensitive(
        self, operation: Operation, acting: list[Operand], in_layout: list[Operand]
    ) -> None:
        """Report operands that left a temporary reshape in another layout, and odd strides."""
        for operand in acting:
            storage = operand.storage
            site = storage.left_at if storage else None
            if storage is None or site is None or storage.state not in ("in_layout", "reshaped"):
                continue
            if not in_layout and self._is_in_other_layout(operand.tensor):
                if not site.reported:
                    site.operand = f"returns as {describe_layout(operand.tensor)}"
                    self.builder.add_event(site, operand.tensor)
                site.reported, storage.state = True, "lost"
        for operand in in_layout:
            if has_odd_strides(operand.tensor):
                self._note_odd_strides(operation, operand)

    def _follow_view(
        self, operation: Operation, storage: StorageState, source: Tensor, view: Tensor
    ) -> None:
        changed = (source.shape, source.stride()) != (view.shape, view.stride())
        leaves = changed and self._is_in_other_layout(view)
        if storage.state in ("in_layout", "reshaped") and leaves:
            storage.left_at = _site_of(operation, source)
        elif (
            storage.state in ("lost", "reshaped")
            and self.is_in_layout(view)
            and not has_odd_strides(view)
        ):
            storage.state, storage.left_at = "in_layout", None

    def _follow_output(
        self,
        operation: Operation,
        acting: list[Operand],
        in_layout: list[Operand],
        output: Tensor,
    ) -> None:
        states = {operand.state for operand in acting}
        in_other = [operand for operand in acting if self._is_in_other_layout(operand.tensor)]
        if self.is_in_layout(output):
            self._set_state(operation, output, "in_layout")
        elif in_layout and self._is_in_other_layout(output):
            site = operation.site
            site.before = in_layout[0].tensor.stride()
            site.operand = self._describe_operands(acting, in_other)
            is_odd = any(has_odd_strides(operand.tensor) for operand in in_layout)
            site.cause = "odd_stride" if is_odd else operation.cause
            self.builder.add_event(site, output)
            self._set_state(operation, output, "lost")
        elif in_layout or states & {"in_layout", "reshaped"}:
            left_at = None
            if self._is_in_other_layout(output):
                earlier = (each.storage.left_at for each in in_other if each.storage)
                left_at = next(filter(None, earlier), None)
                left_at = left_at or _site_of(operation, acting[0].tensor)
            self._set_state(operation, output, "reshaped", left_at)
        else:
            self._set_state(operation, output, "lost" if "lost" in states else "unknown")

    def _set_state(
        self, operation: Operation, output: Tensor, state: str, left_at: CallSite | None = None
    ) -> None:
        key = _key(output)
        if key is None:
            return
        if key not in self._storages:
            self._storages[key] = StorageState(StorageWeakRef(output.untyped_storage()))
        storage, site = self._storages[key], operation.site
        storage.state, storage.left_at = state, left_at
        storage.source = f"{site.module or site.type}: {site.operation}"

    def _describe_operands(self, acting: list[Operand], in_other: list[Operand]) -> str:
        """Return `self channels_last, other contiguous (from up.0: aten.convolution); other decides`."""
        parts = []
        for operand in [each for each in acting if each.tensor.dim() in self.wanted][:4]:
            origin = operand.storage.source if operand.storage and operand in in_other else ""
            source = f" (from {origin})" if origin else ""
            parts.append(f"{operand.label} {describe_layout(operand.tensor)}{source}")
        return ", ".join(parts) + (f"; {in_other[0].label} decides" if in_other else "")

    def _note_odd_strides(self, operation: Operation, operand: Operand) -> None:
        text = (
            f"{operation.site.module or operation.site.type}: {operand.label} of "
            f"aten.{operation.name} has strides {list(operand.tensor.stride())}, which can be read as "
            f"{self.wanted[operand.tensor.dim()]}, but torch's kernels read them as contiguous"
        )
        self.builder.add_note(text)

    def _counts_as_in_layout(self, operand: Operand) -> bool:
        # The heads of an attention over one token have channels-last strides only by chance.
        by_chance = operand.state in ("lost", "reshaped") and has_odd_strides(operand.tensor)
        return self.is_in_layout(operand.tensor) and not by_chance

    def _is_in_other_layout(self, tensor: Tensor) -> bool:
        rank = tensor.dim()
        return rank in self.wanted and layout_of(tensor) not in (self.wanted[rank], "ambiguous")


def _site_of(operation: Operation, source: Tensor) -> CallSite:
    changes: Any = {"before": source.stride(), "cause": operation.cause, "reported": False}
    return replace(operation.site, **changes)


def _key(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # a wrapper subclass without a storage
        return None
