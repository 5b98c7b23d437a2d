"""Made-up timings of a run, and a run that times one."""

from dataclasses import replace

from prepare.app.cli import main as cli
from prepare.stages.bench.records import Bench, Case, Comparison, Control, VariantResult
from prepare.stages.bench.time_prepared import INFERENCE
from prepare.stages.verify.records import Check, unknown

NET = ("model._target_=sample_nets.Net", "input.shape=[2,3,16,16]", "memfmt=channels_last", "device=cpu", "verify=none")  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"


def ran(tmp_path, monkeypatch, capsys, *words):
    monkeypatch.chdir(tmp_path)
    code = cli.run([*NET, *words, "hydra.run.dir=run"])
    return code, capsys.readouterr().out, tmp_path / "run"


def comparison(ratio=0.73, *, verdict="faster", interval=(0.70, 0.76), repeats=20, **more):
    rows = (
        VariantResult(name="unprepared", verdict="baseline", seconds=0.04, seconds_interval=(0.038, 0.045),
            ratio=1.0, throughput=50.0, peak_bytes=1 << 26, device="cpu", calls=1, samples=(0.04,)),
        VariantResult(name="prepared", verdict=verdict, seconds=0.04 * ratio, seconds_interval=(0.03 * ratio, 0.05 * ratio),
            ratio=ratio, ratio_interval=interval, throughput=50 / ratio, peak_bytes=1 << 25, device="cpu", calls=1),
    )  # fmt: skip
    settings = {"train": False, "confidence": 0.95, "threads": 2, "batch_size": 2}
    found = Comparison(rows=rows, baseline="unprepared", aa=Control(ratio=1.0, interval=(0.99, 1.01), noise=1.01),
                       repeats=repeats, seconds=3.2, settings=settings, environment={}, notes=("a note",))  # fmt: skip
    return replace(found, **more)


def bench(*found, **more):
    cases = [Case(what=INFERENCE, comparison=one) for one in found or (comparison(),)]
    return Bench(level="short", mode="eval", seconds=3.5, cases=tuple(cases), **more)


def verified(error=2e-6, allowed=1e-4, status="pass"):
    check = Check(what="outputs", status=status, error=error, allowed=allowed)
    other = Check(what="input gradients", status=status, error=0.5, allowed=1e-4)
    return replace(unknown("", level="short", mode="eval"), status=status, checks=(check, other))
