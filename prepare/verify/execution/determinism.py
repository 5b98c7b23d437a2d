"""Keeps a model from dropping out, gives all runs the same random numbers, and sets which modules train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_DROPOUTS = frozenset(
    {torch.dropout, torch.dropout_, torch.alpha_dropout, torch.feature_dropout}
    | {getattr(functional, name) for name in ("dropout", "alpha_dropout", "feature_alpha_dropout")}
    | {functional.dropout1d, functional.dropout2d, functional.dropout3d}
)
_UNIFORM = frozenset({torch.rand, torch.rand_like})
_NORMAL = frozenset({torch.randn, torch.randn_like})
_YES_OR_NO = frozenset({torch.bernoulli, Tensor.bernoulli})
_INTO_ITSELF = frozenset({Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_})
_DRAWING = _UNIFORM | _NORMAL | _YES_OR_NO | _INTO_ITSELF


class Still(TorchFunctionMode):
    """Every call of a dropout gives what it was given, and attention drops nothing.

    Other random numbers are the same in every run, whatever the seed, type, format and device: torch's own
    depend on all of these. Held so is what is drawn in one of the usual ways (stochastic depth, noise,
    Gumbel's), not what a generator of the model's own gives, and no permutation or sample. Where torch's
    generator is set back, as for a checkpointed part that a backward computes once more, so are these.
    Without `numbers` they are torch's own: for tensors without data.
    """

    def __init__(self, *, numbers: bool = True) -> None:
        super().__init__()
        self._drawing = _DRAWING if numbers else frozenset()
        self._numbers = torch.Generator("cpu")
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
        if func is torch.autograd.backward and (gradients := _all_given(**kwargs)):
            return self._backward(*args, gradients)
        if func not in self._drawing or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        # This number goes on with torch's generator, and tells where that one is.
        place = torch.rand((), dtype=torch.float64, device="cpu").item()
        made = func(*args, **kwargs)
        if not made.is_complex():
            self._numbers.manual_seed(self._seeds.setdefault(place, len(self._seeds)))
            with torch.no_grad():
                made.copy_(self._drawn(func, made, args, kwargs))
        return made

    def _backward(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Torch's own would run without this mode: torch puts a mode aside while it handles a call."""
        how = {"keep_graph": False, "create_graph": False, "inputs": ()}
        how |= {"allow_unreachable": True, "accumulate_grad": True}
        with self:
            engine = torch.autograd.Variable._execution_engine
            engine.run_backward(tuple(tensors), gradients, **how)

    def _drawn(self, func: Any, made: Tensor, args: tuple, kwargs: dict) -> Tensor:
        """Such numbers as are in what a function made."""
        drawn = torch.empty(made.shape, dtype=torch.float64, device="cpu")
        if func in _UNIFORM:
            below_one = 1 - torch.finfo(made.dtype).eps / 2  # a cast may round up to it
            return drawn.uniform_(generator=self._numbers).clamp_(max=below_one)
        if func in _NORMAL:
            return drawn.normal_(generator=self._numbers)
        given = (drawn, *args[1:]) if func in _INTO_ITSELF else args
        named = {name: _exact(value) for name, value in kwargs.items() if name != "out"}
        return func(*map(_exact, given), **named | {"generator": self._numbers})


def _all_given(grad_tensors: Any, **others: Any) -> tuple[Tensor, ...]:
    """The gradients that a backward is given; none where one is missing, or where it keeps something."""
    given = (grad_tensors,) if isinstance(grad_tensors, Tensor) else tuple(grad_tensors or ())
    complete = all(isinstance(one, Tensor) for one in given) and not any(others.values())
    return given if complete else ()


def _exact(value: Any) -> Any:
    """A tensor of chances as all runs are to read it."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=torch.float64, device="cpu").copy_(value.detach())


def flags_for(model: nn.Module, mode: str) -> dict[str, bool]:
    """The training mode of every module, by name: as it is, where the model is in that mode already.

    So a norm that is frozen in a model in training stays frozen.
    """
    as_it_is = model.training == (mode == "train")
    return {name: m.training if as_it_is else mode == "train" for name, m in _named(model)}


def hold_still(model: nn.Module, flags: Mapping[str, bool]) -> None:
    """Sets the training mode of every module, and dropout off; only for a model that is set back."""
    for name, module in _named(model):
        drops = "drop" in type(module).__name__.lower()  # DropPath and StochasticDepth's like
        training = flags.get(name, model.training) and not drops
        if not isinstance(module, torch.jit.ScriptModule):
            module.training = training
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            module.dropout = 0.0


def _named(model: nn.Module) -> Any:
    return model.named_modules(remove_duplicate=False)
