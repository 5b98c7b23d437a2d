"""The stage `tune`: find the fastest correct recipe on this machine, and prepare the model with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from prepare.core.utils.text import finite
from prepare.errors import Problem
from prepare.stages.stage import Stage, StageContext, Task, key, stage

if TYPE_CHECKING:
    from prepare.core.document import Document, ReportContext
    from prepare.pipeline import Pipeline

Allowed = Literal["bfloat16", "half", "compile"]


def _check_budget(budget: float) -> None:
    if not 0 < budget < math.inf:
        raise ValueError(f"{budget} is not a time", "give seconds, as in 60")


@stage("tune")
class TuneStage(Stage):
    """A comparison of recipes; the declared one is one more of them."""

    noun: ClassVar[str] = "the tuning"
    order: ClassVar[int] = 10
    tasks: ClassVar[Mapping[str, Task]] = {
        # No bench: the tuning has timed the recipe, and a second look at the same question may differ.
        "tune": Task(
            "find the fastest correct recipe, and prepare with it",
            stages=("tune", "flow", "verify"),
        )
    }

    allow: tuple[Allowed, ...] = key(
        (), "what to try beyond float32 without a compiler", "[bfloat16]"
    )
    budget: Annotated[float, "seconds, as in 60", _check_budget] = key(
        60.0, "seconds for preparing, timing and verifying recipes"
    )

    @classmethod
    def records(cls) -> Mapping[str, Any]:
        from prepare.stages.tune.records import Tuning

        return {"tune.json": Tuning}

    def problems(self, config: Mapping[str, Any]) -> Iterable[Problem]:
        if config.get("mode") == "train" and "half" in self.allow:
            wrong = "parameters in float16 cannot be trained, and this is mode=train"
            remedy = "allow bfloat16, or tune under autocast with amp=float16"
            yield Problem("tune.allow", wrong, remedy)

    def choose(self, work: StageContext) -> Pipeline:
        from prepare.stages.tune import tune

        settings, example = work.settings, work.needed_example()
        how: Any = {"mode": settings.mode, "amp": work.amp, "seed": settings.seed}
        how |= {"allow": self.allow, "budget": self.budget, "progress": work.progress}
        declared = {**settings.steps, **_chosen_options(work)}
        found = tune(work.model, example, declared=declared, build=work.build, **how)
        work.found["tune"] = found
        return found.pipeline

    def run(self, work: StageContext) -> Mapping[str, Any]:
        return {}

    @classmethod
    def figures(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        if (tuning := found.get("tune")) is None:
            return {}
        ratio = finite(tuning.row(tuning.winner).ratio)
        return {"winner": tuning.winner, "winner_time_ratio": ratio}

    @classmethod
    def document(cls, shown: ReportContext) -> Document | None:
        from prepare.stages.tune.document import tune_document

        return tune_document(shown)


def _chosen_options(work: StageContext) -> dict[str, Any]:
    """Return the declared steps whose options were found with the example."""
    return {
        name: step.to_options()
        for name, step in work.pipeline.steps.items()
        if name in work.settings.steps and "for_example" in vars(type(step))
    }
