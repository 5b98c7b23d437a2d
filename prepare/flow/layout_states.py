"""Follows each activation from one operation to the next, and says where it leaves or regains the layout.

What matters is kept for each storage, as its *state*:

    inside    its data lies in the wanted layout
    passage   it was made from such data, and lies in another shape or order for now (attention)
    lost      it was made from such data, and came out in another layout: a break was reported
    weight    it was computed from parameters alone
    none      nothing is known (the model's input, and what is made of it before it gets inside)

A view moves no data and is never a break. What comes back from a passage in another layout is one
only where an operation that minds is given it (a convolution, a norm, a pool).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.multiprocessing.reductions import StorageWeakRef

from prepare.flow.layouts import in_words, is_inside, is_odd, is_outside
from prepare.flow.torch_operators import cause_of, gives_parameter_gradient, is_sensitive

if TYPE_CHECKING:
    from torch import Tensor

    from prepare.flow.aggregate import Tally
    from prepare.flow.call_sites import Place


@dataclass(slots=True)
class Held:
    """What is known of one storage. `weak` keeps its address from being given to another."""

    weak: StorageWeakRef
    state: str = "none"
    backward: bool = False
    maker: str = ""
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that an operation was given, under the name of its argument."""

    label: str
    tensor: Tensor
    held: Held | None

    @property
    def state(self) -> str:
        return self.held.state if self.held else "none"

    @property
    def place(self) -> Place | None:
        """Where it came back from a passage, in another layout."""
        return self.held.place if self.held else None


@dataclass(frozen=True, slots=True)
class Step:
    """One operation that ran. `phase` is `forward`, `backward`, or `again` (a checkpointed segment)."""

    name: str
    place: Place
    phase: str = "forward"
    backend: str = ""
    is_view: bool = False

    @property
    def cause(self) -> str:
        return cause_of(self.name, self.place.function, self.place.type, self.backend)


class States:
    """The states of all storages, and what an operation does to them."""

    def __init__(self, wanted: Mapping[int, str], tally: Tally) -> None:
        self.wanted, self.tally = wanted, tally
        self._held: dict[int, Held] = {}

    def of(self, tensor: Tensor) -> Held | None:
        """What is known of a tensor's storage."""
        return self._held.get(_key(tensor))

    def hold(self, tensor: Tensor, state: str, maker: str, *, backward: bool = False) -> None:
        """Says what a tensor is that no operation made: a parameter, an input, the loss's gradient."""
        key = _key(tensor)
        if key is not None and key not in self._held:
            self._held[key] = Held(StorageWeakRef(tensor.untyped_storage()), state, backward, maker)

    def is_inside(self, tensor: Tensor) -> bool:
        """Whether it lies in the wanted layout."""
        return is_inside(tuple(tensor.shape), tensor.stride(), self.wanted)

    def follow(
        self, step: Step, operands: list[Operand], outputs: list[tuple[int, Tensor]]
    ) -> None:
        """An operation ran on `operands`, and gave `outputs` at these places of what it returned."""
        if step.phase == "backward":  # only gradients are followed, not what forward saved for them
            operands = [one for one in operands if one.held and one.held.backward]
        minds = is_sensitive(step.name)
        acting = [one for one in operands if minds or one.state != "weight"]
        inside = [one for one in acting if self._acts_inside(one)]
        if minds:
            self._mind(step, acting, inside)
        for index, tensor in outputs:
            held = self.of(tensor)
            if step.is_view and held:
                if acting:
                    self._view(step, held, acting[0].tensor, tensor)
            elif not acting:
                self._put(step, tensor, "weight" if operands else "none")
            elif step.phase == "backward" and gives_parameter_gradient(step.name, index):
                self._put(step, tensor, "weight")
            else:
                self._output(step, acting, inside, tensor)

    def _mind(self, step: Step, acting: list[Operand], inside: list[Operand]) -> None:
        """Reports what came back from a passage in another layout, and odd strides."""
        for one in acting:
            came_back = one.place and one.state in ("inside", "passage")
            if came_back and not inside and self._is_outside(one.tensor):
                if not one.place.reported:
                    one.place.operand = f"it comes back {_words(one.tensor)}"
                    self._event("break", step, one.place, one.tensor)
                one.place.reported, one.held.state = True, "lost"
        for one in inside:
            if _is_odd(one.tensor):
                self._note_odd(step, one)

    def _view(self, step: Step, held: Held, given: Tensor, tensor: Tensor) -> None:
        changed = (given.shape, given.stride()) != (tensor.shape, tensor.stride())
        if held.state in ("inside", "passage") and self._is_outside(tensor) and changed:
            held.place = _came_back(step, given)
        elif held.state in ("lost", "passage") and self.is_inside(tensor) and not _is_odd(tensor):
            if held.state == "lost" and not self.is_inside(given):
                self._regain(step, given, tensor)
            held.state, held.place = "inside", None

    def _output(
        self, step: Step, acting: list[Operand], inside: list[Operand], tensor: Tensor
    ) -> None:
        states = {one.state for one in acting}
        outside = [one for one in acting if self._is_outside(one.tensor)]
        if self.is_inside(tensor):
            if not inside and ("lost" in states or any(one.state == "none" for one in outside)):
                self._regain(step, (outside or acting)[0].tensor, tensor)
            self._put(step, tensor, "inside")
        elif inside and self._is_outside(tensor):
            place = step.place
            place.before = inside[0].tensor.stride()
            place.operand = self._operands(acting, outside)
            odd = any(_is_odd(one.tensor) for one in inside)
            place.cause = "odd_stride" if odd else step.cause
            self._event("break", step, place, tensor)
            self._put(step, tensor, "lost")
        elif inside or states & {"inside", "passage"}:
            place = None
            if self._is_outside(tensor):
                earlier = (one.place for one in outside if one.place)
                place = next(earlier, None) or _came_back(step, acting[0].tensor)
            self._put(step, tensor, "passage", place)
        else:
            self._put(step, tensor, "lost" if "lost" in states else "none")

    def _regain(self, step: Step, given: Tensor, tensor: Tensor) -> None:
        place = step.place.copy()
        place.before, place.operand = given.stride(), f"was given {_words(given)}"
        place.cause = step.cause
        self._event("regain", step, place, tensor)

    def _event(self, kind: str, step: Step, place: Place, tensor: Tensor) -> None:
        if step.phase != "again":  # seen in forward already
            self.tally.event(kind, step.phase, place, tensor)

    def _put(self, step: Step, tensor: Tensor, state: str, place: Place | None = None) -> None:
        key = _key(tensor)
        if key is None:
            return
        held = self._held.get(key)
        if held is None:
            self._held[key] = held = Held(StorageWeakRef(tensor.untyped_storage()))
        held.state, held.place, held.backward = state, place, step.phase == "backward"
        held.maker = f"{step.place.module or step.place.type}: {step.place.operation}"

    def _operands(self, acting: list[Operand], outside: list[Operand]) -> str:
        """`self channels_last, other contiguous (from up.0: aten.convolution); other decides`."""
        shown = [one for one in acting if one.tensor.dim() in self.wanted]
        parts = []
        for one in shown[:4]:
            maker = one.held.maker if one.held and one in outside else ""
            source = f" (from {maker})" if maker else ""
            parts.append(f"{one.label} {_words(one.tensor)}{source}")
        if len(shown) > 4:
            parts.append(f"{len(shown) - 4} more")
        return ", ".join(parts) + (f"; {outside[0].label} decides" if outside else "")

    def _note_odd(self, step: Step, one: Operand) -> None:
        text = (
            f"{step.place.module or step.place.type}: {one.label} of aten.{step.name} has strides "
            f"{list(one.tensor.stride())}, which can be read as {self.wanted[one.tensor.dim()]}, "
            "and torch's kernels do not"
        )
        if step.name.endswith("batch_norm_backward"):
            text += "; torch is known to give wrong gradients there"
        self.tally.note(text)

    def _acts_inside(self, one: Operand) -> bool:
        # The heads of an attention over one token only look like channels-last.
        by_chance = one.state in ("lost", "passage") and _is_odd(one.tensor)
        return self.is_inside(one.tensor) and not by_chance

    def _is_outside(self, tensor: Tensor) -> bool:
        return is_outside(tuple(tensor.shape), tensor.stride(), self.wanted)


def _came_back(step: Step, given: Tensor) -> Place:
    place = step.place.copy()
    place.before, place.cause = given.stride(), step.cause
    return place


def _is_odd(tensor: Tensor) -> bool:
    return is_odd(tuple(tensor.shape), tensor.stride())


def _words(tensor: Tensor) -> str:
    return in_words(tuple(tensor.shape), tensor.stride())


def _key(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # a wrapper without a storage of its own
        return None
