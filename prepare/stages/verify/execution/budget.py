"""Estimate the time and memory of a run from the shapes of a forward, and keep runs within a budget."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from prepare.core.forward.nested import tensors_in
from prepare.core.forward.stand_ins import copy_of, real_stand_in
from prepare.core.forward.unchanged import unchanged, without_gradients
from prepare.core.utils.process_state import held_interrupts, ignored_warnings
from prepare.core.utils.text import size
from prepare.stages.verify.execution.determinism import DeterministicMode, make_deterministic

if TYPE_CHECKING:
    from prepare.core.forward.call import Call

# Lower bounds for one thread of a CPU: 3.6e9 to 12e9 were measured for float64, 11e9 to 260e9 for others.
_OPERATIONS_PER_SECOND = {torch.float64: 3e9}
_OTHERS_PER_SECOND = 1e10
_BYTES_PER_SECOND = 1e9
_SECONDS_PER_CALL = 5e-5
# Inputs, outputs and their gradients, of a module that runs alone, in multiples of the largest tensor.
_TENSORS_OF_A_MODULE = 8


@dataclass
class Cost:
    """Elements and operations of one forward, independent of the dtype.

    `unfolded` lists the elements of the unfolded input of each convolution, for 3x3x3 kernels 27 times
    its input. Under the key True are those that float32 may unfold as well: 3-d ones of one sample.
    `largest` counts the elements of the largest output of an operator.
    """

    parameters: int = 0
    elements: int = 0
    operations: int = 0
    calls: int = 0
    unfolded: dict[bool, list[int]] = field(default_factory=dict)
    largest: int = 0

    def bytes(self, dtype: torch.dtype, *, backward: bool) -> int:
        """Return an upper bound for the bytes of a run in `dtype`, as if nothing were freed earlier."""
        forward = self.elements + 2 * max(self._unfolded(dtype), default=0)
        # Gradients of activations are freed during backward; those of parameters are kept.
        return dtype.itemsize * (forward + 2 * self.parameters + backward * self.elements // 2)

    def bytes_by_module(self, dtype: torch.dtype, *, backward: bool) -> int:
        """Return the bytes of a recorded run in `dtype`, and of the largest module in float64."""
        unfolded = 2 * max(self._unfolded(torch.float64), default=0)
        alone = torch.float64.itemsize * (unfolded + _TENSORS_OF_A_MODULE * self.largest)
        # Copies of all activations; with a backward copies of their gradients too.
        recorded = dtype.itemsize * (1 + backward) * self.elements
        return (self.bytes(dtype, backward=True) if backward else 0) + recorded + alone

    def seconds(self, dtype: torch.dtype, *, backward: bool) -> float:
        """Return an upper bound for the seconds of a run in `dtype`; a backward costs twice its forward."""
        rate = _OPERATIONS_PER_SECOND.get(dtype, _OTHERS_PER_SECOND)
        moved = dtype.itemsize * (
            3 * (self.elements + self.parameters) + sum(self._unfolded(dtype)) // 2
        )
        forward = self.operations / rate + moved / _BYTES_PER_SECOND
        return (forward + self.calls * _SECONDS_PER_CALL) * (3 if backward else 1)

    def _unfolded(self, dtype: torch.dtype) -> list[int]:
        keys = {torch.float64: (True, False), torch.float32: (True,)}.get(dtype, ())
        return [count for key in keys for count in self.unfolded.get(key, ())]


class Budget:
    """The time and memory that are left for a verification.

    The estimate for a run is scaled by the slowest ratio of measured to estimated time in its dtype. With
    `longest`, `seconds` are those in which this process had a processor, so that other programs take none of
    them, up to `longest` seconds of the clock.
    """

    def __init__(self, seconds: float, memory: int, longest: float = 0.0) -> None:
        self.seconds, self.memory, self.longest = seconds, memory, longest
        self._start, self._start_of_process = time.monotonic(), time.process_time()
        self._paces: dict[torch.dtype, float] = {}  # largest ratio of measured to estimated time

    def spent(self) -> float:
        """Return the seconds of the clock since the budget was created."""
        return time.monotonic() - self._start

    def left(self) -> float:
        """Return the seconds that are left."""
        own = self._counted()
        if not own or self.longest <= self.seconds:
            return self.seconds - own
        return min(self.seconds - own, (self.longest - self.spent()) * own / self.spent())

    def _counted(self) -> float:
        if self.longest <= self.seconds:
            return self.spent()
        # The operations of several threads together may be more.
        return min(self.spent(), time.process_time() - self._start_of_process)

    @contextlib.contextmanager
    def timing(self, cost: Cost, dtype: torch.dtype, *, backward: bool) -> Iterator[None]:
        """Measure the run inside this context; a run that raises is not counted."""
        start = self._counted()
        yield
        estimated = cost.seconds(dtype, backward=backward)
        pace = (self._counted() - start) / max(estimated, 1e-9)
        self._paces[dtype] = max(pace, self._paces.get(dtype, 0.0))

    def pace(self, dtype: torch.dtype) -> float:
        """Return the slowest ratio of measured to estimated time in a dtype; 1 without a measurement."""
        return self._paces.get(dtype, 1.0)

    def refuses(self, cost: Cost, dtype: torch.dtype, *, backward: bool = True) -> str:
        """Say why a run does not fit into the budget; empty if it fits."""
        run = f"a call in {str(dtype).removeprefix('torch.')}"
        memory = cost.bytes(dtype, backward=backward)
        return self._refusal(run, memory, self._estimate(cost, dtype, backward=backward))

    def refuses_modules(self, cost: Cost, dtype: torch.dtype, *, backward: bool) -> str:
        """Say why the modules cannot be compared alone, with or without a `backward` of the recorded run.

        The time is that of this run; the comparison stops when no time is left.
        """
        memory = cost.bytes_by_module(dtype, backward=backward)
        seconds = self._estimate(cost, dtype, backward=backward)
        return self._refusal("a comparison of each module alone", memory, seconds)

    def _estimate(self, cost: Cost, dtype: torch.dtype, *, backward: bool) -> float:
        return cost.seconds(dtype, backward=backward) * self.pace(dtype)

    def _refusal(self, run: str, memory: int, seconds: float) -> str:
        left = self.left()
        if memory > self.memory:
            limit = f"the limit is {size(self.memory)}; raise verify.memory"
            return f"{run} needs about {size(memory)}, {limit}"
        if seconds > left:
            rest = f"{max(left, 0):.0f} of {self.seconds:.0f} s are left; raise verify.seconds"
            return f"{run} takes about {seconds:.0f} s, but {rest}"
        return ""


def estimate(model: nn.Module, call: Call, flags: Mapping[str, bool]) -> Cost:
    """Estimate the cost of one forward, with the training flag of each module from `flags`.

    The forward runs on tensors without data or, if that fails, on real ones. If both raise, the cost is not
    known, and only that of the parameters is counted: the run itself tells whether the model can run.
    """
    cost = Cost(parameters=sum(p.numel() for p in {*model.parameters(), *model.buffers()}))
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def stand_in(tensor: Tensor) -> Tensor:
        return fake.from_tensor(tensor, static_shapes=True)

    try:
        return _count(model, call.map(stand_in), flags, stand_in=stand_in, mode=fake, cost=cost)
    except Exception as error:  # the model's code may raise anything on tensors without data
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
    real = Cost(parameters=cost.parameters)
    mode = contextlib.nullcontext()
    try:
        return _count(model, call.map(copy_of), flags, stand_in=real_stand_in, mode=mode, cost=real)
    except Exception as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
        return Cost(parameters=cost.parameters)


def _count(
    model: nn.Module, call: Call, flags: Mapping[str, bool], *, stand_in: Any, mode: Any, cost: Cost
) -> Cost:
    def run() -> Cost:
        with (
            held_interrupts(may_hang=True),
            unchanged(model, call.args, call.kwargs, stand_in=stand_in),
            torch.inference_mode(mode=False),
            ignored_warnings(),  # the runs that follow give the same ones
        ):
            make_deterministic(model, flags)
            with mode, _CostCounter(cost), DeterministicMode(replace_numbers=False):
                model(*call.args, **call.kwargs)
        return cost

    return without_gradients(run)


class _CostCounter(TorchDispatchMode):
    """Adds the outputs and arithmetic operations of every operator to a Cost."""

    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self.cost = cost

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        packet = func._overloadpacket
        self.cost.calls += 1
        if packet in flop_registry:
            self.cost.operations += int(flop_registry[packet](*args, **kwargs, out_val=output))
        if packet is torch.ops.aten.convolution:
            self._unfold(args[0], args[1], output, transposed=args[6])
            self.cost.calls += args[8]  # the reference kernels run once for each group
        if not func.is_view:
            counts = [tensor.numel() for tensor in tensors_in(output)]
            self.cost.elements += sum(counts)
            self.cost.largest = max(self.cost.largest, *counts, 0)
        return output

    def _unfold(self, source: Tensor, weight: Tensor, output: Tensor, *, transposed: bool) -> None:
        inner, channels = (source, output.shape[1]) if transposed else (output, source.shape[1])
        kernel = weight[0, 0].numel()
        count = inner.shape[0] * channels * kernel * inner[0, 0].numel()
        also_float32 = source.dim() == 5 and source.shape[0] == 1
        self.cost.unfolded.setdefault(also_float32, []).append(count)
