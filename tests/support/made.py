"""The one maker of records that no run has made: of stages, runs, and rows of sweeps."""

import json
import re
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import NamedTuple

import pytest

from page_reader import HOSTILE
from prepare import recipe
from prepare.app.cli import main as cli
from prepare.app.job.record import (
    NOTHING_CHANGED,
    Analyses,
    Job,
    Record,
    Result,
    Results,
    read_results,
    record_classes,
)
from prepare.app.report.pages import run_page
from prepare.app.report.terminal import show_summary
from prepare.app.sweep.manifest import SweepManifest
from prepare.audit import Audit, AuditRow
from prepare.audit import audit as audit_of
from prepare.errors import Problem
from prepare.pipeline import Pipeline
from prepare.stages.bench.records import Comparison, Control, VariantResult
from prepare.stages.flow.records import Convolution, Copy, Event, Flow
from prepare.stages.tune.records import CandidateResult, Tuning
from prepare.stages.verify.records import Check, Verification
from small_nets import small_3d

NET = ("model._target_=sample_nets.Net", "input.shape=[2,3,16,16]", "memfmt=channels_last", "device=cpu", "verify=none")  # fmt: skip
MACHINE = {"torch": "2.13.0", "cpu": "Some", "devices": ["a"], "accelerator": {"backend": "cpu"}, "packages": {"numpy": "2"}}  # fmt: skip
SWEEP = "one"
OK = Result("ok", seconds=2.0)
NOISE = Control(ratio=1.0, interval=(0.99, 1.01), noise=1.01)
_EMPTY = {"str": "", "int": 0, "float": 1.0, "bool": False, "tuple": ()}


def make(cls, **given):
    """Return a record; what is neither given nor has a default is none, or empty, or a small number."""
    for each in fields(cls):
        if each.default is each.default_factory is MISSING and each.name not in given:
            kind = re.match(r"\w+", each.type)[0]
            given[each.name] = None if "None" in each.type else _EMPTY.get(kind, {})
    return cls(**given)


def row(*overrides, **found):
    return {"overrides": ["model=unet3d", *overrides], **found}


def out_of(capsys, summary, width=200):
    """Return what a terminal shows of a sweep."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        show_summary(summary)
    return capsys.readouterr().out


def ran(tmp_path, monkeypatch, capsys, *words):
    monkeypatch.chdir(tmp_path)
    code = cli.run([*NET, *words, "hydra.run.dir=run"])
    return code, capsys.readouterr().out, tmp_path / "run"


def comparison(ratio=0.73, *, verdict="faster", interval=(0.70, 0.76), base=0.04, **more):
    rows = (
        VariantResult(name="unprepared", verdict="baseline", seconds=base, seconds_interval=(0.95 * base, 1.1 * base),
            ratio=1.0, device="cpu", calls=1, samples=(base,)),
        VariantResult(name="prepared", verdict=verdict, seconds=base * ratio, seconds_interval=(0.75 * base * ratio, 1.25 * base * ratio),
            ratio=ratio, ratio_interval=interval, device="cpu", calls=1),
    )  # fmt: skip
    settings = {"train": False, "confidence": 0.95, "threads": 2, "batch_size": 2}
    return Comparison(**{"rows": rows, "baseline": "unprepared", "aa": NOISE, "repeats": 20, "seconds": 3.2, "settings": settings,
                         "environment": {}, "notes": ("a note",)} | more)  # fmt: skip


def bench(ratio=0.5, *, low=None, high=None, verdict="faster", what="inference", cpu="a processor", error="",
          others=None):  # fmt: skip
    """Return a bench of a prepared model with this time `ratio`; with `error`, its baseline did not run."""
    interval = (ratio * 0.97 if low is None else low, ratio * 1.03 if high is None else high)
    found = comparison(
        ratio, verdict=verdict, interval=interval, base=0.1, seconds=3.0, notes=(),
        aa=NOISE if others is None else replace(NOISE, noise=1.2),
        settings={"train": what == "training step", "threads": 2, "cores_available": 2, "others": others},
        environment={"cpu": cpu, "platform": "Linux", "torch": "2.13.0", "devices": []},
    )  # fmt: skip
    return replace(found, rows=(), aa=None, repeats=0, reason=error) if error else found


def verification(error=1e-6, *, status="pass", wrong=0, allowed=5e-2, **more) -> Verification:
    checks = [
        Check(what="outputs", status=status, error=error, allowed=allowed, worst="out", compared=1),
        Check(what="input gradients", status="pass", error=error / 2, allowed=allowed, compared=1),
    ]  # fmt: skip
    checks += [
        Check(what="parameter gradients", status="wrong", error=0.7, allowed=allowed)
    ] * wrong
    reason = "" if status == "pass" else f"outputs: {error} of the scale"
    return make(Verification, **{"status": status, "reason": reason, "mode": "eval", "reference": "float64",
                "checks": tuple(checks)} | more)  # fmt: skip


class Made(NamedTuple):
    """A module of a network that is only told of."""

    name: str
    type: str = "Conv3d"


def event(name: str, **more) -> Event:
    operation, cause = "aten.clone", "instance_norm"
    return Event(**{"module": name, "type": "InstanceNorm3d", "operation": operation,
                 "operand": "self channels_last_3d", "shape": (2, 8, 4, 4, 4), "before": (512, 1, 128, 32, 8),
                 "after": (512, 64, 16, 4, 1), "bytes": 4096 * more.get("count", 1), "source": "", "cause": cause, "count": 1} | more)  # fmt: skip


def copied(name: str, size: int = 4096, **more) -> Copy:
    return Copy(**{"module": name, "type": "InstanceNorm3d", "operation": "aten.clone", "bytes": size,
                "why": "instance_norm", "count": 1} | more)  # fmt: skip


def convolution(name: str, output: str = "channels_last_3d", **more) -> Convolution:
    return Convolution(**{"module": name, "type": "Conv3d", "input": "contiguous", "weight": "channels_last_3d",
                       "output": output, "backend": "Mkldnn", "calls": 1} | more)  # fmt: skip


def flow_of(modules=(), events=(), copies=(), **more) -> Flow:
    convolutions = tuple(convolution(one.name) for one in modules if one.type == "Conv3d")
    return make(Flow, **{"mode": "predict", "status": "ok", "wanted": {5: "channels_last_3d"}, "events": tuple(events),
                "copies": tuple(copies), "convolutions": convolutions} | more)  # fmt: skip


def flow(breaks=0) -> Flow:
    found = [event("norm", count=breaks, bytes=4096)] * bool(breaks)
    return flow_of((), found, [copied("norm", 4096 * breaks, count=breaks)] * bool(breaks))


def blocks(count: int, *, broken: int | None = None) -> Flow:
    """Return a flow of `count` blocks of convolution, norm and ReLU; the first `broken` lose the layout."""
    broken = count if broken is None else broken
    modules, events, copies = [Made("", "Net"), Made("body", "Sequential")], [], []
    for number in range(count):
        name = f"body.{number}"
        modules += [Made(name, "Block"), Made(f"{name}.conv")]
        modules += [Made(f"{name}.norm", "InstanceNorm3d"), Made(f"{name}.relu", "ReLU")]
        if number < broken:
            events.append(event(f"{name}.norm"))
            copies.append(copied(f"{name}.norm"))
    return flow_of(modules, events, copies, notes=("a note",))


def hostile_flow() -> Flow:
    modules = [Made("", HOSTILE[0])]
    modules += [Made(name, name) for name in HOSTILE]
    events = [
        replace(event(name), type=name, operation=name, operand=name, source=name, cause=name)
        for name in HOSTILE
    ]
    copies = [replace(copied(name), type=name, operation=name, why=name) for name in HOSTILE]
    found = flow_of(modules, events, copies)
    rows = tuple(convolution(name, type=name, backend=name) for name in HOSTILE)
    return replace(found, convolutions=rows, notes=tuple(HOSTILE))


def write_record(folder: Path, flow: Flow | None = None) -> Path:
    """Write the record of a run, with the functions that a job uses."""
    record, model = Record(folder), small_3d()
    pipeline = Pipeline.from_config({"conv3d_memory_format": {}, "half": {"dtype": "bfloat16"}})
    plan = pipeline.plan(model, known_issues="ignore")
    pipeline.apply(model, known_issues="ignore")
    record.begin(Job(None, None, [], {}))
    audited = audit_of(model, plan=plan)
    plan = replace(plan, warnings=[Problem("InstanceNorm3d", "copies", "add a step")]).to_dict()
    seen = {"given": "(2, 1)", "gave": "(2, 2)"}
    choices = {"model": "small_3d", "memfmt": "channels_last_3d", "input": None}
    words = ["model=small_3d", "memfmt=channels_last_3d", "+model.x=[1, 2]"]
    job = Job(None, None, words, choices, seen=seen)
    environment = {"format": "prepare.environment", "version": 1, "date": "2025-01-02T03:04:05+00:00", "python": "3.11.7",
                   "torch": "2.13.0", "packages": {"numpy": None}, "platform": "Linux", "cpu": "a processor", "cores": 2,
                   "threads": 1, "devices": [], "git_commit": "abc"}  # fmt: skip
    text = recipe.dumps(pipeline.to_recipe())
    found = {"flow": flow or blocks(3)}
    record.write_results(
        Results(
            job=job, audit=audited, plan=plan, recipe=text, environment=environment, found=found
        )
    )
    record.write_result(Result("ok", seconds=1.25))
    return folder


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
    record.begin(Job(None, None, [], {}))
    record.write_job(
        Job(number, SWEEP, list(overrides), choices or {}, f"row-{number}", shared=shared)
    )
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


def read_run(folder: Path) -> Results:
    """Return what a run knew that has left these records."""
    run, plan = read_results(folder), folder / "plan.json"
    found = {Path(name).stem: cls.load(folder / name) for name, cls in record_classes().items() if (folder / name).is_file()}  # fmt: skip
    ended = run.result or Result("ok")
    about = {"amp": ended.amp, "notes": ended.notes, "unchanged": ended.reason == NOTHING_CHANGED}
    about["stopped"] = (ended.error or "") if ended.status == "interrupted" else ""
    planned = json.loads(plan.read_text()) if plan.is_file() else None
    steps = planned["steps"] if planned else {}
    return replace(run, found=found, plan=planned, steps=steps, **about)


def page_of(folder: Path) -> str:
    """Return the page of the run that has left these records."""
    return run_page(read_run(folder))


def plan(folder: Path, rows) -> None:
    """Write the manifest of a sweep with these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    names, words = [f"row-{number}" for number in range(len(rows))], [list(row) for row in rows]
    command = "python run.py --multirun model=unet3d memfmt=contiguous,channels_last_3d"
    SweepManifest(SWEEP, words, names, command).save(folder / "sweep.json")


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


def tuning() -> Tuning:
    rows = (
        CandidateResult(name="half", steps={"half": {"dtype": "bfloat16", "keep": []}}, status="winner", reason="half the time", cost=4,
            verdict="faster", seconds=0.05, ratio=0.5, ratio_interval=(0.48, 0.52), rounds=20, verified="pass", error=1e-3,
            allowed=1e-2),
        CandidateResult(name="unprepared", steps={}, status="timed", reason="twice", cost=0, verdict="baseline", seconds=0.1,
            ratio=1.0, rounds=20, error=0.0),
    )  # fmt: skip
    return Tuning(rows=rows, winner="half", seconds=12.0, last=comparison(environment=MACHINE))
