"""Add up what a forward does with layouts, and build the flow of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from prepare.stages.flow.layouts import layout_of
from prepare.stages.flow.records import Convolution, Copy, Event, Flow, ModuleLayout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from prepare.stages.flow.call_sites import CallSite


class FlowBuilder:
    """Counts repeated events, copies and calls; keeps each in the order of its first occurrence.

    `device` is the device that the flow is for.
    """

    device = ""

    def __init__(self) -> None:
        self._bytes: Counter[Any] = Counter()
        self._counts: dict[type, Counter[Any]] = defaultdict(Counter)
        self._layouts: dict[str, Counter[str]] = defaultdict(Counter)
        self._calls: Counter[str] = Counter()
        self._notes: dict[str, None] = {}

    def add_event(self, kind: str, phase: str, site: CallSite, output: Tensor) -> None:
        """Count a break or regain at `site`, where `output` is the result of the operation."""
        shape, after = tuple(output.shape), output.stride()
        key = (kind, phase, site.module, site.type, site.operation, site.operand, shape,
               site.before, after, site.source, site.cause)  # fmt: skip
        self._counts[Event][key] += 1
        self._bytes[key] += output.nbytes

    def add_copy(self, phase: str, site: CallSite, tensor: Tensor, why: str) -> None:
        """Count a copy of `tensor` that was made only because of a layout."""
        key = (site.module, site.type, site.operation, phase, why, site.source)
        self._counts[Copy][key] += 1
        self._bytes[key] += tensor.nbytes

    def add_convolution(
        self, site: CallSite, tensors: tuple[Tensor, Tensor, Tensor], backend: str
    ) -> None:
        """Count one call of a convolution; `tensors` are its input, weight and output."""
        self._counts[Convolution][site.module, site.type, *map(layout_of, tensors), backend] += 1

    def add_module_call(self, name: str, output_layouts: list[str]) -> None:
        """Count one call of a module, and the layouts of its outputs."""
        self._calls[name] += 1
        self._layouts[name].update(output_layouts)

    def add_note(self, text: str) -> None:
        """Add a sentence for the user; a repeated sentence is kept once."""
        self._notes[text] = None

    def build(
        self, model: nn.Module, mode: str, wanted: Mapping[int, str], reason: str = ""
    ) -> Flow:
        """Return the flow; `reason` says why the forward could not be followed to its end."""
        return Flow(
            mode=mode,
            status="cannot predict" if reason else "ok",
            reason=reason,
            wanted=dict(wanted),
            events=tuple(self._rows(Event)),
            copies=tuple(self._rows(Copy)),
            convolutions=tuple(self._rows(Convolution)),
            modules=tuple(
                ModuleLayout(
                    name=name,
                    type=type(module).__name__,
                    depth=name.count(".") + 1 if name else 0,
                    layout=_worst(self._layouts[name], wanted),
                    calls=self._calls[name],
                )
                for name, module in model.named_modules()
            ),
            notes=tuple(self._notes),
            device=self.device,
        )

    def _rows(self, cls: type[Any]) -> Iterator[Any]:
        """Yield the records of a class: a key has all its fields but the totals, in their order."""
        for key, count in self._counts[cls].items():
            totals, rest = {"count": count, "calls": count, "bytes": self._bytes[key]}, iter(key)
            names = (field.name for field in fields(cls))
            yield cls(**{name: totals[name] if name in totals else next(rest) for name in names})


def _worst(layouts: Mapping[str, int], wanted: Mapping[int, str]) -> str:
    """Choose one layout for a module: one that is not wanted first, `ambiguous` and `none` last."""
    fine = (*wanted.values(), "ambiguous", "none")
    return min(layouts, key=lambda word: (word in fine, word in fine[-2:], word), default="none")
