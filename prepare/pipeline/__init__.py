"""Declare how a model is prepared, plan it and apply it: the import for training code."""

from prepare.pipeline.match_reference import like
from prepare.pipeline.optimizer_state import relayout
from prepare.pipeline.pipeline import Pipeline
from prepare.plan import Plan
from prepare.step import InputStep, ModelStep, ModuleStep, Step, TensorStep

__all__ = [
    "InputStep",
    "ModelStep",
    "ModuleStep",
    "Pipeline",
    "Plan",
    "Step",
    "TensorStep",
    "like",
    "relayout",
]
