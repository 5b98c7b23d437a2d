"""Traces a module's forward symbolically, to see which modules it calls on what, without touching it."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from prepare.core.model.module_tree import copy_tree

# What a size that forward asks for by `int(...)` is taken as; what depends on it differs between them.
_SIZES = (32, 33)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def trace(module: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> list[fx.Graph]:
    """The graphs of `module`'s forward, one for each way to call it; none where it cannot be traced.

    Traced with the required arguments only, and with all; with even and odd sizes where forward asks
    for one. What holds in all of them holds. A forward that puts a value aside, in an attribute or a list, or
    in which a hook would run, cannot be traced: not all of what happens to that value is seen.
    `is_leaf` says which modules are seen as one call, besides those of torch itself.
    """
    if "forward" in vars(module) or any(map(has_hooks, _run_by(module, is_leaf))):
        return []
    found = []
    for everything in (False, True):
        for size in _SIZES:
            tracer = _Tracer(is_leaf, size, everything=everything)
            graph = _graph(module, tracer)
            if graph is None and not everything:
                return []
            found += [graph] if graph else []
            if graph is None or not tracer.asked:
                break
        if not tracer.optional:
            break
    return found


def has_hooks(module: nn.Module) -> bool:
    """Whether anything runs before or after this module's forward or backward."""
    return any(vars(module).get(table) for table in _HOOKS)


class _Number(fx.Proxy):
    """A value in a trace; a size where forward makes an integer of it."""

    def __int__(self) -> int:
        self.tracer.asked = True
        return self.tracer.size


class _Tracer(fx.Tracer):
    # Else `self.count += 1` in a forward would count for real.
    proxy_buffer_attributes = True

    def __init__(
        self, is_leaf: Callable[[nn.Module], bool], size: int, *, everything: bool
    ) -> None:
        super().__init__()
        self.is_leaf, self.size, self.everything = is_leaf, size, everything
        self.asked = self.optional = False

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        return self.is_leaf(module) or super().is_leaf_module(module, path)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Number(node, self)

    def create_args_for_root(
        self,
        root_fn: Callable[..., Any],
        is_module: bool,  # noqa: FBT001
        concrete_args: Any = None,
    ) -> tuple[Callable[..., Any], list[Any]]:
        given, named = [self.root], {}
        taken = list(inspect.signature(root_fn).parameters.values())[1:]
        for at, one in enumerate(taken):
            if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                continue
            # Also models whose arguments are all optional are called with the first of them.
            required = one.default is one.empty or at == 0
            self.optional |= not required
            if not (required or self.everything):
                continue
            proxy = self.create_proxy("placeholder", one.name, (), {})
            if one.kind is one.POSITIONAL_ONLY:
                given.append(proxy)
            else:
                named[one.name] = proxy
        return partial(root_fn, **named), given


def _graph(module: nn.Module, tracer: _Tracer) -> fx.Graph | None:
    """The graph, traced on a copy of the module tree and on tensors without data."""
    clone = copy_tree(module)
    for inner in clone.modules():  # what is no buffer may be written to for real
        vars(inner).update((k, v.clone()) for k, v in vars(inner).items() if isinstance(v, Tensor))
    try:
        with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
            warnings.simplefilter("ignore")
            graph = tracer.trace(clone)
    except Exception:  # the model's own code met values that are none, and may raise anything
        return None
    return None if any(map(_holds_value, clone.modules())) else graph


def _run_by(module: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    """The modules below whose own forward would run in a trace."""
    tracer = fx.Tracer()
    for child in module.children():
        if not is_leaf(child) and not tracer.is_leaf_module(child, ""):
            yield child
            yield from _run_by(child, is_leaf)


def _holds_value(module: nn.Module) -> bool:
    """Whether an attribute, or a list or mapping in one, holds a value of the trace."""
    return any(_has_value(value) for value in vars(module).values())


def _has_value(value: Any, depth: int = 2) -> bool:
    if isinstance(value, fx.Proxy):
        return True
    if depth and isinstance(value, Mapping):
        return any(_has_value(item, depth - 1) for item in value.values())
    if depth and isinstance(value, list | tuple | set):
        return any(_has_value(item, depth - 1) for item in value)
    return False
