"""Records of an export as plain data, saved to and loaded from `export.json` without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from prepare.core.utils.json_records import JsonRecord, Kind, Readable
from prepare.core.utils.numbers import part_of_tolerance
from prepare.errors import ExportError
from prepare.stages.bench.records import Comparison, check_comparison

# The keys of the metadata in an artefact.
METADATA = ("recipe.yaml", "versions.json")
STATUSES = ("pass", "fail", "refused", "cannot tell")
ARTEFACT = "artefact"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputContract:
    """One tensor that the artefact takes; a size of the shape is None if it may change."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtefactContract:
    """The promise of an artefact: its inputs, the layouts that it takes, and where it has to run.

    `layouts` maps each layout that was tried to an answer. `formats_inputs`: the artefact converts inputs
    to the dtype and memory format of the model. `environment` are variables that must be set.
    `requires_contiguous`: only contiguous inputs may be given.
    """

    inputs: tuple[InputContract, ...] = ()
    layouts: dict[str, str] = field(default_factory=dict)
    formats_inputs: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    requires_contiguous: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportStage:
    """One stage: its status (`pass`, `fail`, `refused`, `cannot tell`), and a note on it."""

    name: str
    status: str
    seconds: float
    note: str = ""
    error: float | None = None
    allowed: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCheck:
    """The artefact's answer to one input: its layout and batch, and the error of the outputs.

    `answer` is `right`, `wrong`, `refused`, `crashed` or `cannot tell`. `status` is `pass`, `fail` or
    `cannot tell`: a layout that is refused passes, except that of the contract. A wrong answer passes
    only if the contract requires contiguous inputs, and this one is not. `size` is the name of a size of a
    workload.
    """

    layout: str
    batch: int | None
    answer: str
    status: str
    error: float | None = None
    allowed: float | None = None
    note: str = ""
    size: str = field(default="", metadata={"late": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenOut:
    """A step that does not go along: the modules that it had changed, and the reason."""

    step: str
    modules: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Export(JsonRecord, Readable):
    """The result of an export: the artefact, whether it is right, and its contract.

    `status` is `pass`; `fail` if the artefact answers wrongly; `refused` if a stage could not be done; or
    `cannot tell`. `reason` says why. `artefact` is the name of the file in its folder, and `files` are all
    of its files with their sha256. `bytes` is their size. `time` compares a call with the models.
    """

    KIND: ClassVar[Kind] = Kind("prepare.export", 1, "an export", "an export.json", ExportError)
    status: str
    reason: str
    exporter: str
    options: dict[str, Any]
    artefact: str
    sha256: str
    bytes: int
    files: dict[str, str]
    recipe: str
    recipe_inside: bool
    versions: dict[str, str]
    contract: ArtefactContract
    taken_out: tuple[TakenOut, ...]
    stages: tuple[ExportStage, ...]
    checks: tuple[LayoutCheck, ...]
    time: Comparison | None
    seconds: float
    environment: dict[str, Any]

    @property
    def worst(self) -> LayoutCheck | None:
        """The check with the largest error for its tolerance, of inputs that the contract allows.

        It is None if nothing was compared.
        """
        allowed = [c for c in self.checks if (c.answer, c.status) != ("wrong", "pass")]
        parts = [(part_of_tolerance(check.error, check.allowed), check) for check in allowed]
        known = [(part, check) for part, check in parts if part is not None]
        return max(known, key=lambda pair: pair[0], default=(None, None))[1]

    def check(self) -> None:
        """Raise ValueError for a status that no export has, or a time that contradicts itself."""
        if self.status not in STATUSES:
            raise ValueError(f"{self.status!r} is not a status")
        if self.time is not None:
            check_comparison(self.time)
