"""Declare how a model is prepared, plan it and apply it: the import for training code."""

from typing import TYPE_CHECKING

from prepare.core.utils.packages import lazy_names

if TYPE_CHECKING:
    from prepare.pipeline.match_reference import like
    from prepare.pipeline.optimizer_state import relayout
    from prepare.pipeline.pipeline import Pipeline
    from prepare.pipeline.plan import Plan

__all__ = ["Pipeline", "Plan", "like", "relayout"]

__getattr__ = lazy_names(
    __name__,
    match_reference=("like",),
    optimizer_state=("relayout",),
    pipeline=("Pipeline",),
    plan=("Plan",),
)
