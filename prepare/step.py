"""The step contract: the four kinds of step, what a step wants of a tensor, and how options become a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from prepare.core.utils.options import plain, read_options
from prepare.errors import Problem

if TYPE_CHECKING:
    import torch

    from prepare.core.model.tensors import NamedTensor

_NAMED = (str, type(None))
_CONTIGUOUS = {"contiguous_format": "contiguous"}
PHASES = ("structure", "tensors", "runtime", "inputs")


@dataclasses.dataclass(frozen=True)
class Want:
    """What one tensor should have; a None leaves that side of it alone.

    Each may be given as torch's object or by its name (`torch.float16` or "float16"), and is kept
    by name, so that a plan is plain data.
    """

    device: str | torch.device | None = None
    dtype: str | torch.dtype | None = None
    memory_format: str | torch.memory_format | None = None

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
        """The step with these options.

        Raises:
            ConfigError: with one problem for every option that is unknown, missing or ill-typed.
        """
        return cls(**read_options(cls, options, where=f"steps.{cls.name}"))

    def to_options(self) -> dict[str, Any]:
        """Every field as plain data; `from_options` of it gives an equal step."""
        return {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def settle(self) -> Self:
        """This step with what depends on this machine decided (`device: auto`); recipes hold that."""
        return self

    def bind(self, steps: Iterable[Step]) -> Self:
        """This step in a pipeline of `steps`: options left null may follow the others."""
        return self

    def obstacles(self, model: torch.nn.Module) -> Iterable[Problem]:
        """What makes this step impossible on this machine or model, each with the way out."""
        return ()

    def in_training(self) -> Iterable[Problem]:
        """What makes this step wrong for a model that is to be trained, as its options alone tell."""
        return ()

    def remarks(self, model: torch.nn.Module) -> Iterable[Problem]:
        """What this step leaves undone, and why; `model` is as the structure steps make it."""
        return ()

    def chosen(self, field: str) -> tuple[str, ...]:
        """The patterns in the option `field`; none where this step has no such option."""
        value = getattr(self, field, ())
        return (value,) if isinstance(value, str) else value


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorStep(Step):
    """Says what one tensor should have. An author writes `want`, and nothing else.

    Fields named `include`, `exclude` and `keep` take patterns and are honoured by the pipeline:
    `want` need not look at them.
    """

    phase: ClassVar[str] = "tensors"

    def want(self, tensor: NamedTensor) -> Want | None:
        """What this tensor should have, or None. Pure: looks, and touches nothing."""
        raise NotImplementedError

    def nothing_matched(self, model: torch.nn.Module) -> str:
        """What it likely means that this step found nothing in `model`."""
        return f"no tensor of {type(model).__name__} is one that {self.name} prepares"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleStep(Step):
    """Replaces or changes modules.

    Fields named `include`, `exclude` and `keep` take patterns and are honoured by the pipeline:
    `targets` need not look at them.
    """

    phase: ClassVar[str] = "structure"
    keeps_tensors: ClassVar[bool] = False
    """Whether what is rewritten holds the tensors that it held; then they are verified."""

    def targets(self, model: torch.nn.Module) -> Iterable[str]:
        """The dotted names of the modules that are not yet as wanted. Pure."""
        raise NotImplementedError

    def candidates(self, model: torch.nn.Module) -> Iterable[str]:
        """The names of all modules that this step's patterns may mean, as wanted already or not. Pure."""
        return (name for name, _ in model.named_modules(remove_duplicate=False))

    def rewrite(self, model: torch.nn.Module, name: str) -> Mapping[str, torch.nn.Module]:
        """Makes `name` as wanted: `{dotted name: module}` of what is to stand there.

        Gives the same object back wherever a change of its class or of an attribute is enough, so
        that hooks and references survive. Never writes into a tensor: a plan runs this on a copy
        of the module tree that shares the model's tensors.
        """
        raise NotImplementedError

    def rewrites(
        self, model: torch.nn.Module, names: Iterable[str]
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Every rewrite of `names`; for a step of its own only where one look does for all of them."""
        for name in names:
            yield from self.rewrite(model, name).items()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelStep(Step):
    """Acts on the model as a whole, in place, after its tensors are as wanted."""

    phase: ClassVar[str] = "runtime"

    def targets(self, model: torch.nn.Module) -> Iterable[str]:
        """The dotted names of the modules that are not yet as wanted. Pure."""
        raise NotImplementedError

    def act(self, model: torch.nn.Module) -> None:
        """Makes them so."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputStep(Step):
    """Formats a batch of inputs; may also install itself on the model."""

    phase: ClassVar[str] = "inputs"

    def format(self, batch: Any) -> Any:
        """The batch as the prepared model wants it; the same object where nothing differs."""
        raise NotImplementedError

    def targets(self, model: torch.nn.Module) -> Iterable[str]:
        """Where this step is yet to install itself; nowhere, unless a step says otherwise."""
        return ()

    def act(self, model: torch.nn.Module) -> None:
        """Installs it."""
