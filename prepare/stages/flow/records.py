"""Records of a layout flow as plain data, saved to and loaded from `flow.json` without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from prepare.core.utils.json_records import JsonRecord, Kind, Readable

if TYPE_CHECKING:
    from torch import Tensor

    from prepare.stages.flow.call_sites import CallSite

# The note of a flow without `wanted`, of a model that no step has converted: it has no break to find.
NOT_ASKED = "nothing was asked for: no convolution is in channels-last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A call site where an activation leaves the layout.

    `module` is the innermost module whose forward was running, `type`
    its class. `operand` describes the layouts of the inputs. `before` are the strides of an input,
    `after` those of the output, whose shape is `shape`. A call site that runs `count` times is one event;
    `bytes` is the size of all its outputs together. `source` is `file:line` of the code that called the
    operation, and empty if a module of torch called it. `cause` is one word, such as `instance_norm`.
    """

    module: str
    type: str
    operation: str
    operand: str
    shape: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    bytes: int = 0
    source: str
    cause: str
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy made only because of a layout; `bytes` is the size of all `count` copies together.

    `source` is `file:line` of the code that called the operation, and empty if a module of torch called it.
    """

    module: str
    type: str
    operation: str
    bytes: int = 0
    why: str
    count: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """Calls of one 2-d or 3-d convolution in forward: layouts of its tensors, and its backend."""

    module: str
    type: str
    input: str
    weight: str
    output: str
    backend: str
    calls: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Steps to add, and the breaks and copied bytes that a forward then has."""

    steps: tuple[str, ...]
    breaks: int
    copied_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Flow(JsonRecord, Readable):
    """Events, copies and convolutions of one forward: where the layout is lost, and the cost.

    `mode` is `predict` or `observe`. `status` is `ok` or `cannot predict`; then `reason` says why, and
    the other fields hold what was recorded up to that point. `wanted` maps a rank to a format; `notes`
    are sentences about what could not be followed or is risky.
    One of them is NOT_ASKED if nothing was asked of the layout, so that no break says nothing.
    `remedy` was tried by prediction; None if nothing was found, or nothing tried. `device` is the device
    that the flow is for, which a prediction may not have had; empty in older files.
    """

    KIND: ClassVar[Kind] = Kind("prepare.flow", "a flow", "a flow.json")

    mode: str
    status: str
    reason: str
    wanted: dict[int, str]
    events: tuple[Event, ...]
    copies: tuple[Copy, ...]
    convolutions: tuple[Convolution, ...]
    notes: tuple[str, ...]
    remedy: Remedy | None = None
    device: str = ""

    @property
    def summary(self) -> dict[str, Any]:
        """Totals of one forward.

        `convolutions` counts those that were called; `in_layout` those whose outputs had the wanted layout
        in every call.
        """
        fits = {*self.wanted.values(), "ambiguous"}
        off = {row.module for row in self.convolutions if row.output not in fits}
        called = {row.module for row in self.convolutions}
        causes: Counter[str] = Counter()
        for event in self.events:
            causes[event.cause] += event.count
        ranked = sorted(causes.items(), key=lambda item: (-item[1], item[0]))
        return {
            "breaks": causes.total(),
            "by_cause": dict(ranked),
            "copied_bytes": sum(copy.bytes for copy in self.copies),
            "convolutions": len(called),
            "in_layout": len(called - off),
        }

    def content(self) -> dict[str, Any]:
        wanted = {str(rank): word for rank, word in sorted(self.wanted.items())}
        return {"summary": self.summary} | asdict(self) | {"wanted": wanted}


class FlowBuilder:
    """Counts repeated events, copies and calls; keeps each in the order of its first occurrence.

    `device` is the device that the flow is for.
    """

    def __init__(self, device: str, wanted: dict[int, str]) -> None:
        self.device, self.wanted = device, wanted
        # Each record without its totals, how often it was found, and the bytes of all together.
        self._counts: Counter[Any] = Counter()
        self._bytes: Counter[Any] = Counter()
        self._notes: dict[str, None] = {}

    def add_event(self, site: CallSite, output: Tensor) -> None:
        """Count a break at `site`, where `output` is the result of the operation."""
        record = Event(
            **site.place(),
            operand=site.operand,
            shape=tuple(output.shape),
            before=site.before,
            after=output.stride(),
            cause=site.cause,
        )
        self._add(record, output.nbytes)

    def add_copy(self, site: CallSite, tensor: Tensor, why: str) -> None:
        """Count a copy of `tensor` that was made only because of a layout."""
        self._add(Copy(**site.place(), why=why), tensor.nbytes)

    def add_convolution(self, site: CallSite, layouts: Iterable[str], backend: str) -> None:
        """Count one call of a convolution; `layouts` are those of its input, weight and output."""
        named: Any = dict(zip(("input", "weight", "output"), layouts, strict=True))
        self._add(Convolution(module=site.module, type=site.type, **named, backend=backend), 0)

    def add_note(self, text: str) -> None:
        """Add a sentence for the user; a repeated sentence is kept once."""
        self._notes[text] = None

    def build(self, mode: str, reason: str = "") -> Flow:
        """Return the flow; `reason` says why the forward could not be followed to its end."""
        return Flow(
            mode=mode,
            status="cannot predict" if reason else "ok",
            reason=reason,
            wanted=self.wanted,
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
