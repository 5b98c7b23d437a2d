"""Find out by probes what torch computes wrongly or slowly on this very machine.

Examples:
    >>> from prepare.doctor import examine
    >>> diagnosis = examine("cpu", probes=["softmax_layout"])
    >>> [(found.name, found.verdict) for found in diagnosis.findings]
    [('softmax_layout', 'slow here')]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prepare.doctor.records import Diagnosis, Finding

if TYPE_CHECKING:
    from prepare.doctor.examination import examine

__all__ = ["Diagnosis", "Finding", "examine"]


def __getattr__(name: str) -> Any:
    if name == "examine":  # loads torch
        from prepare.doctor.examination import examine

        return examine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
