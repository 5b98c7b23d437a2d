"""What makes it wrong to prepare a model now: each with its reason and the way out."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from prepare.core.model.tensors import is_lazy, is_wrapper
from prepare.errors import Problem
from prepare.pipeline.tensor_table import Table, Wanted
from prepare.pipeline.transfer import Move

_SHOWN = 3


def refusals(model: nn.Module, table: Table) -> Iterator[Problem]:
    """Every reason not to touch `model` now; only asked where there is something to do."""
    yield from surroundings()
    yield from unsafe(model, table)
    from_meta = [w for w, move in _moving(table) if w.tensor.is_meta and move.device.type != "meta"]
    if from_meta:
        remedy = "load it with prepare.checkpoint.load(path, model), which reads it as it is to be"
        yield Problem(_paths(from_meta), "meta holds no data", remedy)


def unsafe(model: nn.Module, table: Table) -> Iterator[Problem]:
    """What of the modules and tensors of `model` makes it wrong to move them."""
    yield from _modules(model)
    yield from _tensors(table)


def surroundings() -> Iterator[Problem]:
    """What makes it wrong to give any model new tensors here and now."""
    if torch.is_inference_mode_enabled():
        wrong = "tensors made in inference_mode can never be trained"
        yield Problem("torch.inference_mode", wrong, "prepare outside it; torch.no_grad is fine")
    for kind in ("cpu", "cuda", "mps", "xpu"):
        if torch.is_autocast_enabled(kind):
            wrong = "its cache would go on serving the old weights"
            yield Problem(f"torch.autocast({kind!r})", wrong, "prepare before the autocast region")


def flattened(model: nn.Module) -> Iterator[Problem]:
    """Where FSDP has put weights into flat shards: that nothing matches there says nothing."""
    for name, module in model.named_modules():
        if _is_any(module, "FullyShardedDataParallel"):
            yield _sharded(name or type(module).__name__)
            return


def _modules(model: nn.Module) -> Iterator[Problem]:
    for name, module in model.named_modules():
        where = name or type(model).__name__
        if isinstance(module, DistributedDataParallel):
            wrong = "is in DistributedDataParallel, whose buckets have the old strides"
            yield Problem(where, wrong, "prepare the module first, then wrap it")
        elif _is_any(module, "FullyShardedDataParallel", "FSDPModule"):
            yield _sharded(where)
        elif isinstance(module, torch.jit.ScriptModule):
            wrong = f"is a {type(module).__name__}: its modules cannot be seen or changed"
            yield Problem(where, wrong, "prepare the model first, then script or trace it")
            return
        elif _is_any(module, "OptimizedModule") or module._compiled_call_impl:
            wrong = "is compiled already, for the layout and type it has now"
            yield Problem(where, wrong, "prepare first, then compile")


def _sharded(where: str) -> Problem:
    return Problem(where, "is sharded by FSDP", "prepare the module first, then shard it")


def _is_any(module: nn.Module, *classes: str) -> bool:
    # By name: importing torch.distributed.fsdp or torch._dynamo for their classes costs a second.
    return any(base.__name__ in classes for base in type(module).__mro__)


def _tensors(table: Table) -> Iterator[Problem]:
    moving = [wanted for wanted, _ in _moving(table)]
    wrapped = [w for w in moving if is_wrapper(w.tensor)]
    inference = [w for w in moving if w.tensor.is_inference()]
    with_grad = [w for w in moving if w.tensor.is_leaf and w.tensor.grad is not None]
    if wrapped:
        kinds = ", ".join(sorted({type(w.tensor).__name__ for w in wrapped}))
        wrong = f"{kinds} decides for itself what dtype and strides mean"
        yield Problem(
            _paths(wrapped), wrong, "prepare before sharding or quantizing, or exclude it"
        )
    if inference:
        wrong = "made in torch.inference_mode, so it can never be trained"
        yield Problem(_paths(inference), wrong, "build the model outside inference_mode")
    if with_grad:
        wrong = "holds a .grad, which would keep the old layout and type"
        yield Problem(_paths(with_grad), wrong, "call zero_grad(set_to_none=True) first")
    for views in table.views():
        if views.must_separate():
            wrong = "share one storage, and what is wanted would separate them"
            remedy = "prepare before they are made views of it, or exclude them"
            yield Problem(_paths(views.tensors), wrong, remedy)


def lazy(table: Table) -> Iterator[Problem]:
    """Parameters that have no shape yet; nothing can be planned for them."""
    waiting = [wanted for wanted in table.tensors if is_lazy(wanted.tensor)]
    if waiting:
        wrong = "not initialised yet (a lazy module)"
        yield Problem(_paths(waiting), wrong, "run one forward pass first")


def _moving(table: Table) -> list[tuple[Wanted, Move]]:
    return [(wanted, move) for wanted in table.tensors if (move := wanted.move())]


def _paths(tensors: Iterable[Wanted]) -> str:
    paths = [wanted.places[0].path for wanted in tensors]
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
