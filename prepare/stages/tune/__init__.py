"""Find the fastest recipe for a model, input, device and torch version whose results are still correct."""

from typing import TYPE_CHECKING

from prepare.core.utils.packages import lazy_names

if TYPE_CHECKING:
    from prepare.stages.tune.records import CandidateResult, Tuning
    from prepare.stages.tune.tune_model import tune

__all__ = ["CandidateResult", "Tuning", "tune"]

__getattr__ = lazy_names(__name__, records=("CandidateResult", "Tuning"), tune_model=("tune",))
