"""Leave a model, its inputs and the process as they were before a call of ours.

Not restored is what no public network was seen to change in its forward: what lies deeper than one container
or plain object in an attribute, global variables that no hook names, data of classes. An array of numpy may
be a mapped file, larger than the memory: it is neither copied nor restored. Nor is a large tensor over a
file, but a write into it is an error.
"""

from __future__ import annotations

import gc
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from prepare.core.forward.torch_state import isolated
from prepare.core.model.devices import free_memory
from prepare.core.model.module_tree import CONTAINERS, content_of, refill, same
from prepare.core.model.tensors import is_expanded, is_plain, leaves_of, stored_values
from prepare.core.utils.process_state import held_interrupts
from prepare.errors import RefusedError

_T = TypeVar("_T")
# Containers and objects that are entered: in an attribute, at an object with a hook, and in an argument, as a
# cache of keys and values is.
_IN_ATTRIBUTE, _AT_HOOK, _IN_ARGUMENT = 1, 2, 6
# The copies may take this part of the free main memory.
_PART = 0.5
# A tensor in a mapped file is copied if it has fewer bytes, as the statistics of a norm.
_LARGE = 2**24
_SIMPLE = frozenset({bool, int, float, complex, str, bytes, type(None), range, torch.Size})
_SIMPLE |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
_FOREIGN = {"torch", "numpy", "prepare", *sys.stdlib_module_names} - {"types"}  # SimpleNamespace
_HOOKS = frozenset(key for key in vars(nn.Module()) if key.endswith("_hooks"))


@contextmanager
def unchanged(
    model: nn.Module,
    *inputs: Any,
    stand_in: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[ModelState]:
    """Restore the model, `inputs`, and the global state of torch and of the process at the end of the block.

    Restored are the attributes, hooks and mode of each module, what a container, plain object or
    random generator in an attribute holds, lists and dicts in the closures of hooks, gradients, and the
    values of tensors, bit for bit; also if the block raises. Inside it no parameter has a gradient, and
    Ctrl-C waits, except in a call by `interruptible`; the third one does not wait.

    The memory of all tensors is copied before, compared afterwards, and written only where it differs. A
    write through `.data` leaves no version behind, and only a copy undoes it. Memory that is shared is copied
    once, into main memory. Where half of the free memory does not hold all copies, some Parameters are not
    copied, and a call that changes the version of one of these raises RefusedError.

    Args:
        model: its modules may be shared, scripted or compiled.
        inputs: arguments of the call, which are restored too.
        stand_in: each tensor of the model is replaced by what this returns, wherever the model holds it.
            Memory that no stand-in shares is not copied.
    """
    with held_interrupts(), isolated():
        state = ModelState(model, inputs)
        try:
            state.begin(stand_in)
            yield state
        finally:
            with held_interrupts():
                state.restore()


def without_gradients(run: Callable[[], _T]) -> _T:
    """Return `run()` in no_grad mode or, if it raises so, with gradients.

    A forward that differentiates, as a force field does, raises in no_grad mode. If `run` raises with
    gradients too, the first error is the model's.
    """
    mode = torch.is_grad_enabled()
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
    finally:
        with held_interrupts():  # Ctrl-C may come in an `__exit__`, which then restores nothing
            torch.set_grad_enabled(mode)


def real_stand_in(tensor: Tensor) -> Tensor:
    """Return a parameter that shares the values but not the gradient, or a copy of a buffer."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), tensor.requires_grad) if is_plain(tensor) else tensor
    return copy_of(tensor)


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy with the exact strides of the original, as a leaf."""
    if not is_plain(tensor) or is_expanded(tensor):
        return tensor.detach().requires_grad_(tensor.requires_grad)
    with torch.no_grad():
        copy = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return copy.requires_grad_(tensor.requires_grad)


class ModelState:
    """All that a call of a model may change: found when this is made, and written back by `restore`.

    `stand_ins` holds what replaces each tensor, by the tensor's id.
    """

    def __init__(self, model: nn.Module, inputs: Any = ()) -> None:
        self.stand_ins: dict[int, Tensor] = {}
        self._seen: dict[int, Any] = {}  # with the object, which keeps its id from being used again
        # A container or the attributes of an object, and its content.
        self._held: list[tuple[Any, dict[Any, Any]]] = []
        # A tensor, whether it requires a gradient, that gradient, and an alias of its memory.
        self._tensors: list[tuple[Tensor, bool, Tensor | None, Tensor | None]] = []
        self._resets: list[Callable[[], object]] = []
        self._memory: list[tuple[Any, Tensor]] = []
        self._not_copied: list[tuple[Tensor, int]] = []
        self._visit_modules(model)
        self._of_model = len(self._held), len(self._tensors)
        # Those of scripted modules, which cannot be replaced.
        self._visit((*model.parameters(), *model.buffers()), 0)
        self._visit(inputs, _IN_ARGUMENT)

    def begin(self, stand_in: Callable[[Tensor], Tensor] | None) -> None:
        """Set gradients aside, replace the tensors of the model, and copy the memory that may change."""
        held, tensors = self._of_model
        for tensor, _, gradient, _ in self._tensors:
            if gradient is not None:
                tensor.grad = None
        if stand_in is not None:
            for tensor, *_ in self._tensors[:tensors]:
                self.stand_ins[id(tensor)] = stand_in(tensor)
            for owner, before in self._held[:held]:
                refill(owner, {key: self._swapped(value) for key, value in before.items()})
        self._copy_memory()

    def restore(self) -> None:
        """Write back what has changed.

        Raises:
            RefusedError: the call wrote into a parameter of which there is no copy.
        """
        for owner, before in self._held:
            refill(owner, before)
        for reset in self._resets:
            reset()
        self._restore_tensors()
        for tensor, version in self._not_copied:
            if tensor._version != version:
                wrong = f"writes into {list(tensor.shape)}, a mapped file or too large to be copied"
                raise RefusedError("forward", wrong, "build the model where more memory is free")

    def _restore_tensors(self) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for tensor, requires_grad, gradient, alias in self._tensors:
                if alias is not None and _memory_of(tensor) != _memory_of(alias):
                    tensor.data = alias
                if tensor.is_leaf and tensor.requires_grad != requires_grad:
                    tensor.requires_grad_(requires_grad)
                if tensor.is_leaf and requires_grad and tensor.grad is not gradient:
                    tensor.grad = gradient
            for storage, bits in self._memory:
                if storage.nbytes() != bits.nbytes:
                    storage.resize_(bits.nbytes)
                if not torch.equal(_bits_of(storage).cpu(), bits):
                    _bits_of(storage).copy_(bits)

    def _swapped(self, value: Any) -> Any:
        """Return what replaces a tensor, or a tuple with tensors; any other value itself."""
        if isinstance(value, Tensor):
            return self.stand_ins.get(id(value), value)
        if isinstance(value, tuple):
            items = list(map(self._swapped, value))
            if not same(items, value):
                return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
        return value

    # ----------------------------------------------------------------------------------- what there is

    def _visit_modules(self, root: nn.Module) -> None:
        modules = [module for module in root.modules() if id(module) not in self._seen]
        self._seen |= {id(module): module for module in modules}
        for module in modules:
            for key, value in self._hold(vars(module)).items():
                if key in _HOOKS and isinstance(value, dict):
                    for hook in self._hold(value).values():
                        self._visit_hook(hook)
                else:
                    self._visit(value, _IN_ATTRIBUTE)

    def _visit(self, value: Any, depth: int) -> None:
        """Visit a value; enter so many containers and objects in it."""
        if type(value) in _SIMPLE or id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            self._visit_modules(value)
        elif isinstance(value, tuple):
            for each in value:
                self._visit(each, depth)
        elif isinstance(value, Tensor):
            self._seen[id(value)] = value
            gradient = value.grad if value.is_leaf and value.requires_grad else None
            alias = value.detach() if is_plain(value) else None
            self._tensors.append((value, value.requires_grad, gradient, alias))
        elif (reset := _reset_of(value)) is not None:
            self._resets.append(reset)
        elif depth and (isinstance(value, CONTAINERS) or _is_entered(type(value))):  # type: ignore[arg-type]
            self._seen[id(value)] = value
            own = isinstance(value, CONTAINERS)
            held = self._hold(value if own else object.__getattribute__(value, "__dict__"))
            for each in held.values():
                self._visit(each, depth - 1)

    def _visit_hook(self, hook: Any) -> None:
        """Visit what a hook of the user's keeps, but no module that its closure names."""
        if isinstance(hook, partial):
            self._visit((hook.args, hook.keywords), _AT_HOOK)
            hook = hook.func
        if not isinstance(hook, FunctionType):
            self._visit(hook.__self__ if isinstance(hook, MethodType) else hook, _AT_HOOK)
        elif not _is_foreign(hook.__module__):
            named = [hook.__globals__.get(name) for name in hook.__code__.co_names]
            for each in (*named, *gc.get_referents(*(hook.__closure__ or ()))):
                if isinstance(each, CONTAINERS):
                    self._visit(each, _IN_ATTRIBUTE)

    def _hold(self, container: Any) -> dict[Any, Any]:
        self._held.append((container, content_of(container)))
        return self._held[-1][1]

    # -------------------------------------------------------------------------------------- values

    def _copy_memory(self) -> None:
        free, copied = free_memory(torch.device("cpu")), set[int]()
        left, mapped = float("inf") if free is None else _PART * free, list[tuple[int, int]]()
        tensors = [tensor for tensor, *_ in self._tensors]
        # First what is small, and changes most.
        for tensor in sorted(tensors, key=lambda each: isinstance(each, nn.Parameter)):
            used = {each._cdata for each in _storages(self.stand_ins.get(id(tensor), tensor))}
            for storage in _storages(tensor):
                if storage._cdata not in used or storage._cdata in copied:
                    continue
                copied.add(storage._cdata)
                is_large = storage.nbytes() >= _LARGE and storage.device.type == "cpu"
                mapped = mapped or (_mapped_files() if is_large else [])
                is_mapped = is_large and any(a <= storage.data_ptr() < b for a, b in mapped)
                if storage.nbytes() > left or is_mapped:
                    self._not_copied.append((tensor, tensor._version))
                    continue
                left -= storage.nbytes()
                self._memory.append((storage, _bits_of(storage).to("cpu", copy=True)))


def _mapped_files() -> list[tuple[int, int]]:
    """Return the parts of memory that are files, on Linux; memory that processes share is none."""
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        files = [line for line in lines if " /" in line and not re.search(r" /(dev|memfd)", line)]
        pairs = (line.partition(" ")[0].split("-") for line in files)
        return [(int(start, 16), int(end, 16)) for start, end in pairs]
    return []


@cache
def _is_foreign(module: str | None) -> bool:
    return str(module).partition(".")[0] in _FOREIGN


@cache
def _is_entered(kind: Any) -> bool:
    """Return whether objects of a class may be a part of a model: not those of torch and of Python."""
    return kind.__dictoffset__ != 0 and not (issubclass(kind, type) or _is_foreign(kind.__module__))


def _reset_of(value: Any) -> Callable[[], object] | None:
    """Return a function that sets a random generator back; None for anything else."""
    with_state: Any = (torch.Generator, np.random.RandomState)
    if isinstance(value, with_state):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), *bits


def _storages(tensor: Tensor) -> Iterator[Any]:
    """Yield the memory of a tensor, or of the tensors that it consists of."""
    # Some layouts have no storage; on the meta device it has no memory.
    with suppress(NotImplementedError, RuntimeError), torch._C.DisableTorchFunctionSubclass():
        for each in leaves_of(tensor):
            storage = stored_values(each).untyped_storage()
            if storage.device.type != "meta":
                yield storage


def _bits_of(storage: Any) -> Tensor:
    """Return the memory of a storage as integers, since NaN does not equal itself."""
    dtype = torch.uint8 if storage.nbytes() % 8 else torch.int64
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)
