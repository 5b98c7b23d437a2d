"""Give a copy of a model the layout of a prepared reference model."""

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from prepare.core.forward.input_formatter import FormatHook, call_in_float32, casts_of, remove_casts
from prepare.core.model.module_kinds import replaced_methods
from prepare.core.model.module_tree import Snapshot
from prepare.core.model.tensors import NamedTensor, is_wrapper, named_tensors, stride_of
from prepare.core.utils.process_state import held_interrupts
from prepare.errors import RefusedError, raise_problems
from prepare.pipeline.apply import scripted_problems
from prepare.pipeline.plan import state
from prepare.pipeline.tensor_table import make_table
from prepare.pipeline.transfer import Move, Transfer
from prepare.steps.compile import Compile
from prepare.steps.repairs import all_repairs, all_rewrites

_Model = TypeVar("_Model", bound=nn.Module)


def like(model: _Model, reference: nn.Module) -> _Model:
    """Give `model`, a copy of `reference` made before preparation, the layout of `reference`, in place.

    For an EMA or teacher copy, or torch's AveragedModel: every tensor gets the device, dtype and strides
    of the tensor of the same name. What the built-in steps have done in `reference` is done in it, too:
    repairs, rewritten calls, casts, modules in evaluation mode, compiled calls, formatted inputs. Values
    stay. A failure leaves everything as it was.

    Raises:
        RefusedError: the tensors of the two models differ in name or shape, or `model` cannot be prepared
            in its present state.
    """
    copy: Any = model
    if isinstance(model, AveragedModel) and not isinstance(reference, AveragedModel):
        copy = model.module
    for each in (copy, reference):
        raise_problems(RefusedError, scripted_problems(each))
    requests = make_table(copy, []).requests
    places = {place.path: place for request in requests for place in request.places}
    targets = {place.path: place.tensor for place in named_tensors(reference)}
    _check_same_tensors(places, targets)
    moves = []
    for request in requests:
        new = targets[request.path]
        if state(request.tensor) != state(new):
            moves.append(Move(request.path, request.tensors, new.device, new.dtype, stride_of(new)))
    snapshot, transfer = Snapshot(copy), Transfer(moves)
    pairs = [(module, reference.get_submodule(name)) for name, module in copy.named_modules()]
    with held_interrupts():
        try:
            for module, same in pairs:
                _follow_code(module, same)
            transfer.run()
            for module, same in pairs:
                _follow_calls(module, same)
        except BaseException:
            transfer.undo()
            snapshot.restore()
            raise
    return model


def _follow_code(module: nn.Module, same: nn.Module) -> None:
    """Let `module` run the code that structure steps have given to the `same` one in the reference."""
    module.training = module.training and same.training
    if type(same) is type(module):
        methods = replaced_methods(same)
        ours = [(name, each) for name, each in methods if each.step == "keep_layout"]
        vars(module).update((name, each.bound_to(module)) for name, each in ours)
    formats = {4: "", 5: ""} if "in_channels_last" in vars(same) else {}
    for swap in (*all_repairs().values(), *all_rewrites().values()):
        if swap.is_repaired(same) and swap.fits(module):
            swap.repair(module, formats)


def _follow_calls(module: nn.Module, same: Any) -> None:
    """Let a call of `module` do what a call of the `same` one does: cast, format inputs, run compiled."""
    if (casts := casts_of(same)) != casts_of(module):
        remove_casts(module)
        if casts:
            call_in_float32(module, casts)
    if options := getattr(same._compiled_call_impl, "prepared_as", None):
        Compile.from_options(options).act(module)
    for hook in same._forward_pre_hooks.values():
        if isinstance(hook, FormatHook):
            hook.install(module)


def _check_same_tensors(places: Mapping[str, NamedTensor], targets: Mapping[str, Tensor]) -> None:
    differing = sorted(places.keys() ^ targets.keys()) or [
        path for path, place in places.items() if _form(place.tensor) != _form(targets[path])
    ]
    if differing:
        wrong = "the tensors of the two models differ in name, shape or class"
        raise RefusedError(differing[0], wrong, "pass a copy of the reference")


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """Return whether a tensor is of another class, as a weight that torchao quantized, and its shape."""
    return is_wrapper(tensor), tensor.is_nested or tensor.shape  # nested tensors have no shape
