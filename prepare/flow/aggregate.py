"""Adds up what is seen in a forward, call by call, and makes the records of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prepare.flow.layouts import layout_of
from prepare.flow.records import Convolution, Copy, Event, Flow, ModuleLayout

if TYPE_CHECKING:
    from torch import Tensor, nn

    from prepare.flow.call_sites import Place


class Tally:
    """The same event, copy or call seen again is counted, in the order in which each came first."""

    def __init__(self) -> None:
        self._bytes: Counter[Any] = Counter()
        self._counts: dict[type, Counter[Any]] = defaultdict(Counter)
        self._layouts: dict[str, Counter[str]] = defaultdict(Counter)
        self._calls: Counter[str] = Counter()
        self._notes: dict[str, None] = {}

    def event(self, kind: str, phase: str, place: Place, tensor: Tensor) -> None:
        """`tensor` left or regained the layout there; it is what came out."""
        shape, after = tuple(tensor.shape), tensor.stride()
        key = (kind, phase, place.module, place.type, place.operation, place.operand, shape,
               place.before, after, place.source, place.cause)  # fmt: skip
        self._counts[Event][key] += 1
        self._bytes[key] += tensor.nbytes

    def copied(self, phase: str, place: Place, tensor: Tensor, why: str) -> None:
        """As many bytes as `tensor` has were written only because of a layout."""
        key = (place.module, place.type, place.operation, phase, why)
        self._counts[Copy][key] += 1
        self._bytes[key] += tensor.nbytes

    def convolution(
        self, place: Place, tensors: tuple[Tensor, Tensor, Tensor], backend: str
    ) -> None:
        """One call: input, weight and output."""
        layouts = (layout_of(tuple(tensor.shape), tensor.stride()) for tensor in tensors)
        self._counts[Convolution][place.module, place.type, *layouts, backend] += 1

    def gave(self, name: str, layouts: list[str]) -> None:
        """A module was called, and gave tensors of these layouts."""
        self._calls[name] += 1
        self._layouts[name].update(layouts)

    def note(self, text: str) -> None:
        """A sentence for the user, said once."""
        self._notes[text] = None

    def flow(
        self, model: nn.Module, mode: str, wanted: Mapping[int, str], reason: str = ""
    ) -> Flow:
        """The records; with a `reason`, why the forward could not be followed to its end."""
        return Flow(
            mode=mode,
            status="cannot predict" if reason else "ok",
            reason=reason,
            wanted=dict(wanted),
            events=tuple(self._event(*item) for item in self._counts[Event].items()),
            copies=tuple(self._copy(*item) for item in self._counts[Copy].items()),
            convolutions=tuple(_convolution(*i) for i in self._counts[Convolution].items()),
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
        )

    def _event(self, key: tuple, count: int) -> Event:
        names = ("kind", "phase", "module", "type", "operation", "operand", "shape", "before",
                 "after", "source", "cause")  # fmt: skip
        return Event(bytes=self._bytes[key], count=count, **dict(zip(names, key, strict=True)))

    def _copy(self, key: tuple, count: int) -> Copy:
        names = ("module", "type", "operation", "phase", "why")
        return Copy(bytes=self._bytes[key], count=count, **dict(zip(names, key, strict=True)))


def _convolution(key: tuple, calls: int) -> Convolution:
    names = ("module", "type", "input", "weight", "output", "backend")
    return Convolution(calls=calls, **dict(zip(names, key, strict=True)))


def _worst(layouts: Mapping[str, int], wanted: Mapping[int, str]) -> str:
    """One word for all that a module gave: what is not as wanted first, what says nothing last."""
    fine = (*wanted.values(), "ambiguous", "none")
    return min(layouts, key=lambda word: (word in fine, word in fine[-2:], word), default="none")
