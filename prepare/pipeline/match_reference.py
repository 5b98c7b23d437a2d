"""Give a copy of a model the layout of a prepared reference model."""

from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from prepare.core.model.module_tree import Snapshot
from prepare.core.model.tensors import NamedTensor, identity, is_wrapper, named_tensors, stride_of
from prepare.core.utils.process_state import held_interrupts
from prepare.errors import RefusedError, raise_problems
from prepare.pipeline.plan import state
from prepare.pipeline.preconditions import scripted_problems
from prepare.pipeline.transfer import Move, Transfer
from prepare.registry import STEPS
from prepare.step import PHASES

_Model = TypeVar("_Model", bound=nn.Module)


def like(model: _Model, reference: nn.Module) -> _Model:
    """Give `model`, a copy of `reference` made before preparation, the layout of `reference`, in place.

    For an EMA or teacher copy, or torch's AveragedModel: every tensor gets the device, dtype and strides
    of the tensor of the same name, and every step does in it what it has done in `reference`: repairs,
    rewritten calls, casts, modules in evaluation mode, compiled calls, formatted inputs. Values stay. A
    failure leaves everything as it was.

    Raises:
        RefusedError: the tensors of the two models differ in name or shape, or `model` cannot be prepared
            in its present state.
    """
    copy: Any = model
    if isinstance(model, AveragedModel) and not isinstance(reference, AveragedModel):
        copy = model.module
    _match(copy, reference)
    return model


def _match(model: nn.Module, reference: nn.Module) -> None:
    for each in (model, reference):
        raise_problems(RefusedError, scripted_problems(each))
    places = {place.path: place for place in named_tensors(model)}
    targets = {place.path: place.tensor for place in named_tensors(reference)}
    _check_same_tensors(places, targets)
    by_identity: dict[Hashable, dict[str, Tensor]] = {}
    for path, place in places.items():
        by_identity.setdefault(identity(place.tensor), {})[path] = place.tensor
    moves = []
    for shared in by_identity.values():
        path, tensor = next(iter(shared.items()))
        target = targets[path]
        if state(tensor) != state(target):
            tensors = list({id(tensor): tensor for tensor in shared.values()}.values())
            moves.append(Move(path, tensors, target.device, target.dtype, stride_of(target)))
    snapshot, transfer = Snapshot(model), Transfer(moves)
    steps = sorted((STEPS[name] for name in STEPS), key=lambda cls: PHASES.index(cls.phase))
    with held_interrupts(may_hang=True):
        try:
            for cls in steps:
                if cls.phase == "structure":
                    cls.follow(model, reference)
            transfer.run()
            for cls in steps:
                if cls.phase != "structure":
                    cls.follow(model, reference)
        except BaseException:
            with held_interrupts():
                transfer.undo()
                snapshot.restore()
            raise


def _are_alike(tensor: Tensor, target: Tensor) -> bool:
    if is_wrapper(tensor) != is_wrapper(target):  # as a weight that torchao quantized
        return False
    if tensor.is_nested or target.is_nested:  # nested tensors have no shape
        return tensor.is_nested == target.is_nested
    return tensor.shape == target.shape


def _check_same_tensors(places: Mapping[str, NamedTensor], targets: Mapping[str, Tensor]) -> None:
    differing = sorted(places.keys() ^ targets.keys()) or [
        path for path, place in places.items() if not _are_alike(place.tensor, targets[path])
    ]
    if differing:
        wrong = "the tensors of the two models differ in name, shape or class"
        raise RefusedError(differing[0], wrong, "pass a copy of the reference")
