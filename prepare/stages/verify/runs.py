"""Run a model once on stand-ins, with the numbers of every other run, and keep what it computes."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from prepare.core.forward.call import Call, map_tensors, placed, tensors_in
from prepare.core.forward.input_formatter import Formatter, may_be_activation
from prepare.core.forward.torch_state import autocast, device_of
from prepare.core.forward.unchanged import copy_of, real_stand_in, unchanged, without_gradients
from prepare.core.model.tensors import is_plain
from prepare.core.model.unsafe_backward import UnsafeCalls
from prepare.core.utils.process_state import held_interrupts, ignored_warnings, interruptible
from prepare.pipeline.transfer import check_cast
from prepare.stages.verify.deviations import in_float64, rounding_step
from prepare.steps.repairs.convolutions import CONV3D, backward_exceeds_memory

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline

KINDS = ("outputs", "input gradients", "parameter gradients", "buffers")
_NORMS = (_BatchNorm, _InstanceNorm, nn.GroupNorm)
# Functions of torch by name, those that make a tensor and those that fill one.
_MADE = {"rand", "rand_like", "randn", "randn_like"}
_RANDOM = _MADE | {"bernoulli", "bernoulli_", "uniform_", "normal_", "exponential_"}
# A tensor that exceeds its tolerance is compared again on inputs changed by this fraction.
JITTER = 0.02

Named = dict[str, Tensor]


@dataclass
class ModuleCall:
    """A call of a leaf module: its arguments and outputs, and their gradients by place.

    `is_twice`: more than one backward passed it, as where a forward differentiates.
    """

    name: str
    arguments: Call
    outputs: dict[int, Tensor] = field(default_factory=dict)
    output_gradients: dict[int, Tensor] = field(default_factory=dict)
    input_gradients: dict[int, Tensor] = field(default_factory=dict)
    is_twice: bool = False

    def watch(self, tensor: Tensor, gradients: dict[int, Tensor], index: int) -> Tensor:
        """Keep the gradient that the tensor gets."""

        def keep(gradient: Tensor | None) -> None:
            if gradient is not None:  # torch gives None where a forward differentiates
                self.is_twice |= index in gradients
                gradients.setdefault(index, _copy(gradient))

        if tensor.requires_grad:
            tensor.register_hook(keep)
        return tensor


@dataclass
class Run:
    """The tensors of one run by kind and name, and the calls of its leaves in the order of their ends.

    `numbers` counts those of all outputs of leaves.
    """

    tensors: dict[str, Named] = field(default_factory=dict)
    calls: list[ModuleCall] = field(default_factory=list)
    seconds: float = 0.0
    numbers: int = 0


def run_model(
    model: nn.Module,
    call: Call,
    *,
    flags: Mapping[str, bool],
    backward: bool,
    graph: bool = False,
    record: bool = False,
    seed: int = 0,
    amp: str = "none",
    compiled: bool = False,
    repair: torch.dtype | None = None,
    stand_in: Callable[[Tensor], Tensor] | None = None,
) -> Run:
    """Run a model forward, and backward from fixed random gradients; restore the model and all else.

    `stand_in` replaces each tensor of the model, by default by one with the same values and strides. `record`
    keeps the calls of leaves. A compiled model has its own random numbers and dropout. Inputs need a gradient
    only with `backward`, and `graph` makes a graph without one. `repair` avoids torch's own faults in this
    dtype.
    """
    result, start, leaves = Run(), time.perf_counter(), Named()
    # A compiler may have inlined the values of a Parameter.
    own = compiled and (lambda t: t if isinstance(t, nn.Parameter) else copy_of(t))
    stand_in = stand_in or own or (lambda t: _with_hooks(t, real_stand_in(t)))
    with held_interrupts(), contextlib.ExitStack() as stack:
        stack.enter_context(unchanged(model, call.args, call.kwargs, stand_in=stand_in))
        make_deterministic(model, flags, seed)
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.set_grad_enabled(backward or graph))
        stack.enter_context(ignored_warnings(""))  # the user's own call has shown them
        if repair:
            stack.enter_context(repaired(model, repair))
        if not compiled:
            stack.enter_context(SameNumbers())
            stack.enter_context(_hooks(model, result, record=record))
        given = call.map(partial(_leaf, leaves) if backward else copy_of)

        def forward() -> Any:
            with autocast(amp, device_of([model], given.tensors())):
                return interruptible(model, *given.args, **given.kwargs)

        output = forward() if backward or graph else without_gradients(forward)
        named = dict(placed(output, "output"))
        if backward:
            interruptible(_backward, [t for t in named.values() if t.requires_grad])
        buffers = {n: b.detach() for n, b in model.named_buffers() if not b.is_nested}
        result.tensors = {"outputs": {n: t.detach() for n, t in named.items()}, "buffers": buffers}
        both: tuple[Any, ...] = (leaves, dict(model.named_parameters())) if backward else ()
        for kind, tensors in zip(KINDS[1:3], both, strict=False):
            result.tensors[kind] = {n: t.grad for n, t in tensors.items() if t.grad is not None}
    result.seconds = time.perf_counter() - start
    return result


def cast(tensor: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return a contiguous stand-in in another real (or the matching complex) dtype; integers are kept.

    It is on `device`, by default that of the tensor. Numbers beyond the range of `dtype` become its largest,
    so that the noise of rounding stays finite.
    """
    if not is_plain(tensor):
        return tensor
    if tensor.is_complex():
        dtype = torch.promote_types(dtype, torch.complex32)
    dtype = dtype if tensor.is_floating_point() or tensor.is_complex() else tensor.dtype
    with torch.no_grad():
        values = torch.empty(tensor.shape, dtype=dtype, device=device or tensor.device)
        values.copy_(tensor.resolve_neg())
        if not tensor.is_complex():
            check_cast("", tensor, values, clamp=True)
    if not isinstance(tensor, nn.Parameter):
        return values.requires_grad_(tensor.requires_grad)
    return _with_hooks(tensor, nn.Parameter(values, tensor.requires_grad))


@contextlib.contextmanager
def repaired(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Avoid torch's own faults inside the block; only for a model that is restored afterwards.

    Norms get contiguous inputs and gradients, since torch misreads others, and in bfloat16 the convolutions
    are repaired whose backward may overwrite memory.
    """

    def before(_module: nn.Module, args: Any) -> Any:
        return map_tensors(Tensor.contiguous, args)

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(Tensor.contiguous)

    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, _NORMS):
                stack.callback(module.register_forward_pre_hook(before).remove)
                stack.callback(module.register_forward_hook(after).remove)
            if dtype == torch.bfloat16 and CONV3D.fits(module):
                CONV3D.repair(module, {})
        yield


@contextlib.contextmanager
def _hooks(model: nn.Module, result: Run, *, record: bool) -> Iterator[None]:
    """Note the calls of leaves; raise before a backward that is not safe."""
    running: dict[str, list[ModuleCall]] = {}

    def before(name: str, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        given, places = Call(args, kwargs), count()
        call = ModuleCall(name, given.map(_copy))
        running.setdefault(name, []).append(call)

        def view(tensor: Tensor) -> Tensor:
            # A hook of the tensor itself would get the gradients of all its uses. An alias keeps strides of
            # dimensions of one number, which `view_as` changes, and kernels choose their format by these.
            seen = torch.ops.aten.alias(tensor) if tensor.requires_grad else tensor
            return call.watch(seen, call.input_gradients, next(places))

        given = given.map(view)
        return given.args, given.kwargs

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        is_plain_call = args and isinstance(args[0], Tensor) and isinstance(output, Tensor)
        if is_plain_call and backward_exceeds_memory(module, args[0], output):
            raise RuntimeError("torch's backward overwrites memory [conv3d_bfloat16_small_cpu]")
        tensors = list(tensors_in(output))
        result.numbers += sum(tensor.numel() for tensor in tensors)
        if running.get(name):
            result.calls.append(call := running[name].pop())
            for index, tensor in enumerate(tensors):
                call.outputs[index] = _copy(call.watch(tensor, call.output_gradients, index))

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            # Some run as a whole, and their children hold numbers only.
            whole = hasattr(module, "parametrizations") or isinstance(module, nn.MultiheadAttention)
            if isinstance(module, torch.jit.ScriptModule) or (module._modules and not whole):
                continue
            if record:
                options = {"with_kwargs": True, "prepend": True}
                handle = module.register_forward_pre_hook(partial(before, name), **options)
                stack.callback(handle.remove)
            stack.callback(module.register_forward_hook(partial(after, name)).remove)
        with UnsafeCalls() if torch.is_grad_enabled() else contextlib.nullcontext():
            yield


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _leaf(leaves: Named, tensor: Tensor) -> Tensor:
    copy = copy_of(tensor)
    if not (copy.is_floating_point() or copy.is_complex()):
        return copy
    leaves[f"input {len(leaves)}"] = copy.requires_grad_()
    # A leaf cannot be changed in place, as a model's first ReLU may do; a copy of it can.
    return copy.clone()


def _backward(roots: list[Tensor]) -> None:
    """Run backward from numbers that every dtype represents exactly, of the size of a mean loss's.

    A plain sum as the loss is useless for a model that ends in a norm or softmax: its gradient is zero.
    """
    gradients = []
    for seed, root in enumerate(roots):
        indices = torch.randint(0, 4, root.shape, generator=torch.Generator().manual_seed(seed))
        signed = torch.tensor([-1.0, -0.5, 0.5, 1.0])[indices]
        exponent = round(math.log2(max(root.numel(), 1)) / 2)
        gradients.append(torch.empty_like(root).copy_(signed * 2.0**-exponent))
    if roots:
        # In `torch.autograd.backward` torch suspends its modes, and a checkpointed segment runs again there.
        engine, options = torch.autograd.Variable._execution_engine, (False, False, ())
        reach = {"allow_unreachable": True, "accumulate_grad": True}
        engine.run_backward(tuple(roots), tuple(gradients), *options, **reach)


def _with_hooks(tensor: Tensor, stand_in: Tensor) -> Tensor:
    """Copy the gradient hooks of a Parameter; not those after accumulation, where an optimizer may step."""
    hooks = getattr(tensor, "_backward_hooks", None) if stand_in is not tensor else None
    for hook in (hooks or {}).values():
        stand_in.register_hook(hook)
    return stand_in


class SameNumbers(TorchFunctionMode):
    """Makes dropout return its input, and torch's random numbers the same in every dtype, format and device.

    Replaced are the usual ways to draw (stochastic depth, noise, Gumbel's); not the numbers of a generator
    that the model has, nor permutations and samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        output = func(*args, **kwargs)
        if name not in _RANDOM or kwargs.get("generator") is not None or output.is_complex():
            return output
        self.draws += 1
        torch.default_generator.manual_seed(self.draws)
        fixed = {"dtype": torch.float64, "device": "cpu"} if name in _MADE else {}
        with torch.no_grad():
            # All runs draw from the same values in the same order.
            numbers = func(
                *map_tensors(in_float64, args), **map_tensors(in_float64, kwargs) | fixed
            )
            if name in ("rand", "rand_like"):  # a cast may round up to one
                numbers.clamp_(max=1 - torch.finfo(output.dtype).eps / 2)
            return output.copy_(numbers)


def training_flags(model: nn.Module, mode: str) -> dict[str, bool]:
    """Return the training flag of every module by name; the present ones if the model is in `mode`.

    So a frozen norm in a model in training mode stays frozen.
    """
    trains, named = mode == "train", model.named_modules(remove_duplicate=False)
    return {n: m.training if model.training == trains else trains for n, m in named}


def make_deterministic(model: nn.Module, flags: Mapping[str, bool], seed: int = 0) -> None:
    """Set training flags and seeds, and disable dropout; only for a model that is restored afterwards."""
    for name, module in model.named_modules(remove_duplicate=False):
        is_dropout = "drop" in type(module).__name__.lower()  # also DropPath and StochasticDepth
        if not isinstance(module, torch.jit.ScriptModule):
            module.training = flags.get(name, model.training) and not is_dropout
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            module.dropout = 0.0
    # Not torch.manual_seed, which keeps a call for each device that has not begun.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def format_call(call: Call, prepared: nn.Module, pipeline: Pipeline | None) -> Call:
    """Convert the call to the device, dtypes and memory formats of the prepared model.

    Without a pipeline, these are the device and dtype of its largest parameter.
    """
    if pipeline is not None:
        return pipeline.format_call(call, prepared)
    floats = [p for p in prepared.parameters() if p.is_floating_point()]
    largest = max(floats, key=Tensor.numel, default=None)
    return call if largest is None else call.map(Formatter(largest.device, largest.dtype).tensor)


def rounded_call(call: Call, prepared: nn.Module, pipeline: Pipeline | None) -> Call:
    """Return the formatted call, but what is no activation as the user gave it: to round that is an error."""
    given = iter(call.tensors())

    def choose(tensor: Tensor) -> Tensor:
        own = next(given)
        return tensor if may_be_activation(own) else own.to(tensor.device)

    return format_call(call, prepared, pipeline).map(choose)


def user_formatter(pipeline: Pipeline) -> Callable[[Any], Any] | None:
    """Return the function with which a user formats a batch; None if the model formats it itself."""
    is_attached = any(getattr(step, "attach", False) for step in pipeline.steps.values())
    return None if is_attached else pipeline.format


def nudged(tensor: Tensor) -> Tensor:
    """Change each floating-point number of a tensor by what a module may round, up or down."""
    if not tensor.is_floating_point():
        return tensor
    return tensor + tensor * rounding_step(tensor.dtype) * _noise(tensor).sign()


def jittered(tensor: Tensor) -> Tensor:
    """Add random numbers to a floating-point tensor, scaled to its root mean square."""
    if not tensor.is_floating_point() or tensor.numel() < 2:
        return tensor
    size = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)
    return tensor + _noise(tensor) * (JITTER * float(size) / math.sqrt(tensor.numel()))


def _noise(like: Tensor) -> Tensor:
    """Return the same random numbers for every tensor of this shape, with a variance of 1."""
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randn(like.shape, generator=generator, device="cpu")
    return drawn.to(like.device, like.dtype)
