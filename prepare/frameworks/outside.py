"""Prepare the networks of a program that is not changed: each at its first call, before the first step.

What does not work, and what is done instead:

* torch's global forward hook gets no keyword arguments, so a cast network would get its first batch as it is.
  Therefore `nn.Module.__call__` itself is replaced, until the first step of the optimizers is over.
* A network that is copied or unpickled registers no Parameter. So each new optimizer begins the look too.
* Copies of a network (EMA) are called after the last look. They are found by their class and shapes.
"""

from __future__ import annotations

import atexit
import fnmatch
import gc
import pkgutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from prepare.audit import Audit, audit
from prepare.core.forward.compiled import calls_removed
from prepare.core.forward.example_input import Example
from prepare.core.utils.process_state import PROCESS_STATE, is_ours
from prepare.core.utils.text import first_line, plural
from prepare.errors import KnownIssueError, PrepareError, raise_problems
from prepare.pipeline import Pipeline
from prepare.pipeline.distributed import rank
from prepare.stages.flow import Flow, predict
from prepare.stages.flow.document import why_not_kept

Recipe = Pipeline | Mapping[str, Any] | str | Path

_torch_call = nn.Module.__call__
# Wrappers that depend on the layout of a network. That of FSDP is imported late, in half a second.
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
# A program without an optimizer serves: after so many calls its networks are known.
_CALLS = 10
# Classes whose name ends so, or whose base does, compare outputs and are no networks.
_NO_NETWORKS = ("Loss", "Criterion", "Metric")


def network_pipeline(recipe: Recipe) -> Pipeline:
    """Return the pipeline of a recipe for a network whose device and inputs a program decides.

    A step `device` is left out, since the program moves the network, and the inputs are formatted by a hook
    of the network (`input_format` with `attach`), since the program calls it.
    """
    if isinstance(recipe, str | Path):
        recipe = Pipeline.load(recipe)
    elif not isinstance(recipe, Pipeline):
        recipe = Pipeline.from_config(recipe)
    steps = {name: options for name, options in recipe.to_config().items() if name != "device"}
    steps["input_format"] = {**steps.get("input_format", {}), "attach": True}
    return Pipeline.from_config(steps)


@dataclass
class Found:
    """What became of a network: what its tensors are, or why it was left as it was, and its layout flow.

    It holds no network, so that a program frees its networks as it would without us.
    """

    name: str
    left: str = ""
    audit: Audit | None = None
    flow: Flow | None = None


class Outside:
    """Prepares each network of this process at its first call, with its optimizers.

    Args:
        recipe: the path of a recipe, a mapping of steps, or a Pipeline. A step `device` is left out.
        module: a pattern of class names, as in `UNet*`; by default each network that is called.
    """

    active: ClassVar[list[Outside]] = []
    # The folder for a page of each network, and the dotted name of what writes them; empty: nothing is told.
    report: Sequence[str] = ("", "")

    def __init__(self, recipe: Recipe, *, module: str = "*") -> None:
        self.pipeline, self.module = network_pipeline(recipe), module
        self.found: list[Found] = []
        self._networks: WeakKeyDictionary[nn.Module, Found] = WeakKeyDictionary()
        # Networks that were looked at since `look`; what is in networks, which is prepared with them; and
        # what is in wrappers, which may make new Parameters for each call, as FSDP does.
        self._seen, self._parts = WeakSet[nn.Module](), WeakSet[nn.Module]()
        self._wrapped: WeakSet[nn.Module] = WeakSet()
        self.waiting: WeakSet[Optimizer] = WeakSet()  # made, and not stepped yet
        self.calls_left = _CALLS  # to look at, until a step

    def start(self) -> Self:
        """Begin to look at calls, optimizers and wrappers; `stop` ends it."""
        if not self.active:
            _watch_making()
        if self not in self.active:
            self.active.append(self)
        self.look()
        return self

    def stop(self) -> None:
        """Put everything back but the networks."""
        if self in self.active:
            self.active.remove(self)
        if not self.active:
            _CALLING.close()
            _MAKING.close()

    def look(self) -> None:
        """Look at calls from here on: an optimizer was made, or a Parameter was registered."""
        if not _in_a_call.get():  # a preparation registers Parameters too
            self.calls_left = _CALLS
            self._seen.clear()
            if nn.Module.__call__ is not _call:
                _replace(_CALLING, nn.Module, "__call__", _call)

    # ------------------------------------------------------------------------------ networks

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Prepare the network whose call begins, and predict its layout flow, if that has not been done."""
        module = getattr(module, "_orig_mod", module)  # of torch.compile(network)
        on_a_cpu = isinstance(module, nn.DataParallel) and not module.device_ids
        is_wrapped = isinstance(module, DistributedDataParallel) and module.module in self._networks
        network: Any = module.module if on_a_cpu or is_wrapped else module
        self.calls_left -= network in self._networks  # a data set calls transforms long before
        self.see(network)
        found = self._networks.get(network)
        if found is not None and found.audit is not None and found.flow is None:
            with _undisturbed(network) as amp, suppress(Exception):  # it goes on as without us
                found.flow = predict(network, Example(args, kwargs), amp=amp)
                # As of `x.view(2, -1)`: a forward, and one on fake tensors, say it so of strides alone.
                if any(text in found.flow.reason for text in ("view size", "view a tensor")):
                    self._take_back(network)
                    self._leave(found, f"its view fails: {found.flow.reason.rpartition(';')[0]}")

    def _take_back(self, network: nn.Module) -> None:
        formats = [name for name in self.pipeline.steps if name.endswith("_memory_format")]
        before = Pipeline.from_config({name: {"memory_format": "contiguous"} for name in formats})
        self.pipeline.undo(network)
        before.apply(network, strict=False, optimizer=_optimizers(network), known_issues="ignore")

    def see(self, module: nn.Module) -> None:
        """Prepare the outermost networks in a module that is called, or that a wrapper is about to take."""
        # What such a wrapper holds has the layout of when the wrapper was made.
        is_whole = self.module == "*" or type(module).__name__.endswith("DataParallel")
        for each in [module] if is_whole else list(module.modules()):
            if self._is_wanted(each):
                self.attempt(each)

    def _is_wanted(self, network: nn.Module) -> bool:
        if network in self._networks:
            return network not in self._seen and not self._networks[network].left
        is_part = network in self._parts or network in self._wrapped
        if is_part or any(base.__name__.endswith(_NO_NETWORKS) for base in type(network).__mro__):
            return False
        parameters = list(network.parameters())
        # Not those without values yet, nor those that `functional_call` gives it.
        are_its_own = all(isinstance(each, nn.Parameter) for each in parameters)
        has_values = not any(is_lazy(each) or each.is_meta for each in parameters)
        # Not what holds a wrapper, nor a network of `torch.export`, which checks its inputs.
        is_free = self._wrapped.isdisjoint(network.modules()) and not hasattr(network, "_in_spec")
        return bool(parameters) and are_its_own and has_values and is_free and self.wants(network)

    def wants(self, network: nn.Module) -> bool:
        """Return whether a network is one of those that were asked for."""
        return fnmatch.fnmatchcase(type(network).__name__, self.module)

    def attempt(self, network: nn.Module) -> None:
        """Prepare a network, or write down why that cannot be: the program goes on as without us."""
        if network not in self._networks:
            self._networks[network] = Found(type(network).__name__)
            self.found.append(self._networks[network])
        found = self._networks[network]
        try:
            found.audit = self.prepare(network, strict=self.module != "*")
        except PrepareError as error:
            self._leave(found, first_line(str(error)))
        self._seen.add(network)
        self._parts.update(network.modules())

    def _leave(self, found: Found, why: str) -> None:
        found.audit, found.left = None, why
        warnings.warn(f"{found.name} is not prepared: {why}", stacklevel=5)

    def prepare(self, network: nn.Module, *, strict: bool = True) -> Audit:
        """Prepare a network with the optimizers that hold Parameters of it, and return its audit.

        Known issues of torch are judged as for training if a Parameter requires a gradient. With `strict`, a
        request without effect is an error.

        Raises:
            PrepareError: it cannot be prepared; it is as it was.
        """
        optimizers = _optimizers(network)
        with _undisturbed(network) as amp:
            plan = self.pipeline.plan(network, amp=amp)
            if any(parameter.requires_grad for parameter in network.parameters()):
                raise_problems(KnownIssueError, plan.training_errors)
            self.pipeline.apply(network, strict=strict, optimizer=optimizers, amp=amp)
        return audit(network, plan=plan)

    # ------------------------------------------------------------------------------ what is made

    def made(self, maker: Any, taken: Iterable[Any]) -> None:
        """Look again, since an optimizer is made; or prepare what a wrapper is about to take."""
        if isinstance(maker, Optimizer):
            self.waiting.add(maker)
            self.look()
        for each in taken:
            if isinstance(each, nn.Module):
                self.see(each)
                self._wrapped.update([maker, *each.modules()])

    def registered(self, module: nn.Module, *_: Any) -> None:
        """Look again, since a Parameter was registered: a new network, or `load_state_dict(assign=True)`."""
        if module not in self._wrapped:
            self.look()

    def stepped(self, optimizer: Optimizer) -> None:
        """Rest once every optimizer has made a step; prepare copies such as an EMA before."""
        self.waiting.discard(optimizer)
        self.calls_left = 0
        if not self.waiting:
            kinds = {_kind(network) for network, found in self._networks.items() if found.audit}
            for copy in self.unprepared():
                if _kind(copy) in kinds and all(each.grad is None for each in copy.parameters()):
                    self.attempt(copy)

    # ------------------------------------------------------------------------------ what is said

    def unprepared(self) -> list[nn.Module]:
        """Return the networks of this process that nothing has called, and that are no part of another."""
        alive = [each for each in _alive(nn.Module) if "_modules" in vars(each)]  # begun to be made
        parts = {id(child) for each in alive for child in each.children()}
        known = {id(each) for network in self._networks for each in network.parameters()}
        wanted = [each for each in alive if id(each) not in parts and self._is_wanted(each)]
        return [each for each in wanted if not known.issuperset(map(id, each.parameters()))]

    def lines(self) -> Iterator[str]:
        """Yield what was prepared and what is to know of it, and the networks that were never called."""
        steps = ", ".join(self.pipeline.steps)
        for found in self.found:
            if found.audit is None:
                yield f"{found.name} is as it was: {found.left}"
                continue
            counts = found.audit.summary["convolutions"]
            done = counts.get("converted", 0) + counts.get("already", 0)
            of = plural(sum(counts.values()), "convolution")
            yield f"{found.name}: {done} of {of} prepared ({steps})"
            if found.flow is not None:
                yield f"  {why_not_kept(found.flow) or 'layout    kept'}"
        if names := sorted({type(each).__name__ for each in self.unprepared()}):
            yield f"never called, so not prepared: {', '.join(names)}"
        if not self.found:
            yield "no network was called in this process, and nothing was prepared"


def outside(recipe: Recipe, *, module: str = "*") -> Outside:
    """Prepare the networks of this program from here on, each at its first call, before the first step.

    Say it before the networks are wrapped or compiled. What was prepared is printed to stderr at the end of
    the program; `stop()` of the result ends it before.

    Args:
        recipe: the path of a recipe, a mapping of steps, or a Pipeline. A step `device` is left out.
        module: a pattern of class names, as in `UNet*`; by default each network that is called.
    """
    session = Outside(recipe, module=module).start()

    def end() -> None:
        if session in Outside.active and rank() == 0 and session.report:
            for text in session.lines():
                print(f"prepare: {text}", file=sys.stderr)  # noqa: T201
            if session.report[0]:
                pkgutil.resolve_name(session.report[1])(session, session.report[0])
        session.stop()

    atexit.register(end)
    return session


def _alive(kind: Any) -> list[Any]:
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _kind(network: nn.Module) -> tuple[Any, ...]:
    """Return what a copy of a network has in common with it."""
    return type(network), tuple((name, each.shape) for name, each in network.named_parameters())


def _optimizers(network: nn.Module) -> list[Optimizer]:
    """Return the optimizers of this process that hold Parameters of a network."""
    held = set(map(id, network.parameters()))
    groups = {each: each.param_groups for each in _alive(Optimizer)}
    return [each for each, of in groups.items() if held & {id(p) for g in of for p in g["params"]}]


@contextmanager
def _undisturbed(network: nn.Module) -> Iterator[Any]:
    """Leave compiled calls, inference mode and autocast, which keeps old casts; yield its dtype."""
    kind = next(network.parameters()).device.type
    amp = "none"
    if torch.is_autocast_enabled(kind):
        amp = "float16" if torch.get_autocast_dtype(kind) == torch.float16 else "bfloat16"
    eager = calls_removed(network)
    with eager, torch.inference_mode(mode=False), torch.autocast(kind, enabled=False):
        yield amp
    torch.clear_autocast_cache()


# ------------------------------------------------------------------------------ what is watched in torch

_CALLING, _MAKING = ExitStack(), ExitStack()
_in_a_call = ContextVar("_in_a_call", default=False)


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module as torch does; the outermost call of a thread is shown to each session."""
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    # A verification and its like call models of their own, which are compared as they are.
    if is_traced or is_ours() or _in_a_call.get():
        return _torch_call(module, *args, **kwargs)
    before = _in_a_call.set(True)
    try:
        with PROCESS_STATE:  # a server's threads call a network at once
            _tell("called", module, args, kwargs)
        return _torch_call(module, *args, **kwargs)
    finally:
        _in_a_call.reset(before)
        _rest()


def _rest() -> None:
    """Take the look at calls away once no session needs it; then a call costs nothing."""
    if all(each.calls_left <= 0 and not each.waiting for each in Outside.active):
        _CALLING.close()


def _watch_making() -> None:
    """Watch what is made: optimizers, Parameters, and wrappers that depend on the layout of a network."""
    _watch_class(Optimizer)
    for kind in nn.Module.__subclasses__():
        _watch_wrapper(kind)
    nn.Module.__init_subclass__ = classmethod(_watch_wrapper)  # type: ignore[assignment]
    _MAKING.callback(delattr, nn.Module, "__init_subclass__")
    registering = register_module_parameter_registration_hook(partial(_tell, "registered"))
    _MAKING.callback(registering.remove)
    _MAKING.callback(register_optimizer_step_post_hook(_stepped).remove)


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    """Tell of a step while calls are looked at; a hook that runs cannot be removed."""
    if nn.Module.__call__ is _call:
        _tell("stepped", optimizer)
        _rest()


def _watch_wrapper(kind: Any, **options: Any) -> None:
    super(nn.Module, kind).__init_subclass__(**options)
    if kind.__name__ in _WRAPPERS:
        _watch_class(kind)


def _watch_class(kind: Any) -> None:
    constructor = kind.__init__

    @wraps(constructor)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _tell("made", self, [*args, *kwargs.values()])
        constructor(self, *args, **kwargs)

    _replace(_MAKING, kind, "__init__", init)


def _tell(word: str, *subjects: Any) -> None:
    for session in list(Outside.active):
        getattr(session, word)(*subjects)


def _replace(stack: ExitStack, owner: Any, name: str, new: Any) -> None:
    """Give an object or a class another attribute until the stack is closed."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, new)
