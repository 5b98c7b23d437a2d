"""Compile the model in place, at its first call."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from prepare.core.utils.process_state import ignored_warnings
from prepare.core.utils.suggest import choose, nearest
from prepare.core.utils.text import EVAL_MODE, first_line
from prepare.errors import ConfigError, Problem
from prepare.registry import register
from prepare.step import ForRecipes, ModelStep
from prepare.steps.device import ForDevice

if TYPE_CHECKING:
    import torch

_OPENVINO = "openvino"  # refused: with this torch it silently compiles with inductor
# torch's own. Backends of other packages, and options of any, may name a program to run: not for recipes.
_BACKENDS = ("inductor", "cudagraphs", "aot_eager", "eager")
_FROZEN = "turns the weights into constants, which cannot be trained"


def readable_backend(backend: str) -> None:
    """Raise ValueError for a misspelled backend; a plugin may register a backend of any other name."""
    known = {*_BACKENDS, *entry_points(group="torch_dynamo_backends").names} - {_OPENVINO}
    if backend in ("", _OPENVINO) or (backend not in known and nearest(backend, sorted(known))):
        raise ValueError(f"{backend!r} is not a backend", choose(backend, sorted(known)))


@register("compile")
class Compile(ForDevice, ModelStep):
    """Compiles the model in place: the object, its parameters and its `state_dict` stay the same.

    Compiles at the first call, and again for inputs of another layout or dtype, and once, with dynamic
    shapes, for a second size. The compiled model returns the same values in the same layout; inside it,
    inductor chooses the layout of activations itself, which neither audit nor flow can see. Needs a C++
    compiler on a CPU. A copy or an unpickled model is not compiled. To undo: `from prepare.steps import
    compile; compile.undo(model)`; do so before preparing anything else.
    Helps: fuses the operations between convolutions; most for many small operations.
    Hurts: the first call takes seconds to minutes, and debugging is harder. Hooks added afterwards do not
    run. With `freezing`, later changes of weights may have no effect.
    Source: `torch.nn.Module.compile`; pytorch#117758 for the hooks.
    """

    backend: Annotated[
        str,
        "the name of a backend, as in inductor",
        readable_backend,
        ForRecipes(_BACKENDS.__contains__),
    ] = "inductor"
    """One of `torch.compiler.list_backends()`."""
    mode: (
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    ) = None
    dynamic: bool | None = None
    """Whether to compile with dynamic shapes: false never, true always, null for sizes that change."""
    fullgraph: bool = False
    """Raise an error if the model cannot be compiled as one graph, instead of compiling parts."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the backend; for inductor see `torch._inductor.list_options()`."""
    freezing: bool = False
    """Turn weights into constants (inductor), with static shapes; for inference, within torch.no_grad."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        step = super().from_options(options)
        for option in ("mode", "freezing"):
            if getattr(step, option) and step.backend != "inductor":
                wrong = f"is for inductor, and the backend is {step.backend}"
                raise ConfigError(f"steps.{cls.name}.{option}", wrong, "drop one of the two")
        return step

    def in_training(self) -> Iterator[Problem]:
        if self._is_frozen():
            where = f"steps.{self.name}.freezing"
            yield Problem(where, _FROZEN, f"{EVAL_MODE}, or {where}=false")

    def obstacles(self, model: torch.nn.Module) -> Iterator[Problem]:
        where = f"steps.{self.name}"
        if model.training and self._is_frozen():
            yield Problem(f"{where}.freezing", _FROZEN, "call model.eval() first")
        if problem := self._refused_by_torch():
            yield problem
        elif self.backend == "inductor" and (tool := missing_tool(self.device_of(model))):
            wrong = f"inductor needs {tool}, which is not installed"
            remedy = "install it, or use the backend aot_eager, which is not faster"
            yield Problem(f"{where}.backend", wrong, remedy)

    @classmethod
    def undo(cls, model: torch.nn.Module) -> None:
        """Make a compiled `model` run uncompiled again."""
        vars(model).pop("_compiled_call_impl", None)

    def targets(self, model: torch.nn.Module) -> Iterable[str]:
        made = getattr(model._compiled_call_impl, "prepared_as", None)
        return [] if made == self.to_options() else [""]

    def act(self, model: torch.nn.Module) -> None:
        import torch

        # A partial of its own, which holds the record and is not part of a copy or a pickle.
        compiled = torch.compile(_new_call(), **self._keywords())
        calls = functools.partial(_frozen, compiled) if self._is_frozen() else compiled
        call = functools.partial(calls, model)
        vars(call)["prepared_as"] = self.to_options()
        model._compiled_call_impl = call

    def _is_frozen(self) -> bool:
        return bool(self.freezing or self.options.get("freezing"))

    def _keywords(self) -> dict[str, Any]:
        mode, options = self.mode, self.options | ({"freezing": True} if self.freezing else {})
        if mode and options:  # torch accepts only one of the two
            from torch._inductor import list_mode_options

            options, mode = {**list_mode_options(mode, self.dynamic), **options}, None
        # Sizes that have changed become dynamic, those of weights too, which then are no constants.
        dynamic = False if self.dynamic is None and self._is_frozen() else self.dynamic
        keywords = {"backend": self.backend, "dynamic": dynamic, "fullgraph": self.fullgraph}
        return {**keywords, **isolation(), "mode": mode, "options": options or None}

    def _refused_by_torch(self) -> Problem | None:
        """Check the backend and its options: let torch compile a function that is never called."""
        import torch

        where = f"steps.{self.name}"
        if self.backend not in torch.compiler.list_backends(exclude_tags=()):
            remedy = choose(self.backend, torch.compiler.list_backends())
            return Problem(f"{where}.backend", f"{self.backend!r} is not a backend", remedy)
        try:
            with ignored_warnings():  # inductor imports deprecated modules
                torch.compile(lambda x: x, **self._keywords())
        except Exception as error:
            wrong, *known = first_line(error).split(", known options are ")
            remedy = "see torch._inductor.list_options()" if known else ""
            return Problem(f"{where}.options", wrong, remedy)
        return None


undo = Compile.undo


def _new_call() -> Callable[..., Any]:
    """Return a function that calls a module, with a code object of its own.

    Not `module.compile()`: it skips a forward of torch's own (an nn.Sequential's), and all modules of a class
    in a process share one cache of 8 compilations, after which torch runs them uncompiled.
    """

    def call(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return call


def _frozen(compiled: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `compiled` with a setting that the trace must find too: it does not see the option."""
    from torch._inductor import config

    before, config.freezing = config.freezing, True  # a tenth of the time of `config.patch`
    try:
        return compiled(*args, **kwargs)
    finally:
        config.freezing = before


def isolation() -> dict[str, bool]:
    """Return the keyword that gives a model its own compilation cache, if this torch has it."""
    import torch

    known = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    return {"isolate_recompiles": True} if known else {}


def missing_tool(device: str) -> str | None:
    """Return the tool that inductor needs on this kind of device, if it is not installed."""
    if device == "cuda":
        return None if find_spec("triton") else "the package triton"
    if device != "cpu":
        return None
    compiler = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    tool = shlex.split(os.environ.get("CXX") or compiler)[0]
    return None if shutil.which(tool) else f"a C++ compiler ({tool})"
