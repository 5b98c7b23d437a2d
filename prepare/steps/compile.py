"""Compiles the model in place, at its first call."""

from __future__ import annotations

import dataclasses
import inspect
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from prepare.core.utils.suggest import choose, nearest
from prepare.core.utils.telemetry import switch_off_telemetry
from prepare.errors import ConfigError, Problem
from prepare.registry import register
from prepare.step import ModelStep, Step

if TYPE_CHECKING:
    import torch

# torch's own, and those that its registry knows of without the package that they need.
_BACKENDS = ("inductor", "openvino", "cudagraphs", "aot_eager", "eager", "openxla", "tvm")
_PACKAGES = {"openvino": "openvino", "openxla": "torch_xla", "tvm": "tvm"}
# What OpenVINO needs: without the first, its backend fails on this torch and takes inductor in silence;
# without the second it computes in bfloat16 where the CPU can.
_OPENVINO = {"aot_autograd": True, "config": {"INFERENCE_PRECISION_HINT": "f32"}}


def readable_backend(backend: str) -> None:
    """Raises ValueError for a name that is nearly that of a backend; what a plugin registers may have any."""
    known = {*_BACKENDS, *entry_points(group="torch_dynamo_backends").names}
    if not backend or (backend not in known and nearest(backend, sorted(known))):
        raise ValueError(f"{backend!r} is no backend", choose(backend, sorted(known)))


def undo(model: torch.nn.Module) -> None:
    """Makes a compiled `model` run as it was written again, in place."""
    vars(model).pop("_compiled_call_impl", None)


@register("compile")
class Compile(ModelStep):
    """Compiles the model in place: the object, its parameters and its `state_dict` stay the same.

    Compiled at the first call, and again for inputs of another kind: layout, type, and for a second
    size once with sizes left open. Gives what the model gives, in the same layout; inside, inductor lays
    activations out as it likes, and neither audit nor flow can see that. Needs a C++ compiler on a CPU.
    A copy, or an unpickled model, is not compiled. To take it back: `from prepare.steps import
    compile; compile.undo(model)`; do so before anything else is prepared.
    Helps: fuses what stands between convolutions; most where operations are many and small.
    Hurts: the first call takes seconds to minutes, and debugging is harder. Hooks that are added after it are
    not run. With `freezing`, later changes of weights may not be seen. `openvino` gives contiguous
    outputs and no gradients, and takes inductor instead, in silence, for what it cannot do.
    Source: `torch.nn.Module.compile`; pytorch#117758 for the hooks.
    """

    backend: Annotated[str, "the name of a backend, as in inductor", readable_backend] = "inductor"
    """Any of `torch.compiler.list_backends()`, and `openvino` where it is installed."""
    mode: (
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    ) = None
    dynamic: bool | None = None
    """Whether sizes are left open: never, always, or null: those that have changed."""
    fullgraph: bool = False
    """An error where the model cannot be compiled as a whole, instead of in parts."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of the backend; those of inductor: `torch._inductor.list_options()`."""
    freezing: bool = False
    """Makes constants of the weights (inductor); only within torch.no_grad, and for inference."""

    # Where the model will be, once the step is bound to others; no option.
    _device: ClassVar[str | None] = None

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        step = super().from_options(options)
        for option in ("mode", "freezing"):
            if getattr(step, option) and step.backend != "inductor":
                wrong = f"is for inductor, and the backend is {step.backend}"
                raise ConfigError(f"steps.{cls.name}.{option}", wrong, "drop one of the two")
        return step

    def bind(self, steps: Iterable[Step]) -> Self:
        bound = dataclasses.replace(self)
        device = next((step.device for step in steps if step.name == "device"), None)
        object.__setattr__(bound, "_device", device)
        return bound

    def in_training(self) -> Iterator[Problem]:
        for option, wrong in self._not_trainable():
            other = "freezing=false" if option == "freezing" else "another backend"
            where, remedy = f"steps.{self.name}.{option}", f"choose mode=eval, or {other}"
            yield Problem(where, f"{wrong} (mode=train)", remedy)

    def obstacles(self, model: torch.nn.Module) -> Iterator[Problem]:
        where = f"steps.{self.name}"
        if model.training:
            for option, wrong in self._not_trainable():
                yield Problem(f"{where}.{option}", wrong, "call model.eval() first")
        if (package := _PACKAGES.get(self.backend)) and find_spec(package) is None:
            yield Problem(
                f"{where}.backend", f"{self.backend} needs the package {package}", "install it"
            )
        elif problem := self._refused_by_torch():
            yield problem
        elif self.backend == "inductor" and (
            tool := _missing_tool(self._device or _device_of(model))
        ):
            remedy = "install it, or take the backend aot_eager, which is no faster"
            yield Problem(f"{where}.backend", f"inductor needs {tool}, which is not there", remedy)

    def targets(self, model: torch.nn.Module) -> Iterable[str]:
        record = getattr(model._compiled_call_impl, "prepared_as", None)
        return () if record == self.to_options() else ("",)

    def act(self, model: torch.nn.Module) -> None:
        import torch

        def call(*args: Any, **kwargs: Any) -> Any:
            return model._call_impl(*args, **kwargs)

        # Not `model.compile()`: that passes over a forward that is torch's own (an nn.Sequential's), and all
        # models of a class share one cache of 8 compilations, after which torch runs them uncompiled.
        call.__code__ = call.__code__.replace()
        compiled = torch.compile(call, **self._keywords(model))
        # On the function, which neither a copy of the model nor a pickle takes along.
        compiled.prepared_as = self.to_options()
        model._compiled_call_impl = compiled

    def _not_trainable(self) -> Iterator[tuple[str, str]]:
        if self.freezing or self.options.get("freezing"):
            yield "freezing", "makes constants of the weights, which cannot be trained"
        if self.backend == "openvino":
            yield "backend", "openvino computes no gradients"

    def _keywords(self, model: torch.nn.Module | None) -> dict[str, Any]:
        options = dict(self.options)
        if self.backend == "openvino":
            switch_off_telemetry()
            options = {**_openvino_options(model), **options}
        mode = self.mode
        if self.freezing:
            options["freezing"] = True
        if mode and options:  # torch takes one of them
            from torch._inductor import list_mode_options

            options, mode = {**list_mode_options(mode, self.dynamic), **options}, None
        keywords = {"backend": self.backend, "dynamic": self.dynamic, "fullgraph": self.fullgraph}
        return {**keywords, **isolation(), "mode": mode, "options": options or None}

    def _refused_by_torch(self) -> Problem | None:
        """What torch says of the backend and its options, asked with a function that is never called."""
        import torch

        where = f"steps.{self.name}"
        if self.backend not in torch.compiler.list_backends(exclude_tags=()):
            remedy = choose(self.backend, torch.compiler.list_backends())
            return Problem(f"{where}.backend", f"{self.backend!r} is no backend", remedy)
        if self.backend == "inductor":
            known = torch._inductor.list_options()
            for key in (key for key in self.options if key.replace("-", "_") not in known):
                close = nearest(key, known)  # there are 500
                remedy = (
                    f"did you mean {close[0]!r}?" if close else "see torch._inductor.list_options()"
                )
                return Problem(f"{where}.options.{key}", "inductor has no such option", remedy)
        try:
            with warnings.catch_warnings():  # what inductor imports is deprecated in part
                warnings.simplefilter("ignore")
                torch.compile(lambda x: x, **self._keywords(None))
        except Exception as error:
            return Problem(f"{where}.options", str(error).splitlines()[0])
        return None


def isolation() -> dict[str, bool]:
    """What `torch.compile` takes, where it can, to keep what it compiles for this model alone."""
    import torch

    known = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    return {"isolate_recompiles": True} if known else {}


def _openvino_options(model: torch.nn.Module | None) -> dict[str, Any]:
    """In float32, unless the model is in 16 bits."""
    small = model and any(p.is_floating_point() and p.itemsize == 2 for p in model.parameters())
    return {"aot_autograd": True} if small else _OPENVINO


def _missing_tool(device: str) -> str | None:
    """What inductor needs on this kind of device and does not find."""
    if device.partition(":")[0] == "cuda":
        return None if find_spec("triton") else "the package triton"
    if device.partition(":")[0] != "cpu":
        return None
    named = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    tool = shlex.split(os.environ.get("CXX") or named)[0]
    return None if shutil.which(tool) else f"a C++ compiler ({tool})"


def _device_of(model: torch.nn.Module) -> str:
    return next((parameter.device.type for parameter in model.parameters()), "cpu")
