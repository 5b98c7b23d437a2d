"""Make runs comparable: no dropout, the same random numbers and training modes, and float64 by default."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_DROPOUTS = frozenset(
    {torch.dropout, torch.dropout_, torch.alpha_dropout, torch.feature_dropout}
    | {getattr(functional, name) for name in ("dropout", "alpha_dropout", "feature_alpha_dropout")}
    | {functional.dropout1d, functional.dropout2d, functional.dropout3d}
)
_UNIFORM, _NORMAL = (torch.rand, torch.rand_like), (torch.randn, torch.randn_like)
_IN_PLACE = (Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_)
_RANDOM = frozenset({*_UNIFORM, *_NORMAL, *_IN_PLACE, torch.bernoulli, Tensor.bernoulli})
# A cast names its dtype; these methods name it in their own name.
_CASTS = frozenset({Tensor.float, Tensor.cfloat, Tensor.type})  # type: ignore[attr-defined]
_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class SameNumbers(TorchFunctionMode):
    """Makes dropout return its input, and random numbers independent of dtype, memory format and device.

    torch's own random numbers depend on all of these. Replaced are the usual ways to draw (stochastic
    depth, noise, Gumbel's); not the numbers of a generator that the model has, nor permutations and samples.
    If torch's generator is reset, as for a checkpointed segment that runs again in backward, the numbers
    repeat too. With `wide`, tensors that a function makes in torch's default dtype are float64: not by
    `torch.set_default_dtype`, which is that of all threads.
    """

    def __init__(self, *, wide: bool = False) -> None:
        super().__init__()
        self._wide, self._generator = wide, torch.Generator("cpu")
        # A seed for each state of torch's generator, in the order of their first use.
        self._seeds: dict[float, int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        if func is torch.autograd.backward and kwargs.get("grad_tensors") is not None:
            with self:  # torch suspends a mode while it handles a function
                return run_backward(args[0], **kwargs)
        if func in _RANDOM and kwargs.get("generator") is None:
            output = self._drawn(func, args, kwargs)
        else:
            output = func(*args, **kwargs)
        is_made = self._wide and isinstance(output, Tensor) and output.dtype in _WIDER
        if (
            is_made
            and func not in _CASTS
            and not any(map(_names_a_dtype, tree_leaves((args, kwargs))))
        ):
            return output.to(_WIDER[output.dtype])
        return output

    def _drawn(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Call a random function, and replace its numbers by those of a generator in float64 on the CPU."""
        # Drawing this number advances torch's generator, and identifies its state.
        state = torch.rand((), dtype=torch.float64, device="cpu").item()
        output = func(*args, **kwargs)
        if output.is_complex():
            return output
        own: Any = {
            "generator": self._generator.manual_seed(
                self._seeds.setdefault(state, len(self._seeds))
            )
        }
        numbers = torch.empty(output.shape, dtype=torch.float64, device="cpu")
        with torch.no_grad():
            if func in _UNIFORM:
                below_one = 1 - torch.finfo(output.dtype).eps / 2  # a cast may round up to one
                numbers.uniform_(**own).clamp_(max=below_one)
            elif func in _NORMAL:
                numbers.normal_(**own)
            else:
                inputs = (numbers, *args[1:]) if func in _IN_PLACE else args
                options = {n: _in_float64(v) for n, v in kwargs.items() if n != "out"}
                numbers = func(*map(_in_float64, inputs), **options | own)
            return output.copy_(numbers)


def run_backward(tensors: Any, grad_tensors: Any, retain_graph: Any = None, **_: Any) -> None:
    """Do as `torch.autograd.backward`, with the modes that are active."""
    roots, gradients = (
        (each,) if isinstance(each, Tensor) else tuple(each) for each in (tensors, grad_tensors)
    )
    engine, keep = torch.autograd.Variable._execution_engine, bool(retain_graph)
    options = {"allow_unreachable": True, "accumulate_grad": True}
    engine.run_backward(roots, gradients, keep, False, (), **options)


def training_flags(model: nn.Module, mode: str) -> dict[str, bool]:
    """Return the training flag of every module by name; the present ones if the model is in `mode`.

    So a frozen norm in a model in training mode stays frozen.
    """
    keeps, named = model.training == (mode == "train"), model.named_modules(remove_duplicate=False)
    return {name: module.training if keeps else mode == "train" for name, module in named}


def make_deterministic(model: nn.Module, flags: Mapping[str, bool], seed: int = 0) -> None:
    """Set training flags and seeds, and disable dropout; only for a model that is restored afterwards."""
    for name, module in model.named_modules(remove_duplicate=False):
        is_dropout = "drop" in type(module).__name__.lower()  # also DropPath and StochasticDepth
        if not isinstance(module, torch.jit.ScriptModule):
            module.training = flags.get(name, model.training) and not is_dropout
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            module.dropout = 0.0
    if torch.cuda.is_initialized():
        torch.manual_seed(seed)
    else:  # torch.manual_seed takes 1,000 times as long: it formats a stack for each kind of device
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _names_a_dtype(value: Any) -> bool:
    """Return whether an argument determines the dtype of the result."""
    is_tensor = isinstance(value, Tensor)
    return isinstance(value, torch.dtype) or (
        is_tensor and (value.is_floating_point() or value.is_complex())
    )


def _in_float64(value: Any) -> Any:
    """Copy a tensor of probabilities, so that all runs read the same values."""
    return value.detach().to("cpu", torch.float64) if isinstance(value, Tensor) else value
