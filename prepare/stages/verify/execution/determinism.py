"""Make runs comparable: no dropout, the same random numbers and training modes, and float64 by default."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_DROPOUTS = frozenset(
    {torch.dropout, torch.dropout_, torch.alpha_dropout, torch.feature_dropout}
    | {getattr(functional, name) for name in ("dropout", "alpha_dropout", "feature_alpha_dropout")}
    | {functional.dropout1d, functional.dropout2d, functional.dropout3d}
)
_UNIFORM = frozenset({torch.rand, torch.rand_like})
_NORMAL = frozenset({torch.randn, torch.randn_like})
_BERNOULLI = frozenset({torch.bernoulli, Tensor.bernoulli})
_IN_PLACE = frozenset({Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_})
_RANDOM = _UNIFORM | _NORMAL | _BERNOULLI | _IN_PLACE
# The results of these functions have the default dtype, whatever their arguments.
_FLOATING = frozenset(
    {torch.empty, torch.empty_strided, torch.empty_permuted, torch.zeros, torch.ones, torch.eye}
    | {torch.rand, torch.randn, torch.normal, torch.linspace, torch.logspace, torch.range}
    | {torch.fft.fftfreq, torch.fft.rfftfreq, torch.kaiser_window, torch.bartlett_window}
    | {torch.blackman_window, torch.hamming_window, torch.hann_window}
)
# The results of these functions have the default dtype for numbers that are floating.
_BY_VALUE = frozenset(
    {torch.arange, torch.full, torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor}
    | {torch.sparse_coo_tensor, torch.sparse_csr_tensor, torch.sparse_csc_tensor}
)
# A cast names its dtype; these methods name it in their own name.
_CASTS = frozenset({Tensor.float, Tensor.cfloat, Tensor.type})  # type: ignore[attr-defined]


class DeterministicMode(TorchFunctionMode):
    """Makes dropout return its input, and random numbers independent of dtype, memory format and device.

    torch's own random numbers depend on all of these. Replaced are the usual ways to draw (stochastic
    depth, noise, Gumbel's); not the numbers of a generator that the model has, nor permutations and samples.
    If torch's generator is reset, as for a checkpointed segment that runs again in backward, the numbers
    repeat too. With `replace_numbers=False` only dropout is changed: for tensors without data.
    """

    def __init__(self, *, replace_numbers: bool = True) -> None:
        super().__init__()
        self._replaced = _RANDOM if replace_numbers else frozenset()
        self._generator = torch.Generator("cpu")
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
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        if func is torch.autograd.backward and (gradients := _plain_gradients(**kwargs)):
            return self._backward(args[0], gradients)
        if func not in self._replaced or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        # Drawing this number advances torch's generator, and identifies its state.
        state = torch.rand((), dtype=torch.float64, device="cpu").item()
        output = func(*args, **kwargs)
        if not output.is_complex():
            self._generator.manual_seed(self._seeds.setdefault(state, len(self._seeds)))
            with torch.no_grad():
                output.copy_(self._drawn(func, output, args, kwargs))
        return output

    def _backward(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Run backward under this mode; torch suspends a mode while it handles a function."""
        with self:
            engine = torch.autograd.Variable._execution_engine
            engine.run_backward(
                tuple(tensors),
                gradients,
                keep_graph=False,
                create_graph=False,
                inputs=(),
                allow_unreachable=True,
                accumulate_grad=True,
            )

    def _drawn(self, func: Any, output: Tensor, args: tuple, kwargs: dict) -> Tensor:
        """Draw the numbers of a random function in float64 on the CPU."""
        drawn = torch.empty(output.shape, dtype=torch.float64, device="cpu")
        if func in _UNIFORM:
            below_one = 1 - torch.finfo(output.dtype).eps / 2  # a cast may round up to one
            return drawn.uniform_(generator=self._generator).clamp_(max=below_one)
        if func in _NORMAL:
            return drawn.normal_(generator=self._generator)
        inputs = (drawn, *args[1:]) if func in _IN_PLACE else args
        options = {name: _to_float64(value) for name, value in kwargs.items() if name != "out"}
        return func(*map(_to_float64, inputs), **options | {"generator": self._generator})


def _plain_gradients(grad_tensors: Any, **options: Any) -> tuple[Tensor, ...]:
    """Return the gradients that start a backward; empty if one is missing, or another option is set."""
    single = isinstance(grad_tensors, Tensor)
    gradients = (grad_tensors,) if single else tuple(grad_tensors or ())
    is_plain = all(isinstance(item, Tensor) for item in gradients) and not any(options.values())
    return gradients if is_plain else ()


def _to_float64(value: Any) -> Any:
    """Copy a tensor of probabilities, so that all runs read the same values."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=torch.float64, device="cpu").copy_(value.detach())


def training_flags(model: nn.Module, mode: str) -> dict[str, bool]:
    """Return the training flag of every module by name; the present ones if the model is in `mode`.

    So a frozen norm in a model in training mode stays frozen.
    """
    keeps_flags = model.training == (mode == "train")
    return {name: m.training if keeps_flags else mode == "train" for name, m in _named(model)}


def make_deterministic(model: nn.Module, flags: Mapping[str, bool]) -> None:
    """Set training flags, and disable dropout; only for a model that is restored afterwards."""
    for name, module in _named(model):
        is_dropout = "drop" in type(module).__name__.lower()  # also DropPath and StochasticDepth
        training = flags.get(name, model.training) and not is_dropout
        if not isinstance(module, torch.jit.ScriptModule):
            module.training = training
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            module.dropout = 0.0


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return model.named_modules(remove_duplicate=False)


class Float64Default(TorchFunctionMode):
    """Within it, what torch computes in the default dtype is float64: new tensors, and quotients of integers.

    Not `torch.set_default_dtype`, which is that of all threads: a model that another one runs meanwhile would
    compute in float64. This mode does not see scripted code, nor `torch.Tensor(...)`.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FLOATING and kwargs.get("dtype") is None and not _has_floats(args, kwargs):
            return func(*args, **kwargs | {"dtype": torch.float64})
        output = func(*args, **kwargs)
        wider = {torch.get_default_dtype(): torch.float64, torch.complex64: torch.complex128}
        dtype = wider.get(output.dtype) if isinstance(output, Tensor) else None
        if dtype is None or func in _CASTS or _has_floats(args, kwargs):
            return output
        if func in _BY_VALUE:
            return func(*args, **kwargs | {"dtype": dtype})
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            return output
        for convert in (_tensor_to_float64, _number_to_float64):
            with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):
                again = func(*tree_map(convert, args), **tree_map(convert, kwargs))
                if again.dtype == dtype:
                    return again
        return output.to(dtype)  # the function requires its integers and numbers


def _has_floats(args: tuple, kwargs: dict) -> bool:
    """Return whether an argument determines the dtype of the result."""
    return any(
        isinstance(leaf, torch.dtype)
        or (isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()))
        for leaf in tree_leaves((args, kwargs))
    )


def _tensor_to_float64(value: Any) -> Any:
    return value.to(torch.float64) if isinstance(value, Tensor) else value


def _number_to_float64(value: Any) -> Any:
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value
