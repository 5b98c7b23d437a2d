"""The group `contract` of the command line, checked without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepare.core.utils.files import printable_path
from prepare.core.utils.options import read_options
from prepare.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ContractOptions:
    """The options of task=contract."""

    file: str = "contract.yaml"
    """The contract to check, or to write with `update`."""
    update: bool = False
    """Write the contract of today's model instead of checking one."""
    time: bool = False
    """Also record the time relative to the unprepared model; a check measures what the contract holds."""


def read_contract(options: Mapping[str, Any], *, task: str) -> ContractOptions:
    """Check the options and return them; with task=contract the file to check must exist.

    Raises:
        ConfigError: one problem for each mistake.
    """
    read = ContractOptions(**read_options(ContractOptions, options, where="contract"))
    if task == "contract" and not read.update and not Path(read.file).is_file():
        wrong = f"{printable_path(read.file)} does not exist"
        raise ConfigError("contract.file", wrong, "write it with contract.update=true")
    return read
