"""Keep the state of an optimizer on the device and in the strides of its parameters."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from prepare.core.model.memory_format import satisfied
from prepare.core.model.tensors import stride_of
from prepare.errors import ConfigError, Problem
from prepare.pipeline.transfer import AnyMove, Move, Transfer


class RestrideLoadedState:
    """A hook that runs after `optimizer.load_state_dict`, which keeps the strides of the file.

    torch's fused CPU optimizers walk parameter and state by raw pointers, so a state with other strides
    than its parameter silently corrupts the weights.
    """

    def __call__(self, optimizer: Optimizer) -> None:
        relayout(optimizer)

    def install(self, optimizer: Optimizer) -> None:
        """Register the hook, unless it is registered already."""
        hooks = optimizer._optimizer_load_state_dict_post_hooks.values()
        if not any(isinstance(hook, RestrideLoadedState) for hook in hooks):
            optimizer.register_load_state_dict_post_hook(self)


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """Return the innermost optimizer, which holds the state, if Accelerate, Lightning or Lookahead wraps it.

    Raises:
        ConfigError: it is not an optimizer.
    """
    while inner := _wrapped(optimizer):
        optimizer = inner
    if not hasattr(optimizer, "param_groups"):
        wrong = f"{optimizer!r:.60} is not an optimizer"
        raise ConfigError("optimizer", wrong, "give the one that holds the parameters of the model")
    return optimizer


def _wrapped(optimizer: Any) -> Optimizer | None:
    """Return the optimizer in a wrapper: called so, or one with the same groups of parameters."""
    if isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        return inner
    held = vars(optimizer).values() if isinstance(optimizer, Optimizer) else ()
    same = (each for each in held if isinstance(each, Optimizer))
    return next((each for each in same if each.param_groups is optimizer.param_groups), None)


def relayout(optimizer: Optimizer) -> Optimizer:
    """Give the state of `optimizer` the device and strides of its parameters, in place.

    For an optimizer that was not passed to `apply`, after a checkpoint of another layout was loaded into
    it: torch keeps the strides of the file, and its fused optimizers then update the wrong elements.
    Values stay. A failure leaves everything as it was.
    """
    moves = [move for _, move in mismatched_state(unwrap_optimizer(optimizer), {})]
    Transfer(moves).run()
    return optimizer


def unrelated_optimizer(model: nn.Module, optimizer: Optimizer) -> Iterator[Problem]:
    """Yield a problem if `optimizer` holds no parameter of `model`, and so would not train it."""
    parameters = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in parameters for parameter in _parameters(optimizer)):
        remedy = (
            "make it of model.parameters() after load_state_dict(assign=True), which makes new ones"
        )
        yield Problem("optimizer", "holds none of the model's parameters", remedy)


def removed_parameters(
    model: nn.Module, rewritten: nn.Module, optimizer: Optimizer
) -> Iterator[Problem]:
    """Yield a problem if `optimizer` holds parameters of `model` that are no longer in `rewritten`."""
    held = {id(parameter) for parameter in _parameters(optimizer)}
    removed = held - {id(parameter) for parameter in rewritten.parameters()}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in removed]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        wrong = f"holds {names[0]}{more}, which a step replaces with new parameters"
        remedy = "prepare first, then make the optimizer; or drop the step"
        yield Problem("optimizer", wrong, remedy)


def unsupported_training(optimizer: Optimizer, moves: dict[int, AnyMove]) -> Iterator[Problem]:
    """Yield the reasons `optimizer` cannot train its parameters after `moves` (by object id)."""
    after = [(p.shape, *_after_move(p, moves.get(id(p)))) for p in _parameters(optimizer)]
    if any(dtype is torch.float16 for _, _, dtype, _ in after):
        wrong = (
            "its parameters would be float16: GradScaler refuses those, and Adam divides by zero"
        )
        remedy = "keep float32 parameters and use torch.autocast, or take dtype: bfloat16"
        yield Problem("optimizer", wrong, remedy)
    contiguous = (
        not stride or "contiguous" in satisfied(shape, stride) for shape, _, _, stride in after
    )
    if isinstance(optimizer, LBFGS) and not all(contiguous):
        # pytorch/pytorch#130346
        wrong = "LBFGS flattens every gradient with .view(-1), which fails for channels-last"
        yield Problem("optimizer", wrong, "take another optimizer, or leave the weights contiguous")


def mismatched_state(
    optimizer: Optimizer, moves: dict[int, AnyMove]
) -> Iterator[tuple[Tensor, Move]]:
    """Yield the parameter and the move of each state tensor that differs from its parameter after `moves`.

    A state tensor gets its parameter's device and, if it has its shape (a moment, a maximum), its strides.
    It follows a cast of the parameter if it had its dtype, and else keeps the dtype that its optimizer
    gave it; step counters are skipped.
    """
    for parameter, state in optimizer.state.items():
        device, parameter_dtype, stride = _after_move(parameter, moves.get(id(parameter)))
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor) or not tensor.dim():
                continue
            own = stride_of(tensor)
            wanted = stride if tensor.shape == parameter.shape else own
            dtype = parameter_dtype if tensor.dtype == parameter.dtype else tensor.dtype
            if (tensor.device, tensor.dtype, own) != (device, dtype, wanted):
                yield parameter, Move(f"optimizer state {name}", [tensor], device, dtype, wanted)


def same_element_order(state: Tensor, parameter: Tensor) -> bool:
    """Compare element order and device; strides of size-1 dimensions may differ.

    Adafactor creates its statistics of a 1x1 kernel so; only the fast kernels of foreach need exact strides.
    """
    strides = zip(state.shape, state.stride(), parameter.stride(), strict=True)
    return state.device == parameter.device and all(
        size == 1 or mine == other for size, mine, other in strides
    )


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _after_move(parameter: Tensor, move: AnyMove | None) -> tuple[Any, ...]:
    """Return the device, dtype and strides that `parameter` will have."""
    if move is None:
        return parameter.device, parameter.dtype, stride_of(parameter)
    stride = move.stride if isinstance(move, Move) else stride_of(parameter)
    return move.device, move.dtype, stride
