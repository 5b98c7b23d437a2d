"""What one run would take in time and memory, estimated from the shapes of a forward, before it is done."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from prepare.core.forward.nested import tensors_in
from prepare.core.forward.stand_ins import copy_of, real_stand_in, standing_in
from prepare.core.forward.torch_state import isolated
from prepare.core.utils.text import size
from prepare.verify.execution.determinism import Still, hold_still

if TYPE_CHECKING:
    from prepare.core.forward.call import Call

# On one thread of a CPU; measured there were 3.6 to 12 for float64, and 11 to 260 for the others.
_OPERATIONS_PER_SECOND = {torch.float64: 3e9}
_OTHERS_PER_SECOND = 1e10
_BYTES_PER_SECOND = 1e9
_SECONDS_PER_CALL = 5e-5


@dataclass
class Cost:
    """What one forward does, in numbers of elements and operations, whatever the dtype.

    `unfolded` holds how many elements each convolution would unfold its input to, 27 times its input
    for 3x3x3 kernels; and under True those of them that float32 may unfold as well: 3-d, of one sample.
    """

    parameters: int = 0
    elements: int = 0
    operations: int = 0
    calls: int = 0
    unfolded: dict[bool, list[int]] = field(default_factory=dict)

    def bytes(self, dtype: torch.dtype, *, backward: bool) -> int:
        """The memory of a run in `dtype`, from above: nothing is given back before it ends."""
        kept = self.elements + 2 * max(self._unfolded(dtype), default=0)
        # Gradients of activations come and go; those of parameters stay.
        return dtype.itemsize * (kept + 2 * self.parameters + backward * self.elements // 2)

    def seconds(self, dtype: torch.dtype, *, backward: bool) -> float:
        """The time of a run in `dtype`, from above; a backward costs twice its forward."""
        rate = _OPERATIONS_PER_SECOND.get(dtype, _OTHERS_PER_SECOND)
        moved = dtype.itemsize * (
            3 * (self.elements + self.parameters) + sum(self._unfolded(dtype)) // 2
        )
        once = self.operations / rate + moved / _BYTES_PER_SECOND + self.calls * _SECONDS_PER_CALL
        return once * (3 if backward else 1)

    def _unfolded(self, dtype: torch.dtype) -> list[int]:
        which = {torch.float64: (True, False), torch.float32: (True,)}.get(dtype, ())
        return [count for key in which for count in self.unfolded.get(key, ())]


class Budget:
    """How much time and memory is left for a verification; asked before each run.

    What a run took says more than any estimate: later ones in its dtype are taken to be as slow or
    quick, for what they do.
    """

    def __init__(self, seconds: float, memory: int) -> None:
        self.seconds, self.memory, self._start = seconds, memory, time.monotonic()
        self._paces: dict[torch.dtype, float] = {}  # the slowest so far, of the estimated time

    def spent(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._start

    @contextlib.contextmanager
    def timing(self, cost: Cost, dtype: torch.dtype, *, backward: bool) -> Iterator[None]:
        """Around a run; one that raises tells nothing of others."""
        began = time.monotonic()
        yield
        estimated = cost.seconds(dtype, backward=backward)
        pace = (time.monotonic() - began) / max(estimated, 1e-9)
        self._paces[dtype] = max(pace, self._paces.get(dtype, 0.0))

    def refuses(self, cost: Cost, dtype: torch.dtype, *, backward: bool = True) -> str:
        """Why a run does not fit, in words; empty where it does."""
        needed = cost.seconds(dtype, backward=backward) * self._paces.get(dtype, 1.0)
        left = self.seconds - self.spent()
        taken = cost.bytes(dtype, backward=backward)
        name = str(dtype).removeprefix("torch.")
        if taken > self.memory:
            return f"a run in {name} takes about {size(taken)}, the limit is {size(self.memory)}"
        if needed > left:
            of = f"{max(left, 0):.0f} of {self.seconds:.0f} are left"
            return f"a run in {name} takes about {needed:.0f} s, and {of}"
        return ""


def estimate(model: nn.Module, call: Call, flags: Mapping[str, bool]) -> Cost:
    """The cost of one forward, each module in the mode that `flags` says.

    It is found on tensors that have shapes only, and where that fails, on real ones.
    """
    cost = Cost(parameters=sum(p.numel() for p in {*model.parameters(), *model.buffers()}))
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def stand_in(tensor: Tensor) -> Tensor:
        return fake.from_tensor(tensor, static_shapes=True)

    try:
        return _count(model, call.map(stand_in), flags, stand_in=stand_in, mode=fake, cost=cost)
    except Exception as error:  # the model's own code met tensors without data
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
    cost = Cost(parameters=cost.parameters)
    return _count(
        model,
        call.map(copy_of),
        flags,
        stand_in=real_stand_in,
        mode=contextlib.nullcontext(),
        cost=cost,
    )


def _count(
    model: nn.Module, call: Call, flags: Mapping[str, bool], *, stand_in: Any, mode: Any, cost: Cost
) -> Cost:
    with (
        isolated(),
        standing_in(model, stand_in),
        torch.inference_mode(mode=False),
        warnings.catch_warnings(),
    ):
        hold_still(model, flags)
        warnings.simplefilter("ignore")  # a run says what is worth saying, with its gradients
        with torch.no_grad(), mode, _Counter(cost), Still(numbers=False):
            model(*call.args, **call.kwargs)
    return cost


class _Counter(TorchDispatchMode):
    """Adds up what every operation of a forward makes and computes."""

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
            self.cost.calls += args[8]  # the reference kernels take group by group
        if not func.is_view:
            self.cost.elements += sum(tensor.numel() for tensor in tensors_in(output))
        return output

    def _unfold(self, given: Tensor, weight: Tensor, output: Tensor, *, transposed: bool) -> None:
        inside, channels = (given, output.shape[1]) if transposed else (output, given.shape[1])
        kernel = weight[0, 0].numel()
        count = inside.shape[0] * channels * kernel * inside[0, 0].numel()
        small = given.dim() == 5 and given.shape[0] == 1
        self.cost.unfolded.setdefault(small, []).append(count)
