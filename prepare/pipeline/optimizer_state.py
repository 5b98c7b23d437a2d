"""Keep the state of an optimizer on the device and in the strides of its parameters."""

import gc
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from prepare.core.model.tensors import name_of, stride_of
from prepare.errors import ConfigError, KnownIssueWarning, Problem, UntrainedWarning
from prepare.pipeline.plan import Drift, State, drifts_between, state
from prepare.pipeline.transfer import Move, Transfer

# Those with a fused kernel for a CPU.
_FUSED: tuple[Any, ...] = (Adagrad, Adam, AdamW, SGD)
_NEEDED = ("param_groups", "state", "_optimizer_load_state_dict_post_hooks")


def relayout_when_loaded(optimizer: Optimizer) -> None:
    """Call `relayout` after each `optimizer.load_state_dict`, which keeps the strides of the file.

    torch's fused CPU optimizers walk parameter and state by raw pointers, so a state with other strides
    than its parameter silently corrupts the weights.
    """
    if relayout not in optimizer._optimizer_load_state_dict_post_hooks.values():
        optimizer.register_load_state_dict_post_hook(relayout)  # type: ignore[arg-type]


def optimizers_in(given: Any) -> list[Optimizer]:
    """Return the optimizers that hold the state, each once: Accelerate, Lightning and Lookahead wrap them.

    Raises:
        ConfigError: one of them is not an optimizer.
    """
    if given is None:
        return []
    is_one = hasattr(given, "param_groups") or not isinstance(given, Iterable)
    found = [_unwrapped(each) for each in ([given] if is_one else given)]
    return list({id(each): each for each in found}.values())


def _unwrapped(optimizer: Any) -> Any:
    while inner := _wrapped(optimizer):
        optimizer = inner
    missing = [name for name in _NEEDED if not hasattr(optimizer, name)]
    if missing:
        wrong = f"a {type(optimizer).__name__} is not an optimizer of torch: it has no {missing[0]}"
        raise ConfigError("optimizer", wrong, "give the one that holds the parameters of the model")
    return optimizer


def _wrapped(optimizer: Any) -> Optimizer | None:
    """Return the optimizer in a wrapper: called so, or one with the same groups of parameters."""
    if isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        return inner
    held = vars(optimizer).values() if isinstance(optimizer, Optimizer) else ()
    same = (each for each in held if isinstance(each, Optimizer))
    groups = getattr(optimizer, "param_groups", None)
    return next((each for each in same if each.param_groups is groups), None)


def relayout(optimizer: Optimizer) -> Optimizer:
    """Give the state of `optimizer` the device and strides of its parameters, in place.

    For an optimizer that was not passed to `apply`, after a checkpoint of another layout was loaded into
    it: torch keeps the strides of the file, and its fused optimizers then update the wrong elements.
    Values stay. A failure leaves everything as it was.
    """
    Transfer([move for _, move in mismatched_state(optimizers_in(optimizer), {})]).run()
    return optimizer


def warn_of_untrained(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Warn of the parameters that no given optimizer trains, with an UntrainedWarning.

    That is no error: a loss may be made of a network that nobody trains.
    """
    held = {id(parameter) for parameter in _parameters(optimizers)}
    named = model.named_parameters() if optimizers else ()
    names = [name for name, each in named if each.requires_grad and id(each) not in held]
    if names:
        wrong = f"no given optimizer trains {_listed(names)} of {type(model).__name__}"
        remedy = "give every optimizer, made after load_state_dict(assign=True) if that is called"
        text = str(Problem("optimizer", wrong, f"{remedy}, or call requires_grad_(False)"))
        warnings.warn(text, UntrainedWarning, stacklevel=3)


def warn_of_left_behind(model: nn.Module, given: Sequence[Optimizer]) -> None:
    """Warn of a fused optimizer of the model that was not given, and whose state has other strides now.

    torch's fused kernels on a CPU then update the wrong elements, without an error. Such optimizers are
    looked for among the objects of the process, if any has been made.
    """
    kinds = [kind for kind in _FUSED if getattr(kind.step, "hooked", False)]
    if not kinds or not any(p.requires_grad and p.is_cpu for p in model.parameters()):
        return
    held = {id(parameter) for parameter in model.parameters()}
    for found in gc.get_referrers(*kinds):
        if type(found) not in kinds or any(found is each for each in given):
            continue
        fused = any(group.get("fused") for group in getattr(found, "param_groups", ()))
        if fused and any(id(p) in held for p, _ in mismatched_state([found], {})):
            wrong = (
                f"{type(found).__name__}(fused=True) has state in the old layout, and was not given"
            )
            remedy = "give it: optimizer=, or call prepare.pipeline.relayout(optimizer)"
            warnings.warn(str(Problem("optimizer", wrong, remedy)), KnownIssueWarning, stacklevel=3)


def removed_parameters(
    model: nn.Module, rewritten: nn.Module, optimizers: Sequence[Optimizer]
) -> Iterator[Problem]:
    """Yield a problem if `optimizers` hold parameters of `model` that are no longer in `rewritten`."""
    if not optimizers:  # looking at all parameters takes its time
        return
    held = {id(parameter) for parameter in _parameters(optimizers)}
    removed = held - {id(parameter) for parameter in rewritten.parameters()}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in removed]
    if names:
        wrong = f"holds {_listed(names)}, which a step replaces with new parameters"
        remedy = "prepare first, then make the optimizer; or drop the step"
        yield Problem("optimizer", wrong, remedy)


def unsupported_training(
    optimizers: Sequence[Optimizer], moves: dict[int, Move]
) -> Iterator[Problem]:
    """Yield the reasons `optimizers` cannot train what `moves` (by object id) change."""
    for optimizer in optimizers:
        moved = [p for p in _parameters([optimizer]) if id(p) in moves]
        if any(_after_move(p, moves[id(p)])[1] is torch.float16 for p in moved):
            wrong = "its parameters would be float16: GradScaler refuses those, and Adam divides by zero"
            remedy = "keep float32 parameters and use torch.autocast, or take dtype: bfloat16"
            yield Problem("optimizer", wrong, remedy)


def mismatched_state(
    optimizers: Sequence[Optimizer], moves: dict[int, Move]
) -> Iterator[tuple[Tensor, Move]]:
    """Yield the parameter and the move of each state tensor that differs from its parameter after `moves`.

    A state tensor gets its parameter's device and, if it has its shape (a moment, a maximum), its strides.
    It follows a cast of the parameter if it had its dtype, and else keeps the dtype that its optimizer
    gave it; step counters are skipped.
    """
    states = [item for optimizer in optimizers for item in optimizer.state.items()]
    for parameter, held in states:
        device, parameter_dtype, stride = _after_move(parameter, moves.get(id(parameter)))
        for name, tensor in held.items():
            if not isinstance(tensor, Tensor) or not tensor.dim():
                continue
            own = stride_of(tensor)
            wanted = stride if tensor.shape == parameter.shape else own
            dtype = parameter_dtype if tensor.dtype == parameter.dtype else tensor.dtype
            if (tensor.device, tensor.dtype, own) != (device, dtype, wanted):
                yield parameter, Move(f"optimizer state {name}", [tensor], device, dtype, wanted)


def optimizer_drift(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[Drift]:
    """Yield how optimizer state of the model's parameters differs from them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, move in mismatched_state(optimizers, {}):
        tensor = move.tensors[0]
        if id(parameter) in names and not _same_element_order(tensor, parameter):
            where = f"{move.path} of {names[id(parameter)]}"
            prepared = State(move.stride, name_of(move.dtype), name_of(move.device))
            yield from drifts_between(where, state(tensor), prepared)


def _same_element_order(state: Tensor, parameter: Tensor) -> bool:
    """Compare element order and device; strides of size-1 dimensions may differ.

    Adafactor creates its statistics of a 1x1 kernel so; only the fast kernels of foreach need exact strides.
    """
    strides = zip(state.shape, state.stride(), parameter.stride(), strict=True)
    return state.device == parameter.device and all(
        size == 1 or mine == other for size, mine, other in strides
    )


def _parameters(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [parameter for group in groups for parameter in group["params"]]


def _listed(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _after_move(parameter: Tensor, move: Move | None) -> tuple[Any, ...]:
    """Return the device, dtype and strides that `parameter` will have."""
    if move is None:
        return parameter.device, parameter.dtype, stride_of(parameter)
    stride = stride_of(parameter) if move.paths else move.stride
    return move.device, move.dtype, stride
