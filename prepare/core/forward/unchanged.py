"""Leave a model, its inputs and the process as they were before a call of ours."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import is_
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from prepare.core.forward.holders import (
    CELL,
    CLASS,
    CONTAINER,
    GLOBALS,
    OBJECT,
    SIMPLE,
    Holder,
    Place,
    access_of,
    is_foreign,
    reset_of,
    scripted,
)
from prepare.core.forward.torch_state import isolated
from prepare.core.model.devices import free_memory
from prepare.core.model.tensors import is_plain, stored_values
from prepare.core.utils.signals import held_interrupts
from prepare.errors import RefusedError

_T = TypeVar("_T")
# Containers and objects below an attribute of a module; what is deeper belongs to something else.
_DEPTH = 7
OF_HOOKS = "its hooks"
_HOOKS = frozenset(key for key in vars(nn.Module()) if key.endswith("_hooks"))
# The copies may take this part of the free main memory.
_PART = 0.5


@contextmanager
def unchanged(
    model: nn.Module,
    *inputs: Any,
    stand_in: Callable[[Tensor], Tensor] | None = None,
    values: Callable[[Tensor], bool] = lambda _: True,
) -> Iterator[ModelState]:
    """Restore the model, `inputs`, and the global state of torch and of the process at the end of the block.

    Restored are the class, attributes, hooks and mode of each module, what containers, objects, random
    generators and the closures of hooks hold, gradients, and the values of tensors, bit for bit; also if the
    block raises or is interrupted. Inside it no parameter has a gradient. Out of reach are global variables
    and files that a forward writes, the place of a Python generator, and objects of the classes of torch
    and of the standard library.

    The memory of all tensors is copied before, compared afterwards, and written only where it differs. A
    write through `.data` leaves no version behind, and only a copy undoes it. Memory that is shared is copied
    once, into main memory; it takes about as long as one pass of a forward over its weights. Where half of
    the free memory does not hold the copies of all Parameters, some are not copied, and a call that changes
    the version of one of these raises RefusedError.

    Args:
        model: its modules may be shared, scripted or compiled.
        inputs: arguments of the call, which are restored too.
        stand_in: each tensor of the model is replaced by what this returns, wherever the model holds it.
            Memory that no stand-in shares is not copied.
        values: which tensors may be written inside the block; all by default.
    """
    with isolated():
        state = ModelState(model, inputs)
        try:
            state.begin(stand_in, values)
            yield state
        finally:
            with held_interrupts():
                state.restore()


def without_gradients(run: Callable[[], _T]) -> _T:
    """Return `run()` in no_grad mode or, if it raises so, with gradients.

    A forward that differentiates, as a force field does, raises in no_grad mode. If `run` raises with
    gradients too, the first error is the model's.
    """
    try:
        with torch.no_grad():
            return run()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        try:
            with torch.enable_grad():
                return run()
        except Exception:
            raise error from None


class ModelState:
    """All that a call of a model may change: found when this is made, and written back by `restore`.

    `stand_ins` holds what replaces each tensor, by the tensor's id. After `restore`, `changed` holds what had
    another value: the attributes and tensors, by the names of the modules that hold them.
    """

    def __init__(self, model: nn.Module, inputs: Any = ()) -> None:
        self.stand_ins: dict[int, Tensor] = {}
        self.changed: dict[str, list[str]] = {}
        self._seen: dict[int, Any] = {}
        self._fixed: set[int] = set()  # tensors of scripted modules, which cannot be replaced
        self._holders: list[Holder] = []
        self._empty: list[dict[Any, Any]] = []  # the tables of hooks: most of what a module has
        self._tensors: list[_Held] = []
        self._resets: list[tuple[Place, Callable[[], object]]] = []
        self._memory: list[tuple[Place, Any, Tensor]] = []
        self._not_copied: list[tuple[Place, Tensor, int]] = []
        modules = dict(model.named_modules())
        self._modules = {id(module) for module in modules.values()}
        for name, module in modules.items():
            self._visit_module(module, (name, ""), 0)
        self._of_model = len(self._holders), len(self._tensors)
        self._visit(inputs, ("", "the input"), 0)

    def begin(
        self,
        stand_in: Callable[[Tensor], Tensor] | None = None,
        values: Callable[[Tensor], bool] = lambda _: True,
    ) -> None:
        """Set gradients aside, replace the tensors of the model, and copy the memory that may change."""
        holders, tensors = self._of_model
        for held in self._tensors:
            if held.gradient is not None:
                held.tensor.grad = None
        if stand_in is not None:
            for _, tensor, *_ in self._tensors[:tensors]:
                if id(tensor) not in self._fixed:
                    self.stand_ins[id(tensor)] = stand_in(tensor)
            for holder in self._holders[:holders]:
                holder.replace(self._swapped)
        self._copy_memory(values)

    def restore(self) -> None:
        """Write back what has changed.

        Raises:
            RefusedError: the call wrote into a parameter of which there is no copy.
        """
        self._restore_holders()
        for place, reset in self._resets:
            if reset():
                self._note(place)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for place, tensor, requires_grad, gradient, alias in self._tensors:
                if alias is not None and _place_of(tensor) != _place_of(alias):
                    tensor.data = alias
                    self._note(place)
                if tensor.requires_grad != requires_grad and tensor.is_leaf:
                    tensor.requires_grad_(requires_grad)
                if requires_grad and tensor.is_leaf and tensor.grad is not gradient:
                    tensor.grad = gradient
            for place, storage, values in self._memory:
                if storage.nbytes() != values.nbytes:
                    storage.resize_(values.nbytes)
                if not torch.equal(_bits_of(storage).cpu(), values):
                    _bits_of(storage).copy_(values)
                    self._note(place)
        self._check_not_copied()

    def _restore_holders(self) -> None:
        for holder in self._holders:
            if (names := holder.restore()) is not None:
                name, inside = holder.place
                # The tables of a module hold its own names, a container in an attribute others.
                for each in [inside] if inside else names:
                    self._note((name, each))
        for hooks in filter(None, self._empty):
            hooks.clear()

    def _check_not_copied(self) -> None:
        lost = [place for place, tensor, before in self._not_copied if tensor._version != before]
        if lost:
            wrong = "is written by a forward, and the free memory does not hold a copy to restore"
            remedy = "build the model again, where more memory is free"
            raise RefusedError(".".join(filter(None, lost[0])), wrong, remedy)

    def _note(self, place: Place) -> None:
        names = self.changed.setdefault(place[0], [])
        if place[1] not in names:
            names.append(place[1])

    def _swapped(self, value: Any) -> Any:
        """Return what replaces a tensor, or a tuple with tensors; any other value itself."""
        if isinstance(value, Tensor):
            return self.stand_ins.get(id(value), value)
        if isinstance(value, tuple):
            items = list(map(self._swapped, value))
            if not all(map(is_, items, value)):
                return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
        return value

    # ----------------------------------------------------------------------------------- what there is

    def _visit(self, value: Any, place: Place, depth: int) -> None:
        kind = type(value)
        if kind in SIMPLE or id(value) in self._seen or id(value) in self._modules:
            return
        self._seen[id(value)] = value  # the object, which also keeps its id from being used again
        if isinstance(value, Tensor):
            self._visit_tensor(value, place)
        elif depth > _DEPTH:
            return
        elif isinstance(value, nn.Module):
            self._visit_module(value, place, depth)
        elif isinstance(value, tuple):
            self._visit_all(value, place, depth)
        elif (reset := reset_of(value)) is not None:
            self._resets.append((place, reset))
        elif (access := access_of(value)) is not None:
            self._hold(value, place, depth, access)

    def _visit_all(self, values: Iterable[Any], place: Place, depth: int) -> None:
        for value in values:
            if type(value) not in SIMPLE:
                self._visit(value, place, depth + 1)

    def _hold(self, owner: Any, place: Place, depth: int | None, kind: Any) -> None:
        self._holders.append(holder := Holder(owner, place, *kind, *kind[0](owner)))
        if depth is not None:
            self._visit_all(holder.values, place, depth)

    def _visit_tensor(self, tensor: Tensor, place: Place) -> None:
        is_parameter = tensor.is_leaf and tensor.requires_grad
        gradient = tensor.grad if is_parameter else None
        alias = tensor.detach() if is_plain(tensor) else None
        self._tensors.append(_Held(place, tensor, tensor.requires_grad, gradient, alias))

    def _visit_module(self, module: nn.Module, place: Place, depth: int) -> None:
        name, inside = place
        self._hold(module, place, None, OBJECT)
        for key, value in list(vars(module).items()):
            if key in ("_parameters", "_buffers", "_modules") and isinstance(value, dict):
                self._hold(value, place, None, CONTAINER)
                for each, held in value.items():
                    self._visit(held, (name, inside or each), depth + 1)
            elif key in _HOOKS and not value and type(value) in (dict, OrderedDict):
                self._empty.append(value)
            elif key in _HOOKS and isinstance(value, dict):
                self._hold(value, place, None, CONTAINER)
                for hook in value.values():
                    self._visit_hook(hook, (name, OF_HOOKS), depth)
            elif type(value) not in SIMPLE:
                self._visit(value, (name, inside or key), depth + 1)
        if isinstance(module, torch.jit.ScriptModule):
            tensors = (*module.named_parameters(), *module.named_buffers())
            own = ((each, tensor, None) for each, tensor in tensors)
            for each, value, reset in (*own, *scripted(module)):
                self._fixed.add(id(value))
                self._visit(value, (name, inside or each), depth)
                if reset is not None:
                    self._resets.append(((name, inside or each), reset))
        for cls in type(module).__mro__:
            if id(cls) not in self._seen and not is_foreign(cls.__module__):
                self._seen[id(cls)] = cls
                self._hold(cls, place, depth + 1, CLASS)

    def _visit_hook(self, hook: Any, place: Place, depth: int) -> None:
        """Visit what a hook of the user's keeps: defaults, closure, and the globals that it names.

        Not the functions of a model: what their closures hold is no part of it, and may be why it differs
        from call to call.
        """
        if isinstance(hook, MethodType):
            self._visit(hook.__self__, place, depth)
        elif isinstance(hook, partial):
            self._visit_all((hook.args, hook.keywords), place, depth)
            self._visit_hook(hook.func, place, depth)
        elif not isinstance(hook, FunctionType):
            self._visit(hook, place, depth)
        elif not is_foreign(hook.__module__):
            self._visit_all(hook.__defaults__ or (), place, depth)
            for cell in hook.__closure__ or ():
                self._hold(cell, place, depth, CELL)
            self._hold(hook, place, depth, GLOBALS)

    # -------------------------------------------------------------------------------------- values

    def _copy_memory(self, values: Callable[[Tensor], bool]) -> None:
        free, copied = free_memory(torch.device("cpu")), set[int]()
        left = float("inf") if free is None else _PART * free
        # First what is small, and changes most.
        tensors = [held for held in self._tensors if values(held.tensor)]
        tensors.sort(key=lambda held: isinstance(held.tensor, nn.Parameter))
        for place, tensor, *_ in tensors:
            stand_in = self.stand_ins.get(id(tensor), tensor)
            in_use = {storage._cdata for storage in _storages(stand_in)}
            for storage in _storages(tensor):
                if storage._cdata not in in_use or storage._cdata in copied:
                    continue
                copied.add(storage._cdata)
                if storage.nbytes() > left:
                    self._not_copied.append((place, tensor, tensor._version))
                    continue
                left -= storage.nbytes()
                self._memory.append((place, storage, _bits_of(storage).to("cpu", copy=True)))


class _Held(NamedTuple):
    """A tensor: its former state, and an alias of its memory if that can be set again."""

    place: Place
    tensor: Tensor
    requires_grad: bool
    gradient: Tensor | None
    alias: Tensor | None


def _place_of(tensor: Tensor) -> tuple[object, ...]:
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), *bits


def _storages(tensor: Tensor) -> Iterator[Any]:
    """Yield the memory of a tensor, or of the tensors that it consists of."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
        return
    # Some layouts have no storage; on the meta device it has no memory.
    with suppress(NotImplementedError, RuntimeError), torch._C.DisableTorchFunctionSubclass():
        storage = stored_values(tensor).untyped_storage()
        if storage.device.type != "meta":
            yield storage


def _bits_of(storage: Any) -> Tensor:
    """Return the memory of a storage as integers, since NaN does not equal itself."""
    dtype = torch.uint8 if storage.nbytes() % 8 else torch.int64
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)
