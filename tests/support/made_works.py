"""The work of a stage, made up: a small model, and what a test says of it."""

from torch import nn

from prepare.app.job.settings import Settings
from prepare.pipeline import Pipeline
from prepare.stages.stage import StageContext, ordered_stages


def settings(**given):
    """Settings with the stages in `given`, and the others as they are by default."""
    stages = {cls.name: cls.from_options({}, {}) for cls in ordered_stages()}
    model = {"_target_": "torch.nn.Identity"}
    return Settings(model=model, steps={}, input={}, choices={}, stages=stages | given)


def work(model=None, pipeline=None, **given):
    """Work with `model`, that of the settings by default; `given` are other fields."""
    model = nn.Conv2d(3, 4, 3) if model is None else model
    pipeline = pipeline or Pipeline([])
    fields = {"settings": settings(), "example": None, "plan": None, "build": lambda: model} | given
    return StageContext(model=model, pipeline=pipeline, **fields)
