"""Find the modules that a pipeline changed, and make torch's own module with the same weights of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from prepare.core.forward.compiled import is_compiled
from prepare.core.forward.float32_calls import CastResults, casts_of
from prepare.core.model.forward_code import forward_code
from prepare.core.model.module_tree import copy_tree
from prepare.core.model.replaced_method import replaced_methods
from prepare.core.model.tensors import is_plain
from prepare.pipeline.preconditions import fsdp_problems

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prepare.pipeline.plan import Plan

_TABLES = ("_parameters", "_buffers")
_TORCHS = frozenset(vars(nn.Module())) - {"training"}
_ASKED = ("dtype", "memory_format")


class Originals:
    """The modules of a model with the steps taken back, as they are now: classes, attributes and hooks.

    They hold no tensors; `of` adds those that the model has by then.
    """

    def __init__(self, model: nn.Module, pipeline: Any) -> None:
        tree = copy_tree(model)
        pipeline.undo(tree)
        self._modules = dict(tree.named_modules(remove_duplicate=False))
        for module in tree.modules():
            vars(module).pop("_compiled_call_impl", None)
            for table in _TABLES:
                vars(module)[table].clear()
            for key, _ in _attributes(module):
                vars(module)[key] = None

    def of(self, name: str, module: nn.Module) -> nn.Module:
        """Return torch's own module of this name with the weights of `module`, which it shares."""
        own = copy_tree(self._modules[name])
        for inner, part in own.named_modules(remove_duplicate=False):
            source = module.get_submodule(inner)
            for table in _TABLES:
                vars(part)[table].update(vars(source)[table])
            vars(part).update(_attributes(source) if _is_torchs(part) else _state(source))
            hooks = source._forward_hooks.items()  # they do not run, but its code may count them
            part._forward_hooks.update((k, h) for k, h in hooks if not isinstance(h, CastResults))
        return own

    def restore(self, name: str, module: nn.Module) -> None:
        """Give a module of torch the options back that it had; attributes of other code may be state."""
        own = self._modules[name]
        if not _is_torchs(own):
            return
        kept = {*dict(_attributes(module)), "training"}
        options = {key: v for key, v in vars(own).items() if key[0] != "_" and key not in kept}
        for key in [k for k in vars(module) if k[0] != "_" and k not in kept | vars(own).keys()]:
            del vars(module)[key]  # as a forward that was put over that of the class
        vars(module).update({key: v for key, v in options.items() if v is not None})


def kind_of(module: nn.Module) -> str:
    """Return how the pipeline changed the code of a module; empty if it did not."""
    kinds = {
        "compiled": is_compiled(module),
        "repaired": forward_code(module).repaired,
        "with rewritten calls": any(replaced_methods(module)),
        "kept in float32": casts_of(module),
    }
    return next((kind for kind, is_so in kinds.items() if is_so), "")


def watched_modules(model: nn.Module, plan: Plan) -> dict[str, str]:
    """Return the names of the modules to look at, each with how the pipeline changed it.

    If the pipeline changes the dtype or the memory format of tensors, every module is called in another way
    than before. A compiled module is looked at as a whole; an `nn.Sequential` has no code of its own.
    """
    if any(fsdp_problems(model)) or any(type(p).__name__ == "DTensor" for p in model.parameters()):
        return {}  # a module of sharded weights cannot run alone
    asked: dict[str, str] = {}
    for tensor in plan.tensors:
        if words := [tensor.wants[key] for key in _ASKED if key in tensor.wants]:
            asked[tensor.module] = "in " + " and ".join(words)
    found: dict[str, str] = {}
    compiled: tuple[str, ...] = ()
    for name, module in model.named_modules():
        kind, forward = kind_of(module), type(module).forward
        if ".parametrizations." in f".{name}." or name.startswith(compiled):
            continue
        if kind == "compiled":
            compiled += (f"{name}." if name else "",)
        if kind or forward not in (nn.Module.forward, nn.Sequential.forward):
            found[name] = kind or asked.get(name) or "called with their results" * bool(asked)
    return {name: why for name, why in found.items() if why}


def obstacle(module: nn.Module) -> str:
    """Say why a module cannot be compared with torch's own; empty if it can."""
    parts = module.modules() if is_compiled(module) else (module,)
    tensors = (
        tensor
        for part in parts
        for table in _TABLES
        for tensor in vars(part)[table].values()
        if tensor is not None
    )
    strange = next((t for t in tensors if not is_plain(t)), None)
    return "" if strange is None else f"it holds a {type(strange).__name__}"


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _state(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module of other code that may be state: no functions in place of methods."""
    for key, value in vars(module).items():
        if key not in _TORCHS and not callable(getattr(type(module), key, None)):
            yield key, value


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that are tensors, or lists with tensors, as the weights of an LSTM."""
    for key, value in vars(module).items():
        values = value if type(value) is list else (value,)
        if any(isinstance(item, Tensor) for item in values):
            yield key, value
