"""Time `prepare` beside its peers on a CPU, each as its users run it: speed, error, start and memory.

    python benchmarks/peers.py                              # inference, float32, one thread
    python benchmarks/peers.py --dtype bfloat16 --threads 1 2
    python benchmarks/peers.py --mode training --networks unet segformer --seconds 5

Every way to run a network lives in a process of its own, forked from one that holds the unprepared network.
There it is made ready and called once (its start, and the peak memory until then), and compared with float64.
Then all ways take turns, in an order shuffled for each round. A ratio is the median over the rounds of the
ratio to the eager network within a round, on the clock and in processor time of all threads. The eager
network runs a second time in another process (A/A). A way that fails, dies or takes too long says so in its
cell, and the others go on. Every call gets a contiguous float32 tensor: what converts it is timed.

The raw rows go to results/peers.json, where a network replaces its own older row, so this can run in pieces.
At the end the tables of the pages are written from all of it.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import (
    convert_conv2d_weight_memory_format,
    convert_conv3d_weight_memory_format,
)
from zoo import apart
from zoo_networks import NETWORKS, Network, diffusers

from prepare.core.utils.json_records import write_json
from prepare.core.utils.machine import MachineWatch, environment
from prepare.core.utils.packages import version_of
from prepare.core.utils.text import first_line
from prepare.pipeline import Pipeline
from prepare.registry import STEPS
from prepare.stages.bench.statistics import Rounds, ratio
from prepare.stages.bench.variant import Variant

FILE = Path(__file__).parent / "results" / "peers.json"
EAGER, AGAIN = "eager", "eager again"
FUSED = "fuse_inference"
KEY = ("network", "mode", "dtype", "threads")
# The fewest rounds that have an interval at 95 %, and some.
FEWEST = 8
# Seconds in which a way has to give its first result.
PATIENCE = 600
# A call longer than these seconds needs no untimed one before it.
WARM_BELOW = 0.05
# Errors, relative to the largest value, above which a result is wrong and has no speed; also this many times
# the error of the eager network, whose gradients at batch 1 may be rounded that badly.
TIMES = 10
WRONG = {"float32": 1e-2, "bfloat16": 0.5}


class _NoTorchvision(importlib.abc.Loader, importlib.abc.MetaPathFinder):
    """Stands in for torchvision where it has no build beside this torch; timm's networks use none of it."""

    class Name(type):
        def __getattr__(cls, name: str) -> str:
            return name

    def find_spec(self, name: str, *_: Any) -> Any:
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: Any) -> None:
        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return self.Name(name, (), {})

        module.__getattr__ = missing


def timm(name: str) -> Callable[[], nn.Module]:
    """A network of timm."""

    def make() -> nn.Module:
        if find_spec("torchvision") is None:
            sys.meta_path.append(_NoTorchvision())
        import timm as library

        return library.create_model(name)

    return make


def smaller(name: str, *shape: int) -> Network:
    """Return a network of the zoo with a smaller input."""
    return Network(NETWORKS[name].build, NETWORKS[name].rank, shape, NETWORKS[name].more)


_IMAGE, _VOLUME = (1, 3, 224, 224), (1, 1, 32, 32, 32)
PEER_NETWORKS: dict[str, Network] = {
    "nnunet plain 2-d": smaller("nnunet plain 2-d", 1, 1, 128, 128),
    "nnunet plain 3-d": smaller("nnunet plain 3-d", *_VOLUME),
    "nnunet resenc 3-d": smaller("nnunet resenc 3-d", *_VOLUME),
    "monai unet 2-d": NETWORKS["monai unet 2-d"],
    "monai unet 3-d": NETWORKS["monai unet 3-d"],
    "monai dynunet 3-d": smaller("monai dynunet 3-d", *_VOLUME),
    "monai segresnet 3-d": smaller("monai segresnet 3-d", *_VOLUME),
    "monai basicunet 3-d": smaller("monai basicunet 3-d", *_VOLUME),
    "monai resnet18 3-d": smaller("monai resnet18 3-d", 1, 1, 48, 48, 48),
    "monai seresnet50 2-d": NETWORKS["monai seresnet50 2-d"],
    "timm resnet50": Network(timm("resnet50"), 2, _IMAGE),
    "timm mobilenetv3": Network(timm("mobilenetv3_large_100"), 2, _IMAGE),
    "timm convnext": Network(timm("convnext_nano"), 2, _IMAGE),
    "timm vit": Network(timm("vit_small_patch16_224"), 2, _IMAGE),
    "transformers segformer": smaller("transformers segformer", 1, 3, 128, 128),
    "diffusers autoencoder": smaller("diffusers autoencoder", 1, 3, 64, 64),
    "diffusers wan decoder": Network(
        diffusers("AutoencoderKLWan", base_dim=32, z_dim=16, num_res_blocks=1),
        3,
        (1, 16, 1, 12, 12),
        lambda: {"return_dict": False},
    ),
}


class OneTensor(nn.Module):
    """A network that takes one float32 tensor and returns one tensor, computing in `dtype`."""

    def __init__(self, net: nn.Module, method: str, more: dict[str, Any]) -> None:
        super().__init__()
        self.net, self.method, self.more = net, method, more
        self.dtype: torch.dtype | None = None

    def forward(self, batch: Tensor) -> Tensor:
        batch = batch if self.dtype is None else batch.to(self.dtype)
        call = getattr(self.net, self.method) if self.method else self.net
        output = call(batch, **self.more)
        return output if isinstance(output, Tensor) else output[0]


def built(name: str, mode: str) -> tuple[OneTensor, Tensor]:
    """Return the network, without randomness in its forward, and its input."""
    network = PEER_NETWORKS[name]
    torch.manual_seed(0)
    net = network.build().train(mode == "training")
    for module in net.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif type(module).__name__ == "SegformerDropPath":
            module.drop_prob = 0.0
    more = network.more() if network.more is not dict else {}
    more |= {"return_dict": False} if name.startswith("transformers") else {}
    torch.manual_seed(1)
    method = "decode" if name.endswith("decoder") else ""
    return OneTensor(net, method, more), torch.randn(network.shape)


# --- The ways to run a network: each takes it, its input and the case, and returns what is called.


def _cast(model: OneTensor, case: dict[str, Any]) -> OneTensor:
    if case["dtype"] != "float32":
        model.to(getattr(torch, case["dtype"]))
        model.dtype = getattr(torch, case["dtype"])
    return model


def _eager(model: OneTensor, *_: Any) -> Any:
    return model


def _eager_cast(model: OneTensor, _: Tensor, case: dict[str, Any]) -> Any:
    return _cast(model, case)


def _converted(model: OneTensor, _: Tensor, case: dict[str, Any]) -> Any:
    model = convert_conv2d_weight_memory_format(_cast(model, case), torch.channels_last)
    return convert_conv3d_weight_memory_format(model, torch.channels_last_3d)


def _prepared(fusion: str, **more: Any) -> Callable[..., Any]:
    """Prepare with every step that may help, of which each acts where it fits."""

    def make(model: OneTensor, batch: Tensor, case: dict[str, Any]) -> Any:
        training = case["mode"] == "training"
        steps = {} if training else {"eval_mode": {}, fusion: {}}
        steps |= {} if case["dtype"] == "float32" else {"half": {"dtype": case["dtype"]}}
        words = ("repair_layout", "keep_layout", "rewrite_conv")
        words = (*words, "conv2d_memory_format", "conv3d_memory_format")
        steps |= {word: {} for word in words}
        steps |= {"input_format": {"attach": True}, **more}
        known = "error" if training else "ignore"
        return Pipeline.from_config(steps).apply(model, example=batch, known_issues=known)

    return make


def _compiled(model: OneTensor, _: Tensor, case: dict[str, Any]) -> Any:
    return torch.compile(_cast(model, case))


def _frozen(model: OneTensor, _: Tensor, case: dict[str, Any]) -> Any:
    import torch._inductor.config as inductor

    inductor.freezing = True  # as an option it is not seen by the trace, and changes nothing
    return torch.compile(_cast(model, case))


def _openvino(model: OneTensor, batch: Tensor, case: dict[str, Any]) -> Any:
    import openvino

    hint = {"float32": "f32", "bfloat16": "bf16"}[case["dtype"]]
    config = {"INFERENCE_PRECISION_HINT": hint, "NUM_STREAMS": 1}
    config["INFERENCE_NUM_THREADS"] = case["threads"]
    try:
        converted = openvino.convert_model(model, example_input=batch, input=[list(batch.shape)])
    except Exception:  # what cannot be traced may be exported
        converted = openvino.convert_model(torch.export.export(model, (batch,)))
    run = openvino.compile_model(converted, "CPU", config)
    return lambda tensor: run(tensor.numpy(), share_inputs=True, share_outputs=True)[0]


def _onnxruntime(model: OneTensor, batch: Tensor, case: dict[str, Any]) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = case["threads"], 1
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.onnx"
        torch.onnx.export(_cast(model, case), (batch,), dynamo=True).save(path)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    return lambda tensor: session.run(None, {given.name: tensor.numpy()})[0]


WAYS: dict[str, Callable[..., Any]] = {
    EAGER: _eager,
    AGAIN: _eager,
    "eager, bfloat16": _eager_cast,
    "torch's converters": _converted,
    "prepare": _prepared("fuse_conv_bn"),
    # What cannot be fused, or is not faster so, has its batch norm folded as above.
    "prepare, fused": _prepared("fuse_conv_bn", **{FUSED: {}}),
    "torch.compile": _compiled,
    "prepare, torch.compile": _prepared("fuse_conv_bn", compile={}),
    "inductor, freezing": _frozen,
    "OpenVINO": _openvino,
    "ONNX Runtime": _onnxruntime,
}
FOR_INFERENCE = ("prepare, fused", "inductor, freezing", "OpenVINO", "ONNX Runtime")


def ways(case: dict[str, Any]) -> list[str]:
    """Return the ways that a case has."""
    left_out = {*FOR_INFERENCE} if case["mode"] == "training" else set()
    left_out |= {"eager, bfloat16"} if case["dtype"] == "float32" else set()
    left_out |= {"prepare, fused"} if FUSED not in STEPS else set()
    return [name for name in WAYS if name not in left_out]


# --- One way, in its process.


def first_result(call: Any, model: nn.Module, batch: Tensor, mode: str) -> dict[str, Tensor]:
    """Return the output of one call and, in training, the gradients of the parameters."""
    if mode != "training":
        with torch.no_grad():
            return {"output": torch.as_tensor(call(batch))}
    output = call(batch)
    generator = torch.Generator().manual_seed(2)
    output.backward(torch.randn(output.shape, generator=generator).to(output.dtype))
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach()} | found


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return the largest difference of outputs, or of gradients, each relative to its largest value."""
    wrong: dict[bool, float] = {}
    largest: dict[bool, float] = {}
    for name, wanted in exact.items():
        kind, difference = name == "output", (found[name].double() - wanted).abs().max().item()
        wrong[kind] = max(wrong.get(kind, 0.0), math.inf if math.isnan(difference) else difference)
        largest[kind] = max(largest.get(kind, 0.0), wanted.abs().max().item())
    return max(wrong[kind] / largest[kind] for kind in wrong)


def peak_memory() -> int:
    """Return the largest memory of this process so far, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def serve(pipe: Any, way: str, given: tuple[OneTensor, Tensor, dict[str, Any], str]) -> None:
    """Make one way ready, say how it began, and time a call whenever asked."""
    model, batch, case, folder = given
    torch.set_num_threads(case["threads"])
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = (
        f"{folder}/{[*WAYS].index(way)}"  # nothing is compiled yet
    )
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        began = time.perf_counter()
        call = WAYS[way](model, batch, case)
        found = first_result(call, model, batch, case["mode"])
        start = time.perf_counter() - began
        training, clocks = case["mode"] == "training", (time.perf_counter, time.process_time)
        timed = Variant(way, call, None, train=training, amp="none", clocks=clocks)
        timed.warm_up(batch)
        row = {"start": start, "memory": peak_memory()}
        row["error"] = error(found, torch.load(f"{folder}/exact.pt"))
        row |= {"calls": timed.calls, "seconds": timed.call_seconds}
    except BaseException as problem:
        pipe.send({"reason": type(problem).__name__, "message": first_line(problem)})
        return
    eager = Path(folder, EAGER)
    if way == EAGER:
        eager.write_text(str(row["error"]))
    worst = TIMES * float(eager.read_text()) if eager.exists() else 0.0
    if row["error"] > max(WRONG[case["dtype"]], worst):
        row["reason"] = "wrong"
    pipe.send(row)
    while order := pipe.recv():
        timed.calls, timed.warm = order
        timed.sample(batch, timed.samples)
        pipe.send(timed.samples[-1])


def exact_results(model: OneTensor, batch: Tensor, case: dict[str, Any], folder: str) -> None:
    """Write what float64 gives."""
    model, batch = model.double(), batch.double()
    torch.save(first_result(model, model, batch, case["mode"]), f"{folder}/exact.pt")


class Worker:
    """The process of one way; `cell` is what is known of it."""

    def __init__(self, way: str, given: tuple[Any, ...]) -> None:
        fork = multiprocessing.get_context("fork")
        self.pipe, theirs = fork.Pipe()
        self.process = fork.Process(target=serve, args=(theirs, way, given), daemon=False)
        self.process.start()
        theirs.close()
        self.cell: dict[str, Any] = {"wall": [], "processor": []}
        self.cell |= self._answer() or {}

    def _answer(self) -> Any:
        """Return what the process says; None, with a reason in the cell, if it does not."""
        with suppress(EOFError):
            if self.pipe.poll(PATIENCE):
                return self.pipe.recv()
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(5)
        code = self.process.exitcode or 0
        self.cell["reason"] = "time" if code == -signal.SIGKILL else f"crash ({code})"
        return None

    def sample(self, calls: int, *, warm: bool) -> None:
        if "reason" not in self.cell:
            self.pipe.send((calls, warm))
            if times := self._answer():
                self.cell["wall"].append(times.wall)
                self.cell["processor"].append(times.processor)

    def end(self) -> None:
        with suppress(OSError):
            self.pipe.send(None)
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()


def measure(name: str, case: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the row of a network: the cells of all ways; call it in a process of its own."""
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    model, batch = built(name, case["mode"])
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory() as folder:
        given = (model, batch, case, folder)
        exact = multiprocessing.get_context("fork").Process(target=exact_results, args=given)
        exact.start()
        exact.join()
        try:
            for way in ways(case):
                print(f"\r{name}: {way:24}", end="", file=sys.stderr, flush=True)
                workers[way] = Worker(way, given)
            rounds = take_turns(workers, seconds)
        finally:
            for worker in workers.values():
                worker.end()
    torch.set_num_threads(case["threads"])
    row = {"network": name, **case, "shape": batch.shape, **rounds}
    row["cells"] = {way: worker.cell for way, worker in workers.items()}
    row["peers"] = {name: version_of(name) for name in ("openvino", "onnxruntime")}
    return row | {"environment": environment()}


def take_turns(workers: dict[str, Worker], seconds: float) -> dict[str, Any]:
    """Time all ways in rounds for so many seconds, or in the fewest rounds.

    Return the number of rounds, and the cores that other programs used meanwhile.
    """
    base, rounds = workers[EAGER].cell, Rounds(time.perf_counter)
    if "reason" in base:
        return {"rounds": 0, "others": 0.0}
    watch, spent = MachineWatch(), processor_seconds(workers)
    while rounds.count < FEWEST or rounds.seconds() < seconds:
        for worker in rounds.turns([*workers.values()]):
            worker.sample(base["calls"], warm=base["seconds"] < WARM_BELOW)
    ours = (processor_seconds(workers) - spent) / rounds.seconds()
    others = max(0.0, (watch.conditions()["others"] or 0.0) - ours)
    return {"rounds": rounds.count, "others": round(others, 2)}


def processor_seconds(workers: dict[str, Worker]) -> float:
    """Return the seconds that processors spent on these processes so far."""
    ticks = 0
    for worker in workers.values():
        with suppress(OSError):  # it has died
            fields = Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # utime, stime
    return ticks / os.sysconf("SC_CLK_TCK")


# --- Tables.

_UNITS = {"wall": "time", "processor": "processor time", "error": "error against float64"}
_UNITS |= {"start": "start, in seconds", "memory": "peak memory, in MiB"}


def cases_in(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the pairs of mode and dtype that were measured."""
    order = [("inference", "float32"), ("inference", "bfloat16"), ("training", "float32")]
    return [one for one in order if any((row["mode"], row["dtype"]) == one for row in rows)]


def ways_in(rows: list[dict[str, Any]]) -> list[str]:
    return [way for way in WAYS if any(way in row["cells"] for row in rows)]


def value(
    row: dict[str, Any], way: str, what: str
) -> tuple[float, tuple[float, float] | None] | None:
    """Return a figure of a cell, for times the ratio with its interval; None if it failed."""
    cell, base = row["cells"].get(way), row["cells"][EAGER]
    if cell is None or "reason" in cell or "reason" in base:
        return None
    if what in ("wall", "processor"):
        return tuple(ratio(cell[what], base[what], 0.95))
    return cell[what], None


def text(row: dict[str, Any], way: str, what: str) -> str:
    """Return the text of a cell of the large tables."""
    found = value(row, way, what)
    if found is None:
        return row["cells"].get(way, {}).get("reason", "-")
    number, interval = found
    spread = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    return f"{formatted(number, what)}{'' if way == EAGER else spread}"


def formatted(number: float, what: str) -> str:
    if what == "memory":
        return f"{number / 2**20:.0f}"
    return f"{number:.1e}" if what == "error" else f"{number:.2f}"


def average(rows: list[dict[str, Any]], way: str, what: str) -> str:
    """Return the geometric mean of times, and the median of other figures, over the networks.

    A number in parentheses says over how many, if not over all.
    """
    found = [each[0] for row in rows if (each := value(row, way, what))]
    if not found:
        return "-"
    mean = geometric_mean(found) if what in ("wall", "processor") else median(found)
    return formatted(mean, what) + (f" ({len(found)})" if len(found) < len(rows) else "")


def selected(rows: list[dict[str, Any]], *case: Any) -> list[dict[str, Any]]:
    chosen = [row for row in rows if (row["mode"], row["dtype"], row["threads"]) == case]
    return sorted(chosen, key=lambda row: [*PEER_NETWORKS].index(row["network"]))


def tables(found: dict[str, Any]) -> list[str]:
    """Return a table of every figure, network by network."""
    rows = found.get("rows", [])
    return [*_large(rows)] or ["Not run yet."]


def _large(rows: list[dict[str, Any]]) -> Iterator[str]:
    for mode, dtype in cases_in(rows):
        for threads in sorted({row["threads"] for row in rows}):
            if not (chosen := selected(rows, mode, dtype, threads)):
                continue
            names = ways_in(chosen)
            busiest = max(row["others"] for row in chosen)
            yield f"## {mode.capitalize()}, {dtype}, {threads} thread{'s' * (threads > 1)}\n"
            yield f"{place(chosen[-1])}. Other programs used at most {busiest:.1f} cores."
            for what, unit in _UNITS.items():
                yield f"\n### {unit.capitalize()}\n"
                yield from _head("network", *names)
                for row in chosen:
                    yield _line(row["network"], *(text(row, way, what) for way in names))
                kind = "geometric mean" if what in ("wall", "processor") else "median"
                yield _line(kind, *(average(chosen, way, what) for way in names))
            yield ""


def summary(found: dict[str, Any]) -> list[str]:
    """Return a table for each mode and dtype: the ways, and their averages over all networks."""
    rows = found.get("rows", [])
    return [*_small(rows)] or ["Not run yet."]


def _small(rows: list[dict[str, Any]]) -> Iterator[str]:
    for mode, dtype in cases_in(rows):
        by_threads = {n: selected(rows, mode, dtype, n) for n in (1, 2)}
        by_threads = {n: chosen for n, chosen in by_threads.items() if chosen}
        few = next(iter(by_threads.values()))
        yield f"{mode.capitalize()}, {dtype}, networks: {len(few)} ({place(few[-1])})\n"
        many = {n: len(c) for n, c in by_threads.items()}
        part = {n: f", {m} networks" if m < len(few) else "" for n, m in many.items()}
        clocks = [f"{n} thread{'s' * (n > 1)}{part[n]}" for n in many]
        yield from _head("", *clocks, "error", "worst", "start, s", "MiB")
        for way in ways_in(few):
            means = [average(rows, way, "wall") for rows in by_threads.values()]
            errors = [each[0] for row in few if (each := value(row, way, "error"))]
            worst = formatted(max(errors), "error") if errors else "-"
            others = [average(few, way, what) for what in ("error", "start", "memory")]
            yield _line(way, *means, others[0], worst, *others[1:])
        yield ""


def place(row: dict[str, Any]) -> str:
    where = row["environment"]
    versions = {"torch": where["torch"]} | (row["peers"] if row["mode"] == "inference" else {})
    names = [where["cpu"], *(f"{name} {version}" for name, version in versions.items())]
    return ", ".join([*names, where["date"][:10]])


def _head(*titles: str) -> list[str]:
    return [_line(*titles), "|" + "---|" * len(titles)]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


# --- The command line.


def save(row: dict[str, Any], raw: Path) -> list[dict[str, Any]]:
    """Add a row to the raw file, in the place of an older one of the same network and case."""
    saved = json.loads(raw.read_text())["rows"] if raw.exists() else []
    rows = [*(old for old in saved if any(old[key] != row[key] for key in KEY)), row]
    write_json(raw, {"rows": rows})
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=[""], help="parts of networks' names")
    modes = ("inference", "training")
    parser.add_argument("--mode", nargs="+", choices=modes, default=[modes[0]])
    parser.add_argument("--dtype", nargs="+", choices=[*WRONG], default=["float32"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--seconds", type=float, default=10.0, help="of rounds for each network")
    parser.add_argument("--raw", type=Path, default=FILE, help="another file: no page is written")
    parser.add_argument(
        "--table", action="store_true", help="write the tables, and measure nothing"
    )
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for mode, dtype, threads in _cases(options):
        case = {"mode": mode, "dtype": dtype, "threads": threads}
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command line sets it
        for name in PEER_NETWORKS:
            if any(part in name for part in options.networks):
                began = time.perf_counter()
                try:
                    row = apart(measure, name, case, options.seconds)
                except Exception as problem:  # as a library that is not installed
                    print(f"{name}: {type(problem).__name__}: {first_line(problem)}", flush=True)
                    continue
                rows = save(row, options.raw)
                cells = ", ".join(f"{w} {text(row, w, 'processor')}" for w in ways_in([row]))
                took = f"{time.perf_counter() - began:.0f} s"
                print(f"\r{name}, {mode}, {dtype}, {threads}: {cells}; {took}", flush=True)
    if options.raw == FILE:
        from tables import write_pages

        write_pages()
    else:
        print(*summary({"rows": rows}), sep="\n")


def _cases(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Yield each mode, dtype and number of threads; training in bfloat16 is not measured."""
    for mode in [] if options.table else options.mode:
        for dtype in options.dtype if mode == "inference" else ["float32"]:
            for threads in options.threads:
                yield mode, dtype, threads


if __name__ == "__main__":
    main()
