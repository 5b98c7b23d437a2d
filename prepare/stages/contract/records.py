"""A layout contract and the result of a check as plain data, written and read without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from prepare.core.utils import files, plain_yaml
from prepare.core.utils.json_records import JsonRecord, Kind
from prepare.errors import ContractError, RecipeError

if TYPE_CHECKING:
    from prepare.core.forward.workload import Size

# Of a weight: its shape, strides, layout, dtype and device.
_WORDS = 5
BROKEN, BETTER, TOO_NOISY, NOTE = KINDS = ("broken", "better", "too noisy", "note")


class _ContractDumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes in quotes what `plain_yaml` would not read as a text."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = None if plain_yaml.is_plain_text(text) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_ContractDumper.add_representer(str, _represent_text)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRatio:
    """The time of the prepared model relative to the unprepared one, its interval, and the machine."""

    ratio: float
    low: float
    high: float
    machine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract(JsonRecord):
    """The properties of a prepared model that a contract checks, in a mode and under autocast to `amp`.

    `steps` is its recipe; None if the model was taken as it is. `modules` maps each name to its class,
    `weights` each tensor to its shape, strides, layout, dtype and type of device in words, `layouts` each
    convolution to the layout of its outputs, `flow` each module to its breaks and casts with their numbers,
    `optimizer` each tensor of an optimizer's state to its order of elements. `verified` is the status of the
    verification, empty without one, and `errors` maps what it compared to the largest error as a part of the
    tolerance. `seen` holds versions. `untimed` says why a time that was measured is not recorded. `sources`
    are the lines of code of `flow`, shown and not saved. Of a workload `sizes` maps the name of each size to
    what depends on it: layouts, flow, verification, time.
    """

    KIND: ClassVar[Kind] = Kind(
        "prepare.contract", 1, "a contract", "a contract.yaml", ContractError
    )
    LIMIT: ClassVar[int] = plain_yaml.MAX_RECORDED_BYTES
    model: str
    mode: str
    steps: dict[str, Any] | None
    threads: int
    seen: dict[str, str]
    modules: dict[str, str]
    weights: dict[str, str]
    layouts: dict[str, str]
    flow: dict[str, dict[str, int]]
    verified: str
    errors: dict[str, float]
    amp: str = field(default="none", metadata={"late": True})
    optimizer: dict[str, str] = field(default_factory=dict, metadata={"late": True})
    time: TimeRatio | None = field(default=None, metadata={"late": True})
    untimed: str = field(default="", metadata={"late": True})
    sources: dict[str, str] = field(default_factory=dict, compare=False, metadata={"late": True})
    sizes: dict[str, Contract] = field(default_factory=dict, metadata={"late": True})

    @classmethod
    def merged(cls, found: Sequence[tuple[Size, Contract]]) -> Contract:
        """Return one contract for those of all sizes."""
        empty: dict[str, Any] = {"steps": None, "seen": {}, "modules": {}, "weights": {}}
        sizes = {size.name: replace(contract, **empty, optimizer={}) for size, contract in found}
        own: dict[str, Any] = {"layouts": {}, "flow": {}, "verified": "", "errors": {}}
        return replace(found[0][1], **own, time=None, untimed="", sizes=sizes)

    @property
    def is_timed(self) -> bool:
        """True if it holds a time, at any size."""
        return any(each.time for each in (self, *self.sizes.values()))

    @property
    def structure(self) -> dict[str, str]:
        """The class of each module and the shape of each tensor, by name."""
        shapes = {name: f"shape {text.split()[0]}" for name, text in self.weights.items()}
        return {**self.modules, **shapes}

    def content(self) -> dict[str, Any]:
        """Return what the file holds after its format and version: all but `sources`."""
        written = JsonRecord.content(self)
        for each in (written, *written.get("sizes", {}).values()):
            del each["sources"]
        return written

    def save(self, path: str | os.PathLike) -> None:
        """Write `contract.yaml`; equal contracts give equal bytes. Raises FileError."""
        plain = json.loads(json.dumps(self.content()))
        text = yaml.dump(
            self.KIND.head | plain,
            Dumper=_ContractDumper,
            sort_keys=False,
            allow_unicode=True,
            width=1000,
        )
        files.write_text(path, text)

    @staticmethod
    def parse(text: str) -> Any:
        """Return the content of the YAML of a contract; raise ValueError if it is none."""
        try:
            return plain_yaml.read(text, "it", remedy="", recorded=True).value
        except RecipeError as error:
            raise ValueError(str(error)) from error

    def check(self) -> None:
        """Raise ValueError for a weight that is not described by as many words as others."""
        for name, text in self.weights.items():
            if len(text.split()) != _WORDS:
                raise ValueError(f"{text!r} does not describe the weight {name!r}")


@dataclass(frozen=True, slots=True)
class ContractChange:
    """One difference between a contract and the model of today.

    `kind` is one of KINDS, `what` names the part of the contract, `where` the first place, `text` says what
    changed there, `source` is the line of code, and `count` the number of places with the same change.
    """

    kind: str
    what: str
    where: str
    text: str
    source: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractCheck(JsonRecord):
    """The result of a check: all changes, the worst first.

    `today` is the contract as it would be recorded today; a saved check has none. `file` is the contract.
    """

    KIND: ClassVar[Kind] = Kind(
        "prepare.contract_check", 1, "the check of a contract", "a contract.json", ContractError
    )
    changes: tuple[ContractChange, ...]
    today: Contract | None = field(default=None, metadata={"late": True})
    file: str = field(default="", metadata={"late": True})

    def content(self) -> dict[str, Any]:
        """Return the status and the changes; `today` is not saved."""
        changes = [asdict(change) for change in self.changes]
        return {"status": self.status, "file": self.file, "changes": changes}

    def of(self, kind: str) -> list[ContractChange]:
        """Return the changes of this kind."""
        return [change for change in self.changes if change.kind == kind]

    @property
    def status(self) -> str:
        """`broken`, `better`, or `kept`: the worst kind that matters."""
        return BROKEN if self.of(BROKEN) else BETTER if self.of(BETTER) else "kept"
