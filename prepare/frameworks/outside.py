"""Prepare the networks of a program that is not changed: each at its first call, before the first step.

What does not work, and what is done instead: torch's global forward hook gets no keyword arguments, so a cast
network would get its first batch as it is. Therefore `nn.Module.__call__` itself is replaced, until the first
step of the optimizers is over. Copies of a network (EMA) that nothing has called yet are found by their class
and the shapes of their Parameters.
"""

from __future__ import annotations

import atexit
import fnmatch
import gc
import pkgutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.fx import _symbolic_trace
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from prepare.audit import Audit, audit
from prepare.core.forward.example_input import Example
from prepare.core.utils.process_state import PROCESS_STATE
from prepare.core.utils.text import first_line, plural, size
from prepare.errors import ConfigError, KnownIssueError, PrepareError, raise_problems
from prepare.frameworks.start.sitecustomize import when_imported
from prepare.pipeline import Pipeline
from prepare.pipeline.distributed import rank
from prepare.stages.flow import Flow, predict

if TYPE_CHECKING:
    from prepare.core.forward.torch_state import Amp
    from prepare.pipeline.plan import Plan

Recipe = Pipeline | Mapping[str, Any] | str | Path

_torch_call, _torch_optimizer = nn.Module.__call__, Optimizer.__init__
_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"
# A program without an optimizer serves: after so many calls its networks are known.
_CALLS = 10
# Classes whose name ends so, or whose base does, compare outputs and are no networks.
_NO_NETWORKS = ("Loss", "Criterion", "Metric")
# Wrappers that keep the layout of a network as it was when they were made.
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
# torch 2.5 has the older name only, and newer ones warn of it.
_is_fx_traced = getattr(_symbolic_trace, "is_fx_symbolic_tracing", _symbolic_trace.is_fx_tracing)
_inside = threading.local()


def network_pipeline(recipe: Recipe) -> Pipeline:
    """Return the pipeline of a recipe for a network whose device and inputs a program decides.

    A step `device` is left out, since the program moves the network, and the inputs are formatted by a hook
    of the network (`input_format` with `attach`), since the program calls it.
    """
    if isinstance(recipe, str | Path):
        recipe = Pipeline.load(recipe)
    elif isinstance(recipe, Mapping):
        recipe = Pipeline.from_config(recipe)
    elif not isinstance(recipe, Pipeline):
        wrong = f"a {type(recipe).__name__} is not a recipe"
        raise ConfigError("recipe", wrong, "give a path, a mapping of steps, or a Pipeline")
    steps = {name: options for name, options in recipe.to_config().items() if name != "device"}
    steps["input_format"] = {**steps.get("input_format", {}), "attach": True}
    return Pipeline.from_config(steps)


@dataclass
class Found:
    """What became of a network: the plan before it, or why it was left as it was, and what is said of it.

    It holds no network, so that a program frees its networks as it would without us.
    """

    name: str
    plan: Plan | None = None
    left: str = ""
    again: int = 0
    is_checked: bool = False
    audit: Audit | None = None
    flow: Flow | None = None
    parts: WeakSet[nn.Module] = field(default_factory=WeakSet)

    def lines(self, steps: Iterable[str]) -> Iterator[str]:
        """Yield what is to know of the network, one line for each answer."""
        if self.plan is None:
            yield f"{self.name} is as it was: {self.left}"
            return
        counts = self.audit.summary["convolutions"] if self.audit else {}
        done, total = counts.get("converted", 0) + counts.get("already", 0), sum(counts.values())
        again = f", {plural(self.again, 'time')} again" if self.again else ""
        yield f"{self.name}: {done} of {plural(total, 'convolution')} prepared{again} ({', '.join(steps)})"
        if self.flow is not None and self.flow.status == "ok":
            breaks, copied = self.flow.summary["breaks"], self.flow.summary["copied_bytes"]
            lost = f"LOST at {plural(breaks, 'place')}: {size(copied)} copied per forward"
            yield f"  layout    {lost if breaks else 'kept'}"
        yield from (f"  warning   {first_line(str(each))}" for each in self.plan.warnings[:2])


class Outside:
    """Prepares each network of this process at its first call, with its optimizers.

    Args:
        recipe: the path of a recipe, a mapping of steps, or a Pipeline. A step `device` is left out.
        module: a pattern of class names, as in `UNet*`: only networks of these classes are prepared.
        only: returns the networks to prepare; without it each that is called is prepared.
        optimizers: those that were made before.
    """

    active: ClassVar[list[Outside]] = []

    def __init__(
        self,
        recipe: Recipe,
        *,
        module: str = "*",
        only: Callable[[], Iterable[nn.Module]] | None = None,
        optimizers: Iterable[Optimizer] = (),
    ) -> None:
        self.pipeline = network_pipeline(recipe)
        self.found: list[Found] = []
        self._networks: WeakKeyDictionary[nn.Module, Found] = WeakKeyDictionary()
        self.module, self._only = module, only
        self.optimizers: WeakSet[Optimizer] = WeakSet(optimizers)
        self._stepped: WeakSet[Optimizer] = WeakSet()
        self._calls = self._steps = 0

    def start(self) -> Self:
        """Begin to look at calls, optimizers and wrappers; `stop` ends it."""
        self.active.append(self)
        _watch_making()
        _watch_calls()
        return self

    def stop(self) -> None:
        """Put everything back but the networks."""
        if self in self.active:
            self.active.remove(self)
        if not self.active:
            _CALLING.close()
            _MAKING.close()

    def look(self) -> None:
        """Look at calls again: an optimizer was made, or a Parameter was registered."""
        self._calls = self._steps = 0
        for found in self.found:
            found.is_checked = False
        _watch_calls()

    @property
    def may_rest(self) -> bool:
        """Return whether all networks are known, so that a call need not be looked at."""
        steps = self._steps >= _CALLS or (self._stepped and self.optimizers == self._stepped)
        return bool(steps) or (self._calls >= _CALLS and not self.optimizers)

    # ------------------------------------------------------------------------------ networks

    def called(self, module: nn.Module) -> None:
        """Prepare the network whose call begins, if that has not been done."""
        network = self._network(module)
        self._calls += (
            network in self._networks
        )  # transforms of a data set are called often, before
        is_wrapped = network is not module and type(module).__name__ in _WRAPPERS
        if not is_wrapped and self._is_wanted(network):
            self.attempt(network)

    def returned(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Describe the network whose first call has ended."""
        network = self._network(module)
        found = self._networks.get(network)
        if found is not None and found.plan is not None and found.audit is None:
            found.audit = audit(network, plan=found.plan)
            with _plain_modes() as amp, suppress(Exception):  # the program goes on as without us
                found.flow = predict(network, Example(args, kwargs), amp=amp)

    def _network(self, module: nn.Module) -> nn.Module:
        """Return the network in a wrapper that was made of it, or what is called itself."""
        module = getattr(module, "_orig_mod", module)  # of torch.compile(network)
        inner = getattr(module, "module", None)
        if not isinstance(inner, nn.Module):
            return module
        on_a_cpu = isinstance(module, nn.DataParallel) and not module.device_ids
        return inner if on_a_cpu or inner in self._networks else module

    def attempt(self, network: nn.Module) -> None:
        """Prepare a network, or write down why that cannot be: the program goes on as without us."""
        try:
            self.prepare(network)
        except PrepareError as error:
            found = self._networks.get(network) or self._add(network)
            found.left, found.is_checked = first_line(str(error)), True
            warnings.warn(f"{found.name} is not prepared: {found.left}", stacklevel=4)

    def prepare(self, network: nn.Module) -> None:
        """Prepare a network with the optimizers that hold Parameters of it.

        Known issues of torch are judged as for training if a Parameter requires a gradient. For networks that
        were named, a request without effect is an error.

        Raises:
            PrepareError: it cannot be prepared; it is as it was.
        """
        trains = any(parameter.requires_grad for parameter in network.parameters())
        with _uncompiled(network), _plain_modes() as amp:
            plan = self.pipeline.plan(network, amp=amp)
            if trains:
                raise_problems(KnownIssueError, plan.training_errors)
            self._apply(network, self.optimizers, amp)
        found = self._networks.get(network) or self._add(network)
        if found.plan is None:
            found.plan = plan
        elif plan:
            found.again += 1
        found.parts, found.is_checked = WeakSet(network.modules()), True

    def _apply(self, network: nn.Module, optimizers: Iterable[Optimizer], amp: Amp) -> None:
        held = {id(parameter) for parameter in network.parameters()}
        mine = [each for each in optimizers if held & _parameters(each)]
        self.pipeline.apply(network, strict=self._only is not None, optimizer=mine, amp=amp)

    def _add(self, network: nn.Module) -> Found:
        found = self._networks[network] = Found(type(network).__name__)
        self.found.append(found)
        return found

    def _is_wanted(self, network: nn.Module) -> bool:
        found = self._networks.get(network)
        if found is not None:
            return not found.is_checked
        if self._only is not None:
            return any(network is each for each in self._only())
        if any(network in each.parts for each in self.found):
            return False
        names = [base.__name__ for base in type(network).__mro__]
        if any(name.endswith(_NO_NETWORKS) for name in names):
            return False
        matches = fnmatch.fnmatchcase(names[0], self.module)
        return matches and next(network.parameters(), None) is not None

    def wraps(self, network: nn.Module) -> None:
        """Prepare a network that a wrapper is about to take, since the wrapper depends on its layout."""
        for each in [network] if self._only is None else self._only():
            if self._is_wanted(each):
                self.attempt(each)

    # ------------------------------------------------------------------------------ optimizers

    def made(self, optimizer: Optimizer) -> None:
        """Remember an optimizer, and look again: it may train a new network."""
        self.optimizers.add(optimizer)
        self.look()

    def registered(self, module: nn.Module) -> None:
        """Look again, since a Parameter was registered: a new network, or `load_state_dict(assign=True)`."""
        if self.may_rest or any(module in found.parts for found in self.found):
            self.look()

    def before_step(self, optimizer: Optimizer) -> None:
        """Give the state of an optimizer the layout of its Parameters, also when it is loaded later."""
        self.optimizers.add(optimizer)
        if optimizer not in self._stepped:
            for network, found in list(self._networks.items()):
                if found.plan is not None:
                    try:
                        with _uncompiled(network), _plain_modes() as amp:
                            self._apply(network, [optimizer], amp)
                    except PrepareError as error:
                        warnings.warn(f"{type(optimizer).__name__}: {error}", stacklevel=5)

    def after_step(self, optimizer: Optimizer) -> None:
        """Rest once every optimizer has made a step; prepare copies such as an EMA before."""
        self._stepped.add(optimizer)
        self._steps += 1
        if self.may_rest and self._only is None:
            known = {_kind(network) for network, found in self._networks.items() if found.plan}
            for copy in unprepared(self):
                if _kind(copy) in known and all(each.grad is None for each in copy.parameters()):
                    self.attempt(copy)
        _rest()

    def lines(self) -> Iterator[str]:
        """Yield what was prepared and what is to know of it, and the networks that were never called."""
        for found in self.found:
            yield from found.lines(self.pipeline.steps)
        if names := sorted({type(each).__name__ for each in unprepared(self)}):
            yield f"never called, so not prepared: {', '.join(names)}"
        if not self.found:
            yield "no network was called, and nothing was prepared"


def outside(
    recipe: Recipe, *, module: str = "*", report: tuple[str, str] = ("", ""), is_told: bool = True
) -> Outside:
    """Prepare the networks of this program from here on, each at its first call, before the first step.

    Say it before the networks are wrapped or compiled. What was prepared is printed to stderr at the end of
    the program; `stop()` of the result ends it before.

    Args:
        recipe: the path of a recipe, a mapping of steps, or a Pipeline. A step `device` is left out.
        module: a pattern of class names, as in `UNet*`: only networks of these classes are prepared.
        report: the dotted name of what writes a page for each network, and the folder; of `prepare run`.
        is_told: whether what was prepared is printed at the end.
    """
    session = Outside(recipe, module=module).start()

    def end() -> None:
        if session in Outside.active and rank() == 0 and is_told:
            for text in session.lines():
                print(f"prepare: {text}", file=sys.stderr)  # noqa: T201
            if report[1]:
                pkgutil.resolve_name(report[0])(session, report[1])
        session.stop()

    atexit.register(end)
    return session


def unprepared(session: Outside) -> list[nn.Module]:
    """Return the networks of this process that nothing has called, and that are no part of another."""
    modules = (each for each in gc.get_objects() if issubclass(type(each), nn.Module))
    alive = [each for each in modules if "_modules" in vars(each)]  # its constructor has begun
    parts = {id(child) for each in alive for child in each.children()}
    return [e for e in alive if id(e) not in parts and session._is_wanted(e)]


def _kind(network: nn.Module) -> tuple[Any, ...]:
    """Return what a copy of a network has in common with it."""
    named = network.named_parameters()
    shapes = tuple((name, None if is_lazy(each) else tuple(each.shape)) for name, each in named)
    return type(network), shapes


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(each) for group in optimizer.param_groups for each in group["params"]}


@contextmanager
def _uncompiled(network: nn.Module) -> Iterator[None]:
    """Take the compiled calls of a network away, and give them back: they compile anew if it changed."""
    calls = {each: each._compiled_call_impl for each in network.modules()}
    compiled = {each: call for each, call in calls.items() if call is not None}
    for each in compiled:
        each._compiled_call_impl = None
    try:
        yield
    finally:
        for each, call in compiled.items():
            each._compiled_call_impl = call
        if compiled:
            torch.compiler.reset()


@contextmanager
def _plain_modes() -> Iterator[Amp]:
    """Leave autocast, which keeps casts of old weights, and inference mode; yield the dtype of autocast."""
    amp: Amp = "none"
    with ExitStack() as stack:
        for kind in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(kind):
                amp = "float16" if torch.get_autocast_dtype(kind) == torch.float16 else "bfloat16"
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.inference_mode(mode=False))
        yield amp
    torch.clear_autocast_cache()


# ------------------------------------------------------------------------------ what is watched in torch

_CALLING, _MAKING = ExitStack(), ExitStack()


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module as torch does; the outermost call of a thread is shown to each session."""
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    is_traced = is_traced or _is_fx_traced()
    # A verification and its like call models of their own, which are compared as they are.
    if is_traced or PROCESS_STATE.is_mine or vars(_inside).get("a_call"):
        return _torch_call(module, *args, **kwargs)
    vars(_inside)["a_call"] = True
    try:
        for session in list(Outside.active):
            session.called(module)
        output = _torch_call(module, *args, **kwargs)
        for session in list(Outside.active):
            session.returned(module, args, kwargs)
    finally:
        vars(_inside)["a_call"] = False
    _rest()
    return output


def _watch_calls() -> None:
    if nn.Module.__call__ is _call:
        return
    _replace(_CALLING, nn.Module, "__call__", _call)
    for handle in (
        register_optimizer_step_pre_hook(lambda optimizer, *_: _tell_all("before_step", optimizer)),
        register_optimizer_step_post_hook(lambda optimizer, *_: _tell_all("after_step", optimizer)),
    ):
        _CALLING.callback(handle.remove)


def _rest() -> None:
    """Take the hooks off once no session needs them; then a call costs nothing."""
    if all(session.may_rest for session in Outside.active):
        _CALLING.close()


def _watch_making() -> None:
    """Watch what is made: optimizers, Parameters, and wrappers that depend on the layout of a network."""
    if Optimizer.__init__ is not _torch_optimizer:
        return

    def optimizer(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        _torch_optimizer(self, *args, **kwargs)
        _tell_all("made", self)

    _replace(_MAKING, Optimizer, "__init__", wraps(_torch_optimizer)(optimizer))
    handle = register_module_parameter_registration_hook(
        lambda module, *_: _tell_all("registered", module)
    )
    _MAKING.callback(handle.remove)
    _watch_wrapper(DistributedDataParallel)
    when_imported(_FSDP, lambda module: _watch_wrapper(module.FullyShardedDataParallel))


def _watch_wrapper(wrapper: Any) -> None:
    original = wrapper.__init__

    @wraps(original)
    def made(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        _tell_all("wraps", module)
        original(self, module, *args, **kwargs)

    _replace(_MAKING, wrapper, "__init__", made)


def _tell_all(word: str, subject: Any) -> None:
    for session in list(Outside.active):
        getattr(session, word)(subject)


def _replace(stack: ExitStack, owner: Any, name: str, new: Any) -> None:
    """Put a function into a class until the stack is closed."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, new)
