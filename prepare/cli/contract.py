"""Turn the command `contract` into the overrides of task=contract."""

from __future__ import annotations

from dataclasses import fields

from prepare.contract.options import ContractOptions


def contract_overrides(argv: list[str]) -> list[str]:
    """Return the words after `contract` as overrides: `file=FILE` is `contract.file=FILE`."""
    names = {field.name for field in fields(ContractOptions)}
    words = (f"contract.{word}" if word.partition("=")[0] in names else word for word in argv)
    return ["task=contract", *words]
