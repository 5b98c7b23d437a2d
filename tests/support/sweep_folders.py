"""Folders of sweeps with made-up records, for tests of reports that do not run anything."""

from dataclasses import replace
from pathlib import Path

from prepare import recipe
from prepare.app.job.record import Job, Record, Result
from prepare.app.job.results import Analyses, read_results
from prepare.app.sweep.manifest import SweepManifest, write_sweep_manifest
from prepare.audit import Audit, AuditRow
from prepare.stages.bench.records import Bench, Case, Comparison, Control, VariantResult
from prepare.stages.flow.records import Copy, Event, Flow
from prepare.stages.verify.records import Check, Verification

SWEEP = "one"
OK = Result("ok", seconds=2.0)
NOISE = Control(ratio=1.0, interval=(0.99, 1.01), noise=1.01)


def bench(ratio=0.5, *, low=None, high=None, verdict="faster", what="inference", cpu="a processor", error="",
          others=None):  # fmt: skip
    """Return a bench of a prepared model with this time `ratio`; with `error`, its baseline did not run."""
    low, high = (ratio * 0.97 if low is None else low), (ratio * 1.03 if high is None else high)
    rows = (
        VariantResult(name="unprepared", verdict="baseline", ratio=1.0, seconds=0.1, device="cpu"),
        VariantResult(name="prepared", verdict=verdict, ratio=ratio, ratio_interval=(low, high), seconds=0.1 * ratio,
                seconds_interval=(0.1 * low, 0.1 * high), device="cpu"),
    )  # fmt: skip
    found = Comparison(rows=rows, baseline="unprepared", aa=NOISE if others is None else replace(NOISE, noise=1.2), repeats=20, seconds=3.0,
                       settings={"train": what == "training step", "threads": 2, "cores_available": 2, "others": others},
                       environment={"cpu": cpu, "platform": "Linux", "torch": "2.13.0", "devices": []})  # fmt: skip
    case = Case(what=what, reason=error) if error else Case(what=what, comparison=found)
    return Bench(level="short", mode="eval", seconds=3.0, cases=(case,))


def verification(error=1e-6, *, status="pass", wrong=0) -> Verification:
    checks = [
        Check(what="outputs", status=status, mode="eval", error=error, allowed=5e-2, worst="out", compared=1),
        Check(what="input gradients", status="pass", mode="eval", error=error / 2, allowed=5e-2, compared=1),
    ]  # fmt: skip
    checks += [Check(what="parameter gradients", status="wrong", error=0.7, allowed=5e-2)] * wrong
    reason = "" if status == "pass" else f"outputs: {error} of the scale"
    return Verification(status=status, reason=reason, level="short", mode="eval", reference="float64",
                        checks=tuple(checks), lost=(), culprit="", advice="", seconds=0.1)  # fmt: skip


def flow(breaks=0) -> Flow:
    event = Event(kind="break", phase="forward", module="norm", type="InstanceNorm3d", operation="aten.clone",
                  operand="self channels_last_3d", shape=(2, 8), before=(1,), after=(1,), bytes=4096, source="",
                  cause="instance_norm", count=breaks)  # fmt: skip
    copy = Copy(module="norm", type="InstanceNorm3d", operation="aten.clone", bytes=4096 * breaks, phase="forward", why="instance_norm", count=breaks)  # fmt: skip
    return Flow(mode="predict", status="ok", reason="", wanted={5: "channels_last_3d"}, events=(event,) * bool(breaks),
                copies=(copy,) * bool(breaks), convolutions=(), modules=(), notes=())  # fmt: skip


def audit(converted=8, *, names=("conv",), after=1 << 20) -> Audit:
    rows = [AuditRow(name, "Conv3d", "weight", "parameter", (8, 8, 3, 3, 3), (216, 1, 72, 24, 8), "float32", "cpu",
                ("channels_last_3d",), (), None, "converted", ("conv3d_memory_format",), None) for name in names]  # fmt: skip
    counts = {"ineffective": 0, "skipped": 0, "converted": converted, "already": 8 - converted, "untouched": 0}  # fmt: skip
    summary = {"convolutions": counts, "status": counts, "tensors": len(rows), "dtypes": {"float32": len(rows)},
               "devices": {"cpu": len(rows)}, "bytes_before": 1 << 20, "bytes_after": after, "unregistered": []}  # fmt: skip
    return Audit(rows, summary)


def add_row(folder: Path, number: int, overrides, *, result=OK, name=None, choices=None,
            audited=None, flowed=None, verified=None, benched=None, steps=None, shared=False) -> Path:  # fmt: skip
    """Write one row of the sweep in `folder`; without a result it has not ended."""
    record = Record(folder / (name or f"{number}-row"))
    record.clear()
    record.write_job(Job(number, SWEEP, list(overrides), choices or {}, shared=shared))
    for found, file in ((audited, "audit.json"), (flowed, "flow.json"), (verified, "verify.json"), (benched, "bench.json")):  # fmt: skip
        if found is not None:
            found.save(record.folder / file)
    if steps is not None:
        recipe.save(record.folder / "recipe.yaml", steps)
    if result is not None:
        records = {"flow": flowed, "verify": verified, "bench": benched}
        found = {name: each for name, each in records.items() if each is not None}
        known = Analyses(audit=audited, found=found).figures() or None
        record.write_result(replace(result, figures=known))
    return record.folder


def give_figures(folder: Path) -> None:
    """Write the figures of the records in `folder` into its result, as a run does."""
    record, run = Record(folder), read_results(folder)
    record.write_result(replace(record.result(), figures=run.figures()))


def plan(folder: Path, rows) -> None:
    """Write the manifest of a sweep with these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    write_sweep_manifest(folder, SweepManifest(SWEEP, [list(row) for row in rows]))


FORMATS = ("contiguous", "channels_last_3d")
PRECISIONS = ("float32", "bfloat16", "half")


def formats_by_precisions(folder: Path) -> Path:
    """Write a sweep of two formats by three precisions: one row is best, one fails, one is wrong, one never ran."""
    overrides = [["model=unet3d", f"memfmt={f}", f"precision={p}"] for f in FORMATS for p in PRECISIONS]  # fmt: skip
    plan(folder, overrides)
    half, last = {"dtype": "bfloat16"}, {"memory_format": "channels_last_3d"}
    failed = Result("failed", "error", "RuntimeError: \"slow_conv3d\" not implemented for 'Half'", "Traceback", 0.8)  # fmt: skip
    rows = (
        {"audited": audit(0), "flowed": flow(0), "verified": verification(1e-7),
         "benched": bench(1.0, verdict="no difference"), "steps": {}},
        {"audited": audit(0, after=1 << 19), "flowed": flow(0), "verified": verification(3e-3), "benched": bench(0.62),
         "steps": {"half": half}},
        {"result": failed},
        {"audited": audit(8), "flowed": flow(13), "verified": verification(2e-7, wrong=2),
         "benched": bench(1.2, verdict="slower"), "steps": {"conv3d_memory_format": last}},
        {"audited": audit(8, after=1 << 19), "flowed": flow(13), "verified": verification(4e-3), "benched": bench(0.41),
         "steps": {"half": half, "conv3d_memory_format": last}},
    )  # fmt: skip
    for number, records in enumerate(rows):
        add_row(folder, number, overrides[number], **records)
    return folder
