"""Add up what a forward does with layouts, and build the flow of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prepare.stages.flow.layouts import layout_of
from prepare.stages.flow.records import Convolution, Copy, Event, Flow

if TYPE_CHECKING:
    from torch import Tensor

    from prepare.stages.flow.call_sites import CallSite


class FlowBuilder:
    """Counts repeated events, copies and calls; keeps each in the order of its first occurrence.

    `device` is the device that the flow is for.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        # Each record without its totals, how often it was found, and the bytes of all together.
        self._counts: Counter[Any] = Counter()
        self._bytes: Counter[Any] = Counter()
        self._notes: dict[str, None] = {}

    def add_event(self, kind: str, phase: str, site: CallSite, output: Tensor) -> None:
        """Count a break or regain at `site`, where `output` is the result of the operation."""
        record = Event(
            kind=kind,
            phase=phase,
            **site.place(),
            operand=site.operand,
            shape=tuple(output.shape),
            before=site.before,
            after=output.stride(),
            cause=site.cause,
        )
        self._add(record, output.nbytes)

    def add_copy(self, phase: str, site: CallSite, tensor: Tensor, why: str) -> None:
        """Count a copy of `tensor` that was made only because of a layout."""
        self._add(Copy(**site.place(), phase=phase, why=why), tensor.nbytes)

    def add_convolution(
        self, site: CallSite, tensors: tuple[Tensor, Tensor, Tensor], backend: str
    ) -> None:
        """Count one call of a convolution; `tensors` are its input, weight and output."""
        given, weight, output = map(layout_of, tensors)
        layouts: Any = {"input": given, "weight": weight, "output": output}
        self._add(Convolution(module=site.module, type=site.type, **layouts, backend=backend), 0)

    def add_note(self, text: str) -> None:
        """Add a sentence for the user; a repeated sentence is kept once."""
        self._notes[text] = None

    def build(self, mode: str, wanted: Mapping[int, str], reason: str = "") -> Flow:
        """Return the flow; `reason` says why the forward could not be followed to its end."""
        return Flow(
            mode=mode,
            status="cannot predict" if reason else "ok",
            reason=reason,
            wanted=dict(wanted),
            events=self._records(Event),
            copies=self._records(Copy),
            convolutions=self._records(Convolution),
            notes=tuple(self._notes),
            device=self.device,
        )

    def _add(self, record: Any, size: int) -> None:
        self._counts[record] += 1
        self._bytes[record] += size

    def _records(self, kind: type[Any]) -> tuple[Any, ...]:
        found: list[Any] = [
            (record, n) for record, n in self._counts.items() if type(record) is kind
        ]
        if kind is Convolution:
            return tuple(replace(record, calls=n) for record, n in found)
        return tuple(replace(record, count=n, bytes=self._bytes[record]) for record, n in found)
