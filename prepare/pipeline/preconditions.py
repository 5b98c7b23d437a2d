"""Reasons not to prepare a model in its present state, each with a remedy."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from prepare.core.model.tensors import is_lazy, is_wrapper
from prepare.errors import Problem
from prepare.pipeline.tensor_table import RequestTable, TensorRequest

_SHOWN = 3
_SHARDED = ("is sharded by FSDP", "prepare the module first, then shard it")
_WRAP = "prepare the module first, then wrap it"
# By name: importing torch.distributed.fsdp or torch._dynamo for their classes costs a second.
_FORMS = {
    "DistributedDataParallel": (
        "is in DistributedDataParallel, whose buckets have the old strides",
        _WRAP,
    ),
    "DataParallel": (
        "is in DataParallel, whose replicas keep no hook and no layout of the inputs",
        _WRAP,
    ),
    "FullyShardedDataParallel": _SHARDED,
    "FSDPModule": _SHARDED,
    "OptimizedModule": (
        "is compiled already, for its present layout and dtype",
        "prepare first, then compile",
    ),
}


def precondition_problems(model: nn.Module, table: RequestTable) -> Iterator[Problem]:
    """Yield every reason not to change `model` now; call it only if there is something to change."""
    if torch.is_inference_mode_enabled():
        wrong = "tensors made in inference_mode can never be trained"
        yield Problem("torch.inference_mode", wrong, "prepare outside it; torch.no_grad is fine")
    for kind in ("cpu", "cuda", "mps", "xpu"):
        if torch.is_autocast_enabled(kind):
            wrong = "its cache would keep using the old weights"
            yield Problem(f"torch.autocast({kind!r})", wrong, "prepare before the autocast region")
    yield from module_problems(model)
    yield from _tensor_problems(table)


def fsdp_problems(model: nn.Module) -> Iterator[Problem]:
    """Yield a problem if FSDP has put weights into flat shards, which no memory format can match."""
    for name, module in model.named_modules():
        if any(base.__name__ == "FullyShardedDataParallel" for base in type(module).__mro__):
            yield Problem(name or type(module).__name__, *_SHARDED)
            return


def scripted_problems(
    model: nn.Module, remedy: str = "prepare the model first, then script or trace it"
) -> Iterator[Problem]:
    """Yield a problem if the model is scripted or traced, or contains such a module."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            wrong = f"is a {type(module).__name__}: its modules cannot be seen or changed"
            yield Problem(name or type(module).__name__, wrong, remedy)
            return


def module_problems(model: nn.Module) -> Iterator[Problem]:
    """Yield the reasons in how `model` is wrapped, sharded or compiled not to change it."""
    yield from scripted_problems(model)
    for name, module in model.named_modules():
        kinds = [base.__name__ for base in type(module).__mro__]
        kinds += ["OptimizedModule"] if module._compiled_call_impl else []
        if found := next((_FORMS[kind] for kind in kinds if kind in _FORMS), None):
            yield Problem(name or type(model).__name__, *found)


def _tensor_problems(table: RequestTable) -> Iterator[Problem]:
    moving = [(request, move) for request in table.requests if (move := request.move())]
    wrapped = [r for r, _ in moving if is_wrapper(r.tensor)]
    inference = [r for r, _ in moving if r.tensor.is_inference()]
    with_grad = [r for r, _ in moving if r.tensor.is_leaf and r.tensor.grad is not None]
    from_meta = [r for r, move in moving if r.tensor.is_meta and move.device.type != "meta"]
    if wrapped:
        kinds = ", ".join(sorted({type(r.tensor).__name__ for r in wrapped}))
        wrong = f"{kinds} defines its own meaning of dtype and strides"
        remedy = "prepare before sharding or quantizing, or exclude it"
        yield Problem(_paths(wrapped), wrong, remedy)
    if inference:
        wrong = "made in torch.inference_mode, so it can never be trained"
        yield Problem(_paths(inference), wrong, "build the model outside inference_mode")
    if with_grad:
        wrong = "holds a .grad, which would keep the old layout and dtype"
        yield Problem(_paths(with_grad), wrong, "call zero_grad(set_to_none=True) first")
    for group in table.shared:
        if group.must_separate():
            wrong = "share one storage, which the requested layout would split"
            remedy = "prepare the model before making them views of it, or exclude them"
            yield Problem(_paths(group.requests), wrong, remedy)
    if from_meta:
        remedy = "load it with prepare.checkpoint.load(path, model), which allocates it as wanted"
        yield Problem(_paths(from_meta), "meta holds no data", remedy)


def lazy_problems(table: RequestTable) -> Iterator[Problem]:
    """Yield a problem if parameters have no shape yet; nothing can be planned for them."""
    uninitialised = [request for request in table.requests if is_lazy(request.tensor)]
    if uninitialised:
        wrong = "not initialised yet (a lazy module)"
        yield Problem(_paths(uninitialised), wrong, "run one forward pass first")


def _paths(requests: Iterable[TensorRequest]) -> str:
    paths = [request.path for request in requests]
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
