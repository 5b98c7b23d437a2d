"""The step contract: the four kinds of step, their options, and the `Want` for one tensor."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Self

from prepare.core.utils.options import ForRecipes, plain, read_options
from prepare.errors import Problem

if TYPE_CHECKING:
    import torch

    from prepare.core.model.tensors import NamedTensor

__all__ = [
    "PHASES",
    "ForRecipes",
    "InputStep",
    "ModelStep",
    "ModuleStep",
    "Step",
    "TensorStep",
    "Want",
]
_NAMED = (str, type(None))
_CONTIGUOUS = {"contiguous_format": "contiguous"}
PHASES = ("structure", "tensors", "runtime", "inputs")
# What steps found in a model, for as long as one plan or `apply` lasts.
MEMO: ContextVar[dict[Any, Any]] = ContextVar("MEMO")


@contextmanager
def remembering() -> Iterator[None]:
    """Keep MEMO for the block, or use the one that is kept."""
    token = MEMO.set(MEMO.get({}))
    try:
        yield
    finally:
        MEMO.reset(token)


@dataclasses.dataclass(frozen=True)
class Want:
    """The device, dtype and memory format that one tensor should have; None leaves a property unchanged.

    With `clamp`, finite values beyond the range of `dtype` become its largest finite number; without, they
    are refused. Each property may be torch's object or its name (`torch.float16` or "float16"); the name is
    stored, so that a plan is plain data.
    """

    device: str | torch.device | None = None
    dtype: str | torch.dtype | None = None
    memory_format: str | torch.memory_format | None = None
    clamp: bool = False

    def __post_init__(self) -> None:
        for side in ("device", "dtype", "memory_format"):
            value = getattr(self, side)
            if type(value) not in _NAMED or value == "contiguous_format":
                name = plain(value)
                object.__setattr__(self, side, _CONTIGUOUS.get(name, name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One preparation. A step is a frozen, keyword-only dataclass: its fields are its options."""

    name: ClassVar[str] = ""
    phase: ClassVar[str] = ""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Return the step with these options.

        Raises:
            ConfigError: with one problem for every option that is unknown, missing or ill-typed.
        """
        return cls(**read_options(cls, options, where=f"steps.{cls.name}"))

    def to_options(self) -> dict[str, Any]:
        """Return every field as plain data, for which `from_options` returns an equal step."""
        return {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def bind(self, steps: Iterable[Step]) -> Self:
        """Return this step for a pipeline of `steps`: options that are null may depend on the other steps."""
        return self

    def obstacles(self, model: torch.nn.Module) -> Iterable[Problem]:
        """Return the problems that make this step impossible on this machine or model, with remedies."""
        return ()

    def in_training(self) -> Iterable[Problem]:
        """Return the problems of this step with a model in training, judged by its options alone."""
        return ()

    def remarks(self, model: torch.nn.Module) -> Iterable[Problem]:
        """Return what this step leaves undone, and why; `model` is the result of the structure steps."""
        return ()

    @classmethod
    def undo(cls, model: torch.nn.Module) -> None:
        """Take every step of this kind back from `model`, in place."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorStep(Step):
    """A step that decides what each tensor should have. An author writes only `want`.

    The pipeline applies the patterns in fields named `include`, `exclude` and `keep`: `want` can
    ignore them.
    """

    phase: ClassVar[str] = "tensors"

    def want(self, tensor: NamedTensor) -> Want | None:
        """Return what this tensor should have, or None. Must be pure: it changes nothing."""
        raise NotImplementedError

    def want_of_kept(self, tensor: NamedTensor) -> Want | None:
        """Return what a tensor that `keep` names should have; by default it stays as it is."""
        return None

    def formats(self, model: torch.nn.Module | None = None) -> Mapping[int, str]:
        """Return the memory format that it wants for weights of convolutions, by their rank, 4 and 5.

        That is what `want` returns for the weight of a convolution without a name, or else for the first one
        of `model` for which it wants anything.
        """
        from prepare.core.model.tensors import convolution_weights, sample_weights

        places = itertools.chain(
            sample_weights(), () if model is None else convolution_weights(model)
        )
        found: dict[int, Any] = {}
        for place in places:
            with contextlib.suppress(Exception):  # a plan asks again, and says which step raised
                if (rank := place.tensor.dim()) not in found and (want := self.want(place)):
                    found[rank] = want.memory_format
            if len(found) == 2:  # before the next place, for which the model is searched
                break
        return {rank: name for rank, name in found.items() if name is not None}

    def nothing_matched(self, model: torch.nn.Module) -> str:
        """Return the likely reason why this step wants nothing in `model`."""
        return f"{self.name} prepares no tensor of {type(model).__name__}"

    def targets(self, model: torch.nn.Module) -> Iterable[str]:
        """Return the names of modules on which this step has yet to register hooks; by default none."""
        return ()

    def act(self, model: torch.nn.Module) -> None:
        """Register the hooks, after the tensors have been converted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleStep(Step):
    """A step that replaces or changes modules.

    The pipeline applies the patterns in fields named `include`, `exclude` and `keep`: `targets` can
    ignore them.
    """

    phase: ClassVar[str] = "structure"
    keeps_tensors: ClassVar[bool] = False
    """Return whether rewritten modules keep their tensors; then these are verified."""

    def targets(self, model: torch.nn.Module) -> Iterable[str]:
        """Return the dotted names of the modules that this step has yet to change. Must be pure."""
        raise NotImplementedError

    def candidates(self, model: torch.nn.Module) -> Iterable[str]:
        """Return the names of all modules that patterns may match, changed already or not. Must be pure."""
        return (name for name, _ in model.named_modules(remove_duplicate=False))

    def rewrite(self, model: torch.nn.Module, name: str) -> Mapping[str, torch.nn.Module]:
        """Rewrite the module `name`; return `{dotted name: module}` with the modules to put there.

        Return the same object wherever a change of its class or of an attribute is enough, so that
        hooks and references survive. Never write into a tensor: a plan runs this on a copy of the
        module tree that shares the model's tensors.
        """
        raise NotImplementedError

    def rewrites(
        self, model: torch.nn.Module, names: Iterable[str]
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield every rewrite of `names`; override this only to analyse the model once for all of them."""
        for name in names:
            yield from self.rewrite(model, name).items()

    def without_example(self) -> str:
        """Return an option that `for_example` replaces, and what it means otherwise; empty for none."""
        return ""

    def for_example(
        self, model: torch.nn.Module, example: Any, *, backward: bool, amp: str
    ) -> tuple[Self, list[str]]:
        """Return this step with the options that a run finds with its example, and notes on them.

        `model` is a copy that the other steps have prepared, `example` is formatted for it. Only a
        step with a text `without_example()` is asked, in a process group on rank 0, for all ranks.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelStep(Step):
    """A step that changes the model as a whole, in place, after its tensors have been converted."""

    phase: ClassVar[str] = "runtime"

    def targets(self, model: torch.nn.Module) -> Iterable[str]:
        """Return the dotted names of the modules that this step has yet to change. Must be pure."""
        raise NotImplementedError

    def act(self, model: torch.nn.Module) -> None:
        """Change the targets, in place."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputStep(Step):
    """A step that formats a batch of inputs; it may also register itself on the model."""

    phase: ClassVar[str] = "inputs"

    def format(self, batch: Any) -> Any:
        """Return the batch formatted for the prepared model; the same object if nothing changes."""
        raise NotImplementedError

    def targets(self, model: torch.nn.Module) -> Iterable[str]:
        """Return the names of modules on which this step has yet to register itself; by default none."""
        return ()

    def act(self, model: torch.nn.Module) -> None:
        """Register the step on the model."""
