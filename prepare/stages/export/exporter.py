"""The contract of an exporter, and the registry of exporters: the formats that an artefact can have."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

from prepare.core.utils.options import plain, read_options
from prepare.errors import ConfigError, Problem
from prepare.registry import Registry, modules_of

if TYPE_CHECKING:
    from torch import nn

    from prepare.core.forward.call import Call

ENTRY_POINTS = "prepare.exporters"
# Called with the positional and the keyword arguments of a model.
Loaded = Callable[[tuple, dict[str, Any]], Any]
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_Class = TypeVar("_Class", bound="type[Exporter]")


def is_plain_name(file: str) -> bool:
    """Return whether this is the name of a file, without a folder."""
    return _NAME.fullmatch(file) is not None


def check_file(file: str) -> None:
    """Raise ValueError unless `file` is a plain name, without a folder."""
    if not is_plain_name(file):
        raise ValueError(f"{file!r} is not a plain name", "give letters, digits, _, - and dots")


def check_dynamic(dimensions: tuple[int, ...]) -> None:
    """Raise ValueError for dimensions that no tensor has."""
    for dimension in dimensions:
        if not 0 <= dimension < 8:
            raise ValueError(f"{dimension} is not a dimension", "give 0 for the batch, as in [0]")


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """One format of artefacts; its fields are its options. An author writes `lower`, `write` and `load`.

    `suffix` ends the name of the artefact, `beside` those of files that belong to it. `keeps` names the steps
    that the artefact can hold; others are taken out of the model before the capture.
    `contiguous_weights`: the memory format of the weights is taken out as well. `only_tensors`: numbers among
    the outputs become tensors.
    `code` may give a user the lines that call it.
    `environment` are the variables under which the artefact has to run. `layout_remedy` is the advice where
    a layout of inputs is answered wrongly. `extra` is the extra of this package that brings `packages`.
    """

    name: ClassVar[str] = ""
    suffix: ClassVar[str] = ""
    beside: ClassVar[tuple[str, ...]] = ()
    packages: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = "export"
    keeps: ClassVar[tuple[str, ...]] = ()
    contiguous_weights: ClassVar[bool] = False
    only_tensors: ClassVar[bool] = False
    layout_remedy: ClassVar[str] = ""

    file: Annotated[str, "a plain name", check_file] = "model"
    """The name of the artefact, without its suffix."""
    dynamic: Annotated[tuple[int, ...], "a list of dimensions", check_dynamic] = ()
    """The dimensions of the inputs that may change, as in [0] for the batch."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Return the exporter with these options.

        Raises:
            ConfigError: with one problem for every option that is unknown or ill-typed.
        """
        return cls(**read_options(cls, options, where="export"))

    def to_options(self) -> dict[str, Any]:
        """Return every field as plain data, for which `from_options` returns an equal exporter."""
        return {each.name: plain(getattr(self, each.name)) for each in fields(self)}

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the environment under which the artefact has to run."""
        return {}

    @property
    def requires_contiguous(self) -> bool:
        """True if the contract requires contiguous inputs: wrong answers to others are not a failure."""
        return False

    def missing(self) -> Problem | None:
        """Return the problem if something that this exporter needs is not installed."""
        absent = [package for package in self.packages if find_spec(package) is None]
        if not absent:
            return None
        remedy = f"install the extra: pip install 'torch-prepare[{self.extra}]'"
        return Problem("export", f"{self.name} needs {', '.join(absent)}", remedy)

    def capture(self, model: nn.Module, call: Call) -> Any:
        """Return the program of `model` as torch.export sees it."""
        from prepare.stages.export.captured import capture

        return capture(model, call, self.dynamic)

    def run_captured(self, program: Any) -> Callable[..., Any]:
        """Return a captured program as a function that is called like the model."""
        return program.module()

    def lower(self, program: Any, metadata: Mapping[str, str]) -> Any:
        """Convert the captured program to this format, in memory."""
        raise NotImplementedError

    def write(self, lowered: Any, path: Path, metadata: Mapping[str, str]) -> None:
        """Write the artefact to `path`, with the metadata in it where the format has a place for it."""
        raise NotImplementedError

    def load(self, path: Path) -> Loaded:
        """Load an artefact, in a process that knows nothing of its model."""
        raise NotImplementedError

    @classmethod
    def code(cls, artefact: str, inputs: str) -> str:
        """Return lines that call an artefact, given its path and the list of its inputs as Python code."""
        return ""

    def metadata(self, path: Path) -> dict[str, str]:
        """Read the metadata in an artefact; empty if the format has no place for it."""
        return {}


def register(name: str) -> Callable[[_Class], _Class]:
    """Register an exporter under `name`; make the class a frozen, keyword-only dataclass if needed."""

    def decorate(cls: _Class) -> _Class:
        EXPORTERS.register(name, cls)
        return cls

    return decorate


EXPORTERS: Registry[Exporter] = Registry(
    (Exporter,),
    group=ENTRY_POINTS,
    builtin=lambda: modules_of("prepare.stages.export.exporters"),
    noun="exporter",
    place="export",
    unknown=ConfigError,
)
