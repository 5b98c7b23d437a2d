"""Trace a module's forward symbolically, to see which modules it calls on which values."""

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from prepare.core.model.module_tree import copy_tree
from prepare.core.utils.process_state import PROCESS_STATE, ignored_warnings

# Values for a size that forward converts with `int(...)`; a graph that depends on it differs between them.
_SIZES = (32, 33)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def trace(module: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> list[fx.Graph]:
    """Return the graphs of `module`'s forward, one for each way to call it; empty if it cannot be traced.

    Traces with the required arguments only, and with all arguments; with an even and an odd size if forward
    reads one. Only what holds in every graph is certain. A forward that stores a value in an attribute or a
    list, or in which a hook would run, cannot be traced, because not every use of the value is visible.
    `is_leaf` selects modules to record as one call, besides those of torch itself. `module` is not changed.
    """
    if "forward" in vars(module) or any(map(has_hooks, _traced_modules(module, is_leaf))):
        return []
    graphs = []
    for all_arguments in (False, True):
        for size in _SIZES:
            tracer = _Tracer(is_leaf, size, all_arguments=all_arguments)
            graph = _graph(module, tracer)
            if graph is None and not all_arguments:
                return []
            graphs += [graph] if graph else []
            if graph is None or not tracer.read_a_size:
                break
        if not tracer.has_optional_arguments:
            break
    return graphs


def has_hooks(module: nn.Module) -> bool:
    """Return whether anything runs before or after this module's forward or backward."""
    return any(vars(module).get(table) for table in _HOOKS)


class _Value(fx.Proxy):
    """A value in a trace; `int(value)` gives the tracer's size."""

    tracer: "_Tracer"

    def __int__(self) -> int:
        self.tracer.read_a_size = True
        return self.tracer.size


class _Tracer(fx.Tracer):
    # Without this, `self.count += 1` in a forward would change the model.
    proxy_buffer_attributes = True

    def __init__(
        self, is_leaf: Callable[[nn.Module], bool], size: int, *, all_arguments: bool
    ) -> None:
        super().__init__()
        self.is_leaf, self.size, self.all_arguments = is_leaf, size, all_arguments
        self.read_a_size = self.has_optional_arguments = False
        self._thread = threading.get_ident()

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if threading.get_ident() != self._thread:  # it runs a model of its own meanwhile
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        return self.is_leaf(module) or super().is_leaf_module(module, path)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_args_for_root(
        self,
        root_fn: Callable[..., Any],
        is_module: bool,  # noqa: FBT001
        concrete_args: Any = None,
    ) -> tuple[Callable[..., Any], list[Any]]:
        positional: list[Any] = [self.root]
        named = {}
        parameters = list(inspect.signature(root_fn).parameters.values())[1:]
        for position, parameter in enumerate(parameters):
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            # Models whose arguments are all optional are called with the first of them.
            required = parameter.default is parameter.empty or position == 0
            self.has_optional_arguments |= not required
            if not (required or self.all_arguments):
                continue
            proxy = self.create_proxy("placeholder", parameter.name, (), {})
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(proxy)
            else:
                named[parameter.name] = proxy
        return lambda *values: root_fn(*values, **named), positional


def _graph(module: nn.Module, tracer: _Tracer) -> fx.Graph | None:
    """Trace on a copy of the module tree and on tensors without data; return None if that fails."""
    clone = copy_tree(module)
    for inner in (
        clone.modules()
    ):  # copy tensor attributes that are not buffers, as forward may write to them
        vars(inner).update((k, v.clone()) for k, v in vars(inner).items() if isinstance(v, Tensor))
    try:
        # torch.fx patches the class nn.Module while it traces.
        with PROCESS_STATE, ignored_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
            graph = tracer.trace(clone)
    except Exception:  # the model's own code runs on proxies, and may raise anything
        return None
    return None if any(map(_stores_value, clone.modules())) else graph


def _traced_modules(module: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    """Yield the modules inside `module` whose own forward would run in a trace."""
    tracer = fx.Tracer()
    for child in module.children():
        if not is_leaf(child) and not tracer.is_leaf_module(child, ""):
            yield child
            yield from _traced_modules(child, is_leaf)


def _stores_value(module: nn.Module) -> bool:
    """Return whether an attribute of the module, or a collection in one, holds a value of the trace."""
    return any(_has_value(value) for value in vars(module).values())


def _has_value(value: Any, depth: int = 2) -> bool:
    if isinstance(value, fx.Proxy):
        return True
    if depth and isinstance(value, Mapping):
        return any(_has_value(item, depth - 1) for item in value.values())
    if depth and isinstance(value, list | tuple | set):
        return any(_has_value(item, depth - 1) for item in value)
    return False
