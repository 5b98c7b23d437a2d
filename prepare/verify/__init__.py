"""Check that a prepared model still computes the outputs and gradients of the unprepared one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prepare.verify.records import Check, Lost, Verification

if TYPE_CHECKING:
    from prepare.verify.check_model import verify

__all__ = ["Check", "Lost", "Verification", "verify"]


def __getattr__(name: str) -> Any:
    if name == "verify":  # loads torch
        from prepare.verify.check_model import verify

        return verify
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
