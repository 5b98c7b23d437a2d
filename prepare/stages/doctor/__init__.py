"""Find out by probes what torch computes wrongly or slowly on this very machine.

Examples:
    >>> from prepare.stages.doctor import examine
    >>> diagnosis = examine("cpu", probes=["softmax_layout"])
    >>> [(finding.name, finding.verdict) for finding in diagnosis.findings]
    [('softmax_layout', 'lost here')]
"""

from typing import TYPE_CHECKING

from prepare.core.utils.lazy_names import lazy_names

if TYPE_CHECKING:
    from prepare.stages.doctor.examination import examine
    from prepare.stages.doctor.records import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "examine"]

__getattr__ = lazy_names(
    __name__,
    records=("Diagnosis", "Finding"),
    examination=("examine",),
)
