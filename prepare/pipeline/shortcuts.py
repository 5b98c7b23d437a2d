"""Prepare a model, and report on one, in one call: `prepare.prepare` and `prepare.report`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from prepare.app.job.results import Analyses
from prepare.core.forward.workload import Workload, head_of
from prepare.core.model.known_issues import REPAIR_STEP
from prepare.core.utils import files
from prepare.core.utils.json_records import Readable
from prepare.core.utils.options import plain
from prepare.core.utils.suggest import choose
from prepare.errors import ConfigError
from prepare.pipeline import Pipeline

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

    from prepare.pipeline.known_issue_checks import KnownIssues
    from prepare.pipeline.plan import Plan
    from prepare.stages.bench.records import Bench
    from prepare.stages.flow.records import Flow
    from prepare.stages.verify.records import Verification

_Model = TypeVar("_Model", bound=nn.Module)
Level = Literal["short", "full"]
_2D = {"conv2d_memory_format": "channels_last"}
_3D = {"conv3d_memory_format": "channels_last_3d"}
# The steps and their memory formats for each word.
_FORMATS = {
    "channels_last": _2D,
    "channels_last_3d": _3D,
    "by_rank": _2D | _3D,
    "contiguous": dict.fromkeys(_2D | _3D, "contiguous"),
}
_DTYPES = {"float32": None, "float16": "float16", "half": "float16", "bfloat16": "bfloat16"}


# What `prepare` was to change in each model, for `report`; an entry goes with its model.
_PLANS: WeakKeyDictionary[nn.Module, Plan] = WeakKeyDictionary()


def prepare(
    model: _Model,
    memory_format: torch.memory_format | str | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    optimizer: Optimizer | None = None,
    repair_layout: bool | None = None,
    format_inputs: bool = True,
    known_issues: KnownIssues = "error",
) -> _Model:
    """Prepare `model` in place and return it: the pipeline of these options, built and applied.

    Args:
        model: in training or evaluation mode; the same object with the same Parameters is returned.
        memory_format: of the weights of convolutions: `channels_last` (2-d), `channels_last_3d`, `by_rank`
            (both) or `contiguous`; also torch's objects.
        dtype: `float16` or `bfloat16`; batch and instance norms are kept. `float32` changes nothing.
        device: `cpu`, `cuda`, `mps` or `auto`; also torch's object.
        optimizer: its state is moved along with the parameters.
        repair_layout: replace kernels that lose the layout, or compute wrong gradients in it; by default
            if a channels-last format is asked for.
        format_inputs: install a hook that formats the inputs of the model.
        known_issues: as in `Pipeline.apply`.

    `Pipeline.from_config` has more options, and `Pipeline.save` writes a recipe.

    Raises:
        ConfigError: an option is wrong, or has no effect on this model.
        RefusedError: the model cannot be prepared in its present state.
    """
    steps: dict[str, Any] = {}
    if device is not None:
        steps["device"] = {"device": plain(device)}
    if dtype is not None and (name := _chosen("dtype", dtype, _DTYPES)):
        steps["half"] = {"dtype": name}
    if memory_format is not None:
        if plain(memory_format) == "contiguous_format":
            memory_format = "contiguous"
        formats = _chosen("memory_format", memory_format, _FORMATS)
        steps |= {step: {"memory_format": name} for step, name in formats.items()}
        if repair_layout is None:
            repair_layout = plain(memory_format) != "contiguous"
    if repair_layout:
        steps[REPAIR_STEP] = {}
    if steps and format_inputs:
        steps["input_format"] = {"attach": True}
    if not steps:
        raise ConfigError("prepare", "nothing is asked for", "give memory_format, dtype or device")
    pipeline = Pipeline.from_config(steps)
    plan = pipeline.plan(model, known_issues="ignore")
    pipeline.apply(model, optimizer=optimizer, known_issues=known_issues)
    _PLANS[model] = plan
    return model


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(Readable, Analyses):
    """The audit and the layout flow of a model; with a reference also verification and timing."""

    @property
    def flow(self) -> Flow:
        """The layout flow."""
        return self.found["flow"]

    @property
    def verification(self) -> Verification | None:
        """The verification against the reference; None if it was not asked for."""
        return self.found.get("verify")

    @property
    def bench(self) -> Bench | None:
        """The timing against the reference; None if it was not asked for."""
        return self.found.get("bench")

    def summary(self) -> dict[str, Any]:
        """Return the figures as one flat mapping, for `wandb.log` and the like."""
        return self.figures()

    def save(self, path: str | Path) -> None:
        """Write one page if the name ends in `.html`, else a folder with the page and its data."""
        path = Path(path)
        if path.suffix == ".html":
            with TemporaryDirectory() as folder:
                page = self._write(Path(folder))
            files.write_text(path, page)
            return
        path.mkdir(parents=True, exist_ok=True)
        files.write_text(path / "report.html", self._write(path))

    def _write(self, folder: Path) -> str:
        from prepare.app.report.pages.page import run_page

        if self.audit is not None:
            self.audit.save(folder / "audit.json")
        for name, record in self.found.items():
            record.save(folder / f"{name}.json")
        return run_page(folder)


def report(
    model: nn.Module,
    batch: Any,
    *,
    reference: nn.Module | None = None,
    pipeline: Pipeline | None = None,
    flow: Literal["predict", "observe"] = "predict",
    verify: Level | None = None,
    bench: Level | None = None,
    mode: Literal["eval", "train"] = "eval",
) -> Report:
    """Report on `model`: where it stands, where it loses the layout, and against `reference` what changed.

    Args:
        model: prepared or not; it is not changed. Of one that `prepare` has prepared, the audit says what
            that changed.
        batch: a tensor, a tuple of positional or a mapping of named arguments, or an Example; or a Workload,
            to verify and time every size of it.
        reference: the unprepared model, e.g. `copy.deepcopy(model)` before it was prepared.
        pipeline: the pipeline that prepared the model; it formats the batch.
        flow: predict the layout flow without computing, or observe a forward.
        verify: `short` or `full`: compare outputs and gradients with `reference`.
        bench: `short` or `full`: time `model` against `reference`, for 10 s (slow calls: 120 s) or a minute.
        mode: the use of the model.

    Raises:
        ConfigError: `verify` or `bench` is asked for without a reference.
    """
    from prepare.audit import audit
    from prepare.stages import flow as flows

    if (verify or bench) and reference is None:
        remedy = "give copy.deepcopy(model), taken before it was prepared"
        raise ConfigError("reference", "is needed for verify and bench", remedy)
    follow = flows.observe if flow == "observe" else flows.predict
    head = head_of(batch)
    formatted = head if pipeline is None else pipeline.format(head)
    found: dict[str, Any] = {"flow": follow(model, formatted, backward=mode == "train")}
    if verify and reference is not None:
        from prepare.stages.verify import verify as compare

        options: Any = {"level": verify, "pipeline": pipeline, "mode": mode}
        found["verify"] = compare(reference, model, batch, **options)
    if bench and reference is not None:
        from prepare.core.forward.call import call_of
        from prepare.stages.bench.time_prepared import Models, time_models

        # The other steps would change the reference.
        steps = pipeline.steps.values() if pipeline else ()
        formats = Pipeline(step for step in steps if step.phase == "inputs")
        given = Models(unprepared=reference, prepared=model, pipeline=formats)
        calls = batch.each(call_of) if isinstance(batch, Workload) else call_of(batch)
        found["bench"] = time_models(given, calls, level=bench, mode=mode)
    return Report(audit=audit(model, plan=_PLANS.get(model)), found=found)


def _chosen(key: str, value: Any, allowed: Mapping[str, Any]) -> Any:
    name = str(plain(value))
    if name not in allowed:
        raise ConfigError(key, f"{name!r} is not allowed", choose(name, allowed))
    return allowed[name]
