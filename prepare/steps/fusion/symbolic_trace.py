"""Trace a module's forward symbolically, to see which modules it calls on which values."""

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from prepare.core.model.module_tree import copy_tree
from prepare.core.utils.process_state import PROCESS_STATE, ignored_warnings

# Values for a size that forward converts with `int(...)`; a graph that depends on it differs between them.
_SIZE, _ODD_SIZE = 32, 33
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def trace(module: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> list[fx.Graph]:
    """Return the graphs of `module`'s forward, one for each way to call it; empty if it cannot be traced.

    Traces once with the required arguments; again with an odd size if forward reads one, and with all
    arguments if some are optional. Only what holds in every graph is certain. A forward that stores a value
    in an attribute or a list, that was set on an instance, or in which a hook would run, cannot be traced,
    because not every use of the value is visible. `is_leaf` selects modules to record as one call, besides
    those of torch itself. `module` is not changed.
    """
    inside = [module, *_traced_modules(module, is_leaf)]
    if any("forward" in vars(each) for each in inside) or any(map(has_hooks, inside[1:])):
        return []
    first = _Tracer(is_leaf, _SIZE, all_arguments=False)
    graphs = [_graph(module, first)]
    if graphs[0] and first.read_a_size:
        graphs.append(_graph(module, _Tracer(is_leaf, _ODD_SIZE, all_arguments=False)))
    if graphs[-1] is None:
        return []
    if first.has_optional_arguments:
        graphs.append(_graph(module, _Tracer(is_leaf, _SIZE, all_arguments=True)))
    return [graph for graph in graphs if graph]


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
        vars(inner)["_compiled_call_impl"] = None
        vars(inner).update((k, v.clone()) for k, v in vars(inner).items() if isinstance(v, Tensor))
    try:
        # torch.fx patches the class nn.Module while it traces.
        with PROCESS_STATE, ignored_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
            graph = _quiet_trace()(tracer, clone)
    except Exception:  # the model's own code runs on proxies, and may raise anything
        return None
    return None if any(map(_stores_value, clone.modules())) else graph


def _quiet_trace() -> Callable[[fx.Tracer, nn.Module], fx.Graph]:
    """Return torch's `Tracer.trace`, which sets its flag "a trace runs" in a copy of its module's globals.

    The flag belongs to the process, and while it is set, every compiled model raises, in all threads.
    """
    function = inspect.unwrap(fx.Tracer.trace)
    known = dict(function.__globals__)
    return FunctionType(
        function.__code__, known, "trace", function.__defaults__, function.__closure__
    )


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
