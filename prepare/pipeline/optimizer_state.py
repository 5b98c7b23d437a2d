"""Keeps the state of an optimizer in line with its parameters: type, device and every stride."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from prepare.core.model.memory_format import satisfied
from prepare.errors import Problem
from prepare.pipeline.transfer import FlatMove, Move, Transfer


class KeepInLine:
    """A hook that runs after `optimizer.load_state_dict`, which keeps the strides of the file.

    torch's fused CPU optimizers walk parameter and state by raw pointers, so a state in another
    layout than its parameter corrupts the weights without a word.
    """

    def __call__(self, optimizer: Optimizer) -> None:
        bring_state_into_line(optimizer)

    def install(self, optimizer: Optimizer) -> None:
        """Registers the hook, once."""
        hooks = optimizer._optimizer_load_state_dict_post_hooks.values()
        if not any(isinstance(hook, KeepInLine) for hook in hooks):
            optimizer.register_load_state_dict_post_hook(self)


def innermost(optimizer: Any) -> Optimizer:
    """The optimizer itself, where Accelerate or Lightning has wrapped it: that one has the state."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def bring_state_into_line(optimizer: Optimizer) -> None:
    """Gives every state tensor the device, dtype and strides of its parameter; values stay."""
    Transfer(list(state_moves(optimizer, {}))).run()


def strangers(model: nn.Module, optimizer: Optimizer) -> Iterator[Problem]:
    """A problem where `optimizer` holds none of the parameters of `model`, and so would train nothing."""
    ours = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in ours for parameter in held):
        remedy = (
            "make it of model.parameters() after load_state_dict(assign=True), which makes new ones"
        )
        yield Problem("optimizer", "holds none of the model's parameters", remedy)


def gone(model: nn.Module, rewritten: nn.Module, optimizer: Optimizer) -> Iterator[Problem]:
    """A problem where `optimizer` holds parameters of `model` that it has no more once it is `rewritten`."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left = {id(parameter) for parameter in rewritten.parameters()}
    names = [n for n, each in model.named_parameters() if id(each) in held and id(each) not in left]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        wrong = f"holds {names[0]}{more}, and a step puts new parameters in their place"
        yield Problem(
            "optimizer", wrong, "prepare first, then make the optimizer; or drop the step"
        )


def state_moves(optimizer: Optimizer, moves: dict[int, Move | FlatMove]) -> Iterator[Move]:
    """What is to be done to the state of `optimizer` when its parameters make `moves` (by object id)."""
    return (move for _, move in misplaced(optimizer, moves))


def misplaced(
    optimizer: Optimizer, moves: dict[int, Move | FlatMove]
) -> Iterator[tuple[Tensor, Move]]:
    """Each state tensor that is not as its parameter will be, as that parameter and what is to be done.

    A state tensor of its parameter's shape (a moment, a maximum) gets the parameter's device,
    dtype and strides; integers keep their dtype, and step counters are left alone.
    """
    for parameter, state in optimizer.state.items():
        device, dtype, stride = _becomes(parameter, moves.get(id(parameter)))
        for name, tensor in state.items():
            if (
                not isinstance(tensor, Tensor)
                or tensor.shape != parameter.shape
                or not tensor.dim()
            ):
                continue
            to = dtype if tensor.is_floating_point() else tensor.dtype
            if (tensor.device, tensor.dtype, tensor.stride()) != (device, to, stride):
                yield parameter, Move(f"optimizer state {name}", [tensor], device, to, stride)


def same_order(state: Tensor, parameter: Tensor) -> bool:
    """Whether both lie element by element alike: only the strides of dimensions of size 1 differ, if any.

    Adafactor makes its statistics of a 1x1 kernel so; exact strides are for the fast kernels of foreach.
    """
    alike = (state.device, state.dtype) == (parameter.device, parameter.dtype)
    strides = zip(state.shape, state.stride(), parameter.stride(), strict=True)
    return alike and all(size == 1 or one == other for size, one, other in strides)


def _becomes(parameter: Tensor, move: Move | FlatMove | None) -> tuple[Any, ...]:
    if move is None:
        return parameter.device, parameter.dtype, parameter.stride()
    stride = move.stride if isinstance(move, Move) else parameter.stride()
    return move.device, move.dtype, stride


def unfit(optimizer: Optimizer, moves: dict[int, Move | FlatMove]) -> Iterator[Problem]:
    """What `optimizer` cannot train, once its parameters have made `moves` (by object id)."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    become = [
        (parameter.shape, *_becomes(parameter, moves.get(id(parameter)))) for parameter in held
    ]
    if any(dtype is torch.float16 for _, _, dtype, _ in become):
        wrong = (
            "its parameters would be float16: GradScaler refuses those, and Adam divides by zero"
        )
        remedy = "keep float32 parameters and use torch.autocast, or take dtype: bfloat16"
        yield Problem("optimizer", wrong, remedy)
    flat = (
        not stride or "contiguous" in satisfied(shape, stride) for shape, _, _, stride in become
    )
    if isinstance(optimizer, LBFGS) and not all(flat):
        # pytorch/pytorch#130346
        wrong = "LBFGS flattens every gradient with .view(-1), which one in channels-last cannot"
        yield Problem("optimizer", wrong, "take another optimizer, or leave the weights contiguous")
