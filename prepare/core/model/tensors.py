"""List the tensors of a model by name, and find the tensors behind computed weights."""

from collections.abc import Hashable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from prepare.core.model.module_kinds import CONVOLUTIONS_2D_3D, is_repair

# The check is here, because all code that works on a model imports this file.

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_NO_DISPATCH = Tensor.__torch_dispatch__
# Attributes of every module: none of these holds a tensor of the user.
_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
_SIMPLE = frozenset({bool, int, float, str, type(None), torch.Size})
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_HOOK_PARTS = ("g", "v", "u", "orig", "mask")


class NamedTensor(NamedTuple):
    """One place of a model that holds a tensor: the argument of a step's `want`.

    `owner` is the dotted name of the module that holds the tensor under `name`. `module_name` and
    `module` are that module, except for a tensor behind a computed weight: then they are the module
    that computes the weight called `computes`.
    """

    module_name: str
    module: nn.Module
    name: str
    kind: str
    tensor: Tensor
    owner: str
    computes: str | None = None

    @property
    def path(self) -> str:
        """Return the dotted name, as in `state_dict`."""
        return f"{self.owner}.{self.name}" if self.owner else self.name


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module under every name; `nn.Module.named_modules` yields a shared module once."""
    return model.named_modules(remove_duplicate=False)


def named_tensors(model: nn.Module) -> list[NamedTensor]:
    """Return every parameter and buffer of every module, each under every name."""
    named: list[NamedTensor] = []
    behind: dict[str, tuple[str, nn.Module, str]] = {}
    for owner, module in named_modules(model):
        computed = computed_names(module)
        for name in computed:
            if parametrize.is_parametrized(module, name):
                prefix = f"{owner}." if owner else ""
                behind[f"{prefix}parametrizations.{name}"] = (owner, module, name)
        place = _behind(owner, behind) if behind else None
        module_name, computing, target = place or (owner, module, None)
        for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in table.items():
                if tensor is not None:
                    computes = target or _hooked(name, computed)
                    named.append(
                        NamedTensor(module_name, computing, name, kind, tensor, owner, computes)
                    )
    return named


def convolution_weights(model: nn.Module) -> Iterator[NamedTensor]:
    """Yield the tensors of `named_tensors` that have the memory format of a convolution's weight."""
    for place in named_tensors(model):
        if isinstance(place.module, CONVOLUTIONS_2D_3D) and place.tensor.dim() in (4, 5):
            yield place


@cache
def sample_weights() -> tuple[NamedTensor, ...]:
    """Return the weights of a 2-d and of a 3-d convolution that are in no model, without data."""
    modules = (kind(1, 1, 1, device="meta") for kind in (nn.Conv2d, nn.Conv3d))
    return tuple(NamedTensor("", m, "weight", "parameter", m.weight, "") for m in modules)


def unregistered_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in plain attributes, also in lists and dicts: `Module.to` ignores them."""
    for name, module in named_modules(model):
        computed = computed_names(module)
        for key, value in vars(module).items():
            if type(value) in _SIMPLE or key in _OWN_ATTRIBUTES:
                continue
            if key not in computed:
                yield from _tensors_in(f"{name}.{key}" if name else key, value)


def _tensors_in(path: str, value: Any, depth: int = 3) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif depth and isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors_in(f"{path}.{key}", item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors_in(f"{path}[{index}]", item, depth - 1)


def computed_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of tensors that parametrizations or torch's older hooks compute in `module`."""
    names = list(getattr(module, "parametrizations", None) or ()) if _parametrized(module) else []
    if module._forward_pre_hooks:
        hooked = dict.fromkeys(name for _, name in weight_hooks(module))
        names += [name for name in hooked if name not in module._parameters]
    return tuple(names)


def weight_hooks(module: nn.Module) -> list[tuple[Any, str]]:
    """Return the hooks of legacy weight_norm and spectral_norm, pruning and repairs, with their tensors."""
    hooks = []
    for hook in module._forward_pre_hooks.values():
        name = getattr(hook, "name", getattr(hook, "_tensor_name", None))
        known = type(hook).__module__.startswith("torch.nn.utils.") or is_repair(type(hook))
        if known and isinstance(name, str):
            hooks.append((hook, name))
    return hooks


@cache
def name_of(kind: torch.dtype | torch.device) -> str:
    """Return the name of a dtype or device: `float16`, `cuda:0`."""
    return str(kind).removeprefix("torch.")


def storage_key(tensor: Tensor) -> int | None:
    """Return a number that tensors have in common if they share a storage; None for one that shares none."""
    if not (is_plain(tensor) and tensor.numel()):
        return None
    if tensor.is_meta:
        return tensor.untyped_storage()._cdata
    # The address at which the storage begins: making a Python object of each storage takes far longer.
    return int(tensor.data_ptr() - tensor.storage_offset() * tensor.element_size())


def identity(tensor: Tensor) -> Hashable:
    """Return a key that is equal for the same object, and for the same view of the same storage."""
    if (storage := storage_key(tensor)) is None:
        return id(tensor)
    place = tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()
    return storage, *place, tensor.is_conj(), tensor.is_neg()


def with_bits_of(tensor: Tensor, data: Tensor) -> Tensor:
    """Return a view of `data` whose conjugate and negative bits are toggled where `tensor` has them.

    So raw data become the view that `tensor` is, and `tensor` itself becomes its raw data.
    """
    data = data.conj() if tensor.is_conj() else data
    return torch._neg_view(data) if tensor.is_neg() else data


def lazy_parameter(model: nn.Module) -> str | None:
    """Return the name of an uninitialized parameter or buffer, or None."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return next((name for name, tensor in named if is_lazy(tensor)), None)


def is_plain(tensor: Tensor) -> bool:
    """Return whether this is exactly a Tensor, Parameter or Buffer, with strides."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements share one place in memory, as after `Tensor.expand`."""
    return 0 in tensor.stride() and any(
        size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether this is a tensor subclass with its own meaning of dtype and strides (DTensor)."""
    return type(tensor).__torch_dispatch__ is not _NO_DISPATCH


def inner_data(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors inside a wrapper whose values have another dtype than it reports.

    So does a weight that torchao quantized. Empty for any other tensor.
    """
    data = leaves_of(tensor)
    largest = max(data, key=lambda each: each.nbytes if is_strided(each) else 0, default=tensor)
    return data if largest.dtype != tensor.dtype else []


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor with strides; those inside a wrapper whose values have another dtype."""
    return sum(each.nbytes for each in inner_data(tensor) or [tensor])


def dtype_text(tensor: Tensor) -> str:
    """Return the name of the dtype; of values that have another one `float32 with int8 data`.

    A sparse tensor whose values have another dtype than it reports is `bfloat16 with float32 values`.
    """
    if data := inner_data(tensor):
        inside = max(data, key=lambda each: each.nbytes)
        return f"{name_of(tensor.dtype)} with {name_of(inside.dtype)} data"
    return f"{name_of(tensor.dtype)} {inner_difference(tensor)}".rstrip()


def is_strided(tensor: Tensor) -> bool:
    """Return whether the tensor has strides (not sparse, nested, mkldnn, or uninitialized)."""
    return tensor.layout is torch.strided and not (tensor.is_nested or is_lazy(tensor))


def stride_of(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor, or None if it has none (sparse, mkldnn, nested)."""
    return tensor.stride() if is_strided(tensor) else None


def special_form(tensor: Tensor) -> str | None:
    """Return the form of a tensor whose data cannot be exchanged in place, in words; None for others.

    `tensor.data = ...` changes the dtype that such a tensor reports, and not the parts inside it.
    """
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    is_exchangeable = tensor.layout in (torch.strided, torch.sparse_coo)
    return None if is_exchangeable else str(tensor.layout).removeprefix("torch.").lstrip("_")


def inner_difference(tensor: Tensor) -> str:
    """Return how the values inside a sparse tensor differ from what it reports; empty if they do not."""
    values = tensor if tensor.layout is torch.strided else stored_values(tensor)
    if values.dtype != tensor.dtype:
        return f"with {name_of(values.dtype)} values"
    return "" if values.device == tensor.device else f"with values on {name_of(values.device)}"


def stored_values(tensor: Tensor) -> Tensor:
    """Return the values that a sparse tensor stores; any other tensor as it is."""
    if tensor.layout is torch.sparse_coo:
        return tensor.detach()._values()
    return tensor.detach().values() if tensor.layout in _COMPRESSED else tensor


def leaves_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a wrapper consists of; any other tensor alone."""
    if not is_wrapper(tensor) or not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    held = (getattr(tensor, name) for name in names)  # a DTensor names its mesh, too
    return [leaf for each in held if isinstance(each, Tensor) for leaf in leaves_of(each)]


def _parametrized(module: nn.Module) -> bool:
    return "parametrizations" in module._modules and parametrize.is_parametrized(module)


def _behind(
    owner: str, behind: dict[str, tuple[str, nn.Module, str]]
) -> tuple[str, nn.Module, str] | None:
    while owner:
        if owner in behind:
            return behind[owner]
        owner = owner.rpartition(".")[0]
    return None


def _hooked(name: str, computed: tuple[str, ...]) -> str | None:
    base, _, part = name.rpartition("_")
    return base if base in computed and part in _HOOK_PARTS else None
