"""Declare how a model is prepared, plan it and apply it: the import for training code."""

from prepare.pipeline.pipeline import Pipeline, like, relayout

__all__ = ["Pipeline", "like", "relayout"]
