"""Made-up layout flows, and records of jobs that hold them."""

from dataclasses import replace
from pathlib import Path

from page_reader import HOSTILE
from prepare.app.job.record import Job, Record, Result
from prepare.audit import audit
from prepare.pipeline import Pipeline
from prepare.stages.flow.records import Convolution, Copy, Event, Flow, ModuleLayout
from small_nets import small_3d


def module(name: str, layout: str = "channels_last_3d", kind: str = "Conv3d") -> ModuleLayout:
    depth = name.count(".") + 1 if name else 0
    return ModuleLayout(name=name, type=kind, depth=depth, layout=layout, calls=1)


def event(name: str, kind: str = "break", *, count: int = 1, phase: str = "forward") -> Event:
    operation, cause = "aten.clone", "instance_norm"
    if kind == "regain":
        operation, cause = "aten.convolution", "convolution"
    return Event(kind=kind, phase=phase, module=name, type="InstanceNorm3d", operation=operation, operand="self channels_last_3d",
                 shape=(2, 8, 4, 4, 4), before=(512, 1, 128, 32, 8), after=(512, 64, 16, 4, 1), bytes=4096 * count,
                 source="", cause=cause, count=count)  # fmt: skip


def copied(name: str, size: int = 4096) -> Copy:
    return Copy(module=name, type="InstanceNorm3d", operation="aten.clone", bytes=size, phase="forward", why="instance_norm", count=1)  # fmt: skip


def flow_of(modules, events=(), copies=()) -> Flow:
    convolutions = tuple(
        Convolution(module=one.name, type=one.type, input="contiguous", weight="channels_last_3d",
                    output="channels_last_3d", backend="Mkldnn", calls=1)
        for one in modules if one.type == "Conv3d"
    )  # fmt: skip
    return Flow(mode="predict", status="ok", reason="", wanted={5: "channels_last_3d"}, events=tuple(events),
                copies=tuple(copies), convolutions=convolutions, modules=tuple(modules), notes=("a note",))  # fmt: skip


def blocks(count: int, *, broken: int | None = None) -> Flow:
    """Return a flow of `count` blocks of convolution, norm and ReLU; the first `broken` lose the layout."""
    broken = count if broken is None else broken
    modules, events, copies = [module("", kind="Net"), module("body", kind="Sequential")], [], []
    for number in range(count):
        lost = "contiguous" if number < broken else "channels_last_3d"
        name = f"body.{number}"
        modules += [module(name, lost, "Block"), module(f"{name}.conv")]
        modules += [
            module(f"{name}.norm", lost, "InstanceNorm3d"),
            module(f"{name}.relu", lost, "ReLU"),
        ]
        if number < broken:
            events += [event(f"{name}.norm"), event(f"{name}.conv", "regain")]
            copies.append(copied(f"{name}.norm"))
    return flow_of(modules, events, copies)


def hostile_flow() -> Flow:
    modules = [module("", kind=HOSTILE[0])]
    modules += [replace(module(""), name=name, type=name, depth=1) for name in HOSTILE]
    events = [
        replace(event(name), type=name, operation=name, operand=name, source=name, cause=name)
        for name in HOSTILE
    ]
    copies = [replace(copied(name), type=name, operation=name, why=name) for name in HOSTILE]
    found = flow_of(modules, events, copies)
    odd = [replace(module(""), name=f"odd {name}", depth=1, layout=name) for name in HOSTILE]
    rows_ = tuple(
        replace(flow_of([module("")]).convolutions[0], module=n, type=n, backend=n) for n in HOSTILE
    )
    return replace(found, modules=(*found.modules, *odd), convolutions=rows_, notes=tuple(HOSTILE))


def write_record(folder: Path, flow: Flow | None = None) -> Path:
    """Write the record of a run, with the functions that a job uses."""
    record, model = Record(folder), small_3d()
    pipeline = Pipeline.from_config({"conv3d_memory_format": {}, "half": {"dtype": "bfloat16"}})
    plan = pipeline.plan(model, known_issues="ignore")
    pipeline.apply(model, known_issues="ignore")
    record.clear()
    record.write_plan(replace(plan, warnings=["InstanceNorm3d: copies; add a step"]))
    record.write_prepared(pipeline, audit(model, plan=plan))
    seen = {"given": "(2, 1)", "gave": "(2, 2)", "convolutions": [{"format": "channels_last_3d", "gave": 2, "of": 3, "ambiguous": 1}]}  # fmt: skip
    choices = {"model": "small_3d", "memfmt": "channels_last_3d", "input": None}
    record.write_job(
        Job(
            None,
            None,
            ["model=small_3d", "memfmt=channels_last_3d", "+model.x=[1, 2]"],
            choices,
            seen=seen,
        )
    )
    environment = {"format": "prepare.environment", "version": 1, "date": "2025-01-02T03:04:05+00:00", "python": "3.11.7",
                   "torch": "2.13.0", "packages": {"numpy": None}, "platform": "Linux", "cpu": "a processor", "cores": 2,
                   "threads": 1, "devices": [], "git_commit": "abc"}  # fmt: skip
    record.write_environment(environment)
    record.write_result(Result("ok", seconds=1.25))
    (flow or blocks(3)).save(folder / "flow.json")
    return folder
