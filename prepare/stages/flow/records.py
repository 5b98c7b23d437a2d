"""Records of a layout flow as plain data, saved to and loaded from `flow.json` without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from prepare.core.utils.json_records import JsonRecord, Kind, Readable
from prepare.errors import FlowError

# The note of a flow without `wanted`, of a model that no step has converted: it has no break to find.
NOT_ASKED = "nothing was asked for: no convolution is in channels-last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A call site where an activation, or in phase `backward` a gradient, leaves or regains the layout.

    `kind` is `break` or `regain`. `module` is the innermost module whose forward was running, `type`
    its class. `operand` describes the layouts of the inputs. `before` are the strides of an input,
    `after` those of the output, whose shape is `shape`. A call site that runs `count` times is one event;
    `bytes` is the size of all its outputs together. `source` is `file:line` of the code that called the
    operation, and empty if a module of torch called it. `cause` is one word, such as `instance_norm`.
    """

    kind: str
    phase: str
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
    phase: str
    why: str
    count: int = 0
    source: str = field(default="", metadata={"late": True})


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
    """Steps to add, and the breaks and copied bytes that forward and backward then have together."""

    steps: tuple[str, ...]
    breaks: int
    copied_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Flow(JsonRecord, Readable):
    """Events, copies and convolutions of one forward: where the layout is lost and regained, and the cost.

    `mode` is `predict` or `observe`. `status` is `ok` or `cannot predict`; then `reason` says why, and
    the other fields hold what was recorded up to that point. `wanted` maps a rank to a format; `notes`
    are sentences about what could not be followed or is risky.
    One of them is NOT_ASKED if nothing was asked of the layout, so that no break says nothing.
    `remedy` was tried by prediction; None if nothing was found, or nothing tried. `device` is the device
    that the flow is for, which a prediction may not have had; empty in older files.
    """

    KIND: ClassVar[Kind] = Kind("prepare.flow", 1, "a flow", "a flow.json", FlowError)

    mode: str
    status: str
    reason: str
    wanted: dict[int, str]
    events: tuple[Event, ...]
    copies: tuple[Copy, ...]
    convolutions: tuple[Convolution, ...]
    notes: tuple[str, ...]
    remedy: Remedy | None = field(default=None, metadata={"late": True})
    device: str = field(default="", metadata={"late": True})

    @property
    def summary(self) -> dict[str, Any]:
        """Totals for forward, and for backward under the key `backward`.

        `convolutions` counts those that were called; `in_layout` those whose outputs had the wanted layout
        in every call.
        """
        fits = {*self.wanted.values(), "ambiguous"}
        off = {row.module for row in self.convolutions if row.output not in fits}
        called = {row.module for row in self.convolutions}
        total = _totals(self.events, self.copies, "forward")
        total |= {"convolutions": len(called), "in_layout": len(called - off)}
        return total | {"backward": _totals(self.events, self.copies, "backward")}

    def content(self) -> dict[str, Any]:
        wanted = {str(rank): word for rank, word in sorted(self.wanted.items())}
        return {"summary": self.summary} | asdict(self) | {"wanted": wanted}


def _totals(events: Iterable[Event], copies: Iterable[Copy], phase: str) -> dict[str, Any]:
    in_phase = [event for event in events if event.phase == phase]
    causes: Counter[str] = Counter()
    for event in in_phase:
        causes[event.cause] += event.count if event.kind == "break" else 0
    ranked = sorted((-count, word) for word, count in causes.items() if count)
    return {
        "breaks": causes.total(),
        "regains": sum(event.count for event in in_phase if event.kind == "regain"),
        "by_cause": {word: -count for count, word in ranked},
        "copied_bytes": sum(copy.bytes for copy in copies if copy.phase == phase),
    }
