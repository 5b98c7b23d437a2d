"""Report on a model in one call: `prepare.report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from prepare.app.job.record import Analyses, Job, Results
from prepare.core.utils import files
from prepare.core.utils.json_records import Readable
from prepare.core.utils.suggest import choose
from prepare.errors import ConfigError
from prepare.pipeline import Pipeline
from prepare.pipeline.pipeline import PLANS

if TYPE_CHECKING:
    from torch import nn

    from prepare.frameworks.outside import Outside
    from prepare.stages.bench.records import Comparison
    from prepare.stages.flow.records import Flow
    from prepare.stages.stage import Level, Mode
    from prepare.stages.verify.records import Verification


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(Readable, Analyses):
    """The audit and the layout flow of a model; with a reference also verification and timing.

    `model` is its class, and `steps` are those that prepared it; None if that is not known.
    """

    model: str = ""
    steps: dict[str, dict[str, Any]] | None = None

    @property
    def flow(self) -> Flow:
        """The layout flow."""
        return self.found["flow"]

    @property
    def verification(self) -> Verification | None:
        """The verification against the reference; None if it was not asked for."""
        return self.found.get("verify")

    @property
    def bench(self) -> Comparison | None:
        """The timing against the reference; None if it was not asked for."""
        return self.found.get("bench")

    def as_run(self) -> Results:
        """Return what the terminal and a page show of it: a run without a command line."""
        job = Job(None, None, [], {}, seen={"given": ""}, model=self.model)
        steps = self.steps or {}
        return Results(job=job, task="", audit=self.audit, found=self.found, steps=steps)

    def summary(self) -> dict[str, Any]:
        """Return the figures as one flat mapping, for `wandb.log` and the like."""
        return self.figures()

    def save(self, path: str | Path) -> None:
        """Write one page if the name ends in `.html`, else a folder with the page and its data."""
        from prepare.app.report.pages import run_page

        path, page = Path(path), run_page(self.as_run())
        if path.suffix == ".html":
            files.write_text(path, page)
            return
        path.mkdir(parents=True, exist_ok=True)
        if self.audit is not None:
            self.audit.save(path / "audit.json")
        for name, record in self.found.items():
            record.save(path / f"{name}.json")
        files.write_text(path / "report.html", page)


def report(
    model: nn.Module,
    batch: Any,
    *,
    reference: nn.Module | None = None,
    pipeline: Pipeline | None = None,
    flow: Literal["predict", "observe"] = "predict",
    verify: Level | None = None,
    bench: Level | None = None,
    mode: Mode = "eval",
) -> Report:
    """Report on `model`: where it stands, where it loses the layout, and against `reference` what changed.

    Args:
        model: prepared or not; it is not changed. Of one that `prepare` has prepared, the audit says what
            that changed.
        batch: a tensor, a tuple of positional or a mapping of named arguments, or an Example.
        reference: the unprepared model, e.g. `copy.deepcopy(model)` before it was prepared.
        pipeline: the pipeline that prepared the model; it formats the batch.
        flow: predict the layout flow without computing, or observe a forward.
        verify: `short`: compare outputs and gradients with `reference`.
        bench: `short`: time `model` against `reference`.
        mode: the use of the model.

    Raises:
        ConfigError: `verify` or `bench` does not name a level, or needs a reference and none is given.
    """
    from prepare.audit import audit
    from prepare.stages import flow as flows
    from prepare.stages.stage import Level as Levels

    levels = get_args(Levels)
    for key, word in (("verify", verify), ("bench", bench)):
        if word and word not in levels:
            raise ConfigError(key, f"{word!r} is not a level", choose(str(word), levels))
    verify, bench = (None if word == "none" else word for word in (verify, bench))

    if (verify or bench) and reference is None:
        remedy = "give copy.deepcopy(model), taken before it was prepared"
        raise ConfigError("reference", "is needed for verify and bench", remedy)
    follow = flows.observe if flow == "observe" else flows.predict
    formatted = batch if pipeline is None else pipeline.format(batch)
    found: dict[str, Any] = {"flow": follow(model, formatted)}
    if verify and reference is not None:
        from prepare.stages.verify import verify as compare

        options: Any = {"pipeline": pipeline, "mode": mode}
        found["verify"] = compare(reference, model, batch, **options)
    if bench and reference is not None:
        from prepare.core.forward.call import call_of
        from prepare.stages.bench.time_prepared import time_models

        # The other steps would change the reference.
        own = pipeline.steps.values() if pipeline else ()
        formats = Pipeline(step for step in own if step.phase == "inputs")
        call = call_of(batch)
        found["bench"] = time_models(reference, model, formats, call, mode=mode)
    plan = PLANS.get(model)
    steps = plan.steps if plan is not None else pipeline.to_config() if pipeline else None
    audited = audit(model, plan=plan)
    return Report(audit=audited, found=found, model=type(model).__name__, steps=steps)


def write_pages(session: Outside, folder: str) -> None:
    """Write a folder with a page for each network that a program has called, in the order of the calls."""
    for index, found in enumerate(session.found):
        records = {"flow": found.flow} if found.flow is not None else {}
        steps = session.pipeline.to_config()
        report = Report(audit=found.audit, found=records, model=found.name, steps=steps)
        report.save(Path(folder) / f"{index}-{found.name}")
