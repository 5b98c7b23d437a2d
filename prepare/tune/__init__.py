"""Find the fastest recipe for a model, input, device and torch version whose results are still correct."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prepare.tune.records import CandidateResult, Keep, Tuning

if TYPE_CHECKING:
    from prepare.tune.session import keep_in_float32, tune

__all__ = ["CandidateResult", "Keep", "Tuning", "keep_in_float32", "tune"]


def __getattr__(name: str) -> Any:
    if name in ("keep_in_float32", "tune"):  # they import torch
        from prepare.tune import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
