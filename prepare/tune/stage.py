"""The stage `tune`: find the fastest correct recipe on this machine, and prepare the model with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from prepare.registry import stage
from prepare.stage import Stage, Task, Work
from prepare.tune.options import TuneOptions, mode_problems

if TYPE_CHECKING:
    from prepare.core.document import Document, Shown
    from prepare.errors import Problem
    from prepare.pipeline import Pipeline


@stage("tune")
class TuneStage(TuneOptions, Stage):
    """A race of recipes; the declared one is one more of them."""

    noun: ClassVar[str] = "the tuning"
    order: ClassVar[int] = 10
    tasks: ClassVar[Mapping[str, Task]] = {
        "tune": Task("find the fastest correct recipe, and prepare with it")
    }
    files: ClassVar[tuple[str, ...]] = ("tune.svg",)

    @classmethod
    def records(cls) -> Mapping[str, Any]:
        from prepare.tune.records import Tuning

        return {"tune.json": Tuning}

    def problems(self, config: Mapping[str, Any]) -> Iterable[Problem]:
        return mode_problems(self.allow, str(config.get("mode")))

    def choose(self, work: Work) -> Pipeline:
        from prepare.tune import tune

        settings, verify = work.settings, work.stages["verify"]
        found = tune(
            work.model,
            work.needed_example(),
            allow=self.allow,
            mode=settings.mode,
            amp=work.amp,
            budget=self.budget,
            declared={**settings.steps, **_chosen_options(work)},
            cache=self.cache,
            metric=verify.located(work.locate),
            max_drop=verify.max_drop,
            max_memory=self.max_memory,
            calls=self.calls,
            seed=settings.seed,
            progress=work.progress,
            build=work.build,
        )
        work.found["tune"] = found
        return found.pipeline

    def run(self, work: Work) -> Mapping[str, Any]:
        return {}

    @classmethod
    def figures(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        tuning = found.get("tune")
        if tuning is None:
            return {}
        ratio = tuning.row(tuning.winner).ratio
        return {
            "winner": tuning.winner,
            "tune_rounds": tuning.rounds,
            "winner_time_ratio": ratio if ratio is not None and math.isfinite(ratio) else None,
        }

    @classmethod
    def document(cls, shown: Shown) -> Document | None:
        from prepare.tune.document import tune_document

        return tune_document(shown)


def _chosen_options(work: Work) -> dict[str, Any]:
    """Return the declared steps whose options were found with the example."""
    return {
        name: step.to_options()
        for name, step in work.pipeline.steps.items()
        if name in work.settings.steps and "for_example" in vars(type(step))
    }
