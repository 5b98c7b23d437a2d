"""Find modules whose forward may depend on their mode, from the code of their classes."""

from __future__ import annotations

import dis
from functools import cache
from types import CodeType, FunctionType
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def may_read_mode(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Return False if no code reads the mode of the module `name`: neither its own nor a caller's."""
    module = modules[name]
    if isinstance(module, torch.jit.ScriptModule) or _reads(type(module)):
        return True
    while name:
        name = name.rpartition(".")[0]
        caller = modules.get(name)
        if caller is None or "others" in _reads(type(caller)):
            return True
    return False


def _reads(cls: type) -> frozenset[str]:
    """Return whose mode the methods of a class read: `own`, `others`, both or nothing."""
    return _reads_in(tuple(base for base in cls.__mro__ if base not in (nn.Module, object)))


@cache
def _reads_in(classes: tuple[type, ...]) -> frozenset[str]:
    read: set[str] = set()
    for base in classes:
        for member in vars(base).values():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(function, FunctionType):
                read.update(_reads_of(function.__code__))
    return frozenset(read)


def _reads_of(code: CodeType) -> Iterator[str]:
    own = code.co_varnames[:1]
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.argval == "training" and instruction.opname.startswith("LOAD"):
            loaded = before.argval if before is not None else None
            is_own = loaded in own or (isinstance(loaded, tuple) and loaded[-1:] == own)
            yield "own" if is_own else "others"
        before = instruction
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _reads_of(constant)
