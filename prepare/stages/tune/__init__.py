"""Find the fastest recipe for a model, input, device and torch version whose results are still correct."""

from typing import TYPE_CHECKING

from prepare.core.utils.lazy_names import lazy_names

if TYPE_CHECKING:
    from prepare.stages.tune.records import CandidateResult, Keep, Tuning
    from prepare.stages.tune.tune_model import keep_in_float32, tune

__all__ = ["CandidateResult", "Keep", "Tuning", "keep_in_float32", "tune"]

__getattr__ = lazy_names(
    __name__,
    records=("CandidateResult", "Keep", "Tuning"),
    tune_model=("keep_in_float32", "tune"),
)
