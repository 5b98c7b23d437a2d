"""The record of a run that made every analysis, with made-up results."""

from pathlib import Path

import made_benches
from made_runs import write_record
from prepare.stages.contract.records import Contract, ContractChange, ContractCheck, TimeRatio
from prepare.stages.doctor.records import Diagnosis, Finding
from prepare.stages.export.records import (
    ArtefactContract,
    Export,
    ExportStage,
    InputContract,
    LayoutCheck,
    TakenOut,
)
from prepare.stages.flow.records import Flow
from prepare.stages.patch.records import Patch, PatchedCall, UnpatchedBreak
from prepare.stages.tune.records import CandidateResult, KeptModule, Tuning
from prepare.stages.verify.records import Check, Lost, Verification

MACHINE = {"torch": "2.13.0", "cpu": "Some", "devices": ["a"], "accelerator": {"backend": "cpu"}, "packages": {"numpy": "2"}}  # fmt: skip


def tuning() -> Tuning:
    kept = KeptModule("0", 0.5, 1e-3, 1.1)
    rows = (
        CandidateResult(name="half", steps={"half": {"dtype": "bfloat16", "keep": []}}, status="winner", reason="half the time", cost=4,
            seconds=0.05, ratio=0.5, ratio_interval=(0.48, 0.52), rounds=20, peak_bytes=1 << 20, verified="pass", error=1e-3,
            allowed=1e-2, first_seconds=1.0, kept=(kept,)),
        CandidateResult(name="unprepared", steps={}, status="slower", reason="twice", cost=0, seconds=0.1, ratio=1.0, rounds=20, error=0.0),
    )  # fmt: skip
    return Tuning(rows=rows, winner="half", mode="eval", allow=("bfloat16",), budget=60.0, seconds=12.0, rounds=20, noise=1.02,
                  made="2026-01-01T00:00:00+00:00", from_cache=True, conditions={"mode": "eval"}, environment=MACHINE, notes=("a",))  # fmt: skip


def exported() -> Export:
    contract = ArtefactContract(inputs=(InputContract(name="x", shape=(None, 3), dtype="float32", strides=(3, 1)),),
                                layouts={"contiguous": "right", "channels_last": "wrong"}, environment={"A": "1"})  # fmt: skip
    check = LayoutCheck(layout="contiguous", batch=2, answer="right", status="pass", error=1e-7, allowed=1e-4, note="a")  # fmt: skip
    return Export(status="pass", reason="", exporter="onnx", options={"file": "model"}, artefact="model.onnx", sha256="ab", bytes=3,
                  files={"model.onnx": "ab"}, recipe="a", recipe_inside=True, versions={"torch": "2"}, contract=contract,
                  taken_out=(TakenOut(step="compile", modules=("0",), reason="a"),),
                  stages=(ExportStage(name="write", status="pass", seconds=1.0, note="a", error=1.0, allowed=2.0),), checks=(check,),
                  time=made_benches.comparison(), seconds=1.0, environment=MACHINE)  # fmt: skip


def contract() -> Contract:
    return Contract(model="Net", mode="eval", steps={"half": {}}, threads=1, seen={"torch": "2"}, modules={"": "Net"},
                    weights={"0.weight": "(3,) (1,) float32 cpu"}, layouts={"0": "channels_last"}, flow={"0": {"break in forward: a": 1}},
                    verified="pass", errors={"outputs": 1e-3},
                    time=TimeRatio(ratio=0.5, low=0.4, high=0.6, machine="a"))  # fmt: skip


def write_run(folder: Path) -> None:
    """Write the record of a run that made every analysis."""
    write_record(folder)
    Flow.load(folder / "flow.json").save(folder / "flow_before.json")
    lost = Lost(tensor="0.weight", before="float32", after="float16", elements=9, overflowed=1, flushed=1, rounded=0)  # fmt: skip
    check = Check(what="outputs", status="pass", mode="eval", batch=2, inputs="given", error=1e-7, allowed=1e-4, worst="0",
                  compared=1, sensitivity=1e-3, least_sensitive="0")  # fmt: skip
    Verification(status="pass", reason="", level="short", mode="eval", reference="float64", checks=(check,), lost=(lost,), culprit="",
                 advice="", seconds=1.0, environment=MACHINE).save(folder / "verify.json")  # fmt: skip
    benched = made_benches.comparison(environment=MACHINE)
    made_benches.bench(benched).save(folder / "bench.json")
    tuning().save(folder / "tune.json")
    exported().save(folder / "export.json")
    change = ContractChange(kind="broken", what="layouts", where="0", text="a", source="b:1")
    ContractCheck(changes=(change,), file="contract.yaml").save(folder / "contract.json")
    contract().save(folder / "contract.yaml")
    call = PatchedCall(name="a", source="b:1", copied_bytes=1, breaks=2)
    left = UnpatchedBreak(source="c:1", cause="d", breaks=1, reason="e")
    Patch(diff="-", calls=(call,), left=(left,), before=(2048, 3), after=(0, 1), verified="pass", verdict="faster", ratio=0.5,
          interval=(0.4, 0.6)).save(folder / "patch.json")  # fmt: skip
    found = Finding(name="one", verdict="wrong here", where="Conv2d", reason="a")
    diagnosis = Diagnosis(device="cpu", findings=(found,), seconds=2.0)
    diagnosis.save(folder / "doctor.json")
