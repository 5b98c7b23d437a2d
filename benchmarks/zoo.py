"""Time real networks: unprepared, with torch's own tools, compiled, with every recipe, and with `auto`.

    python benchmarks/zoo.py [--only NAME ...] [--mode eval train] [--precision float32 bfloat16]
    python benchmarks/zoo.py --table

A case is a network, a mode and a precision. prepare.tune first chooses a recipe (`auto`, and `auto,
compiler allowed`); then all variants are timed interleaved, against the unprepared network and with an
A/A control: torch's converters, model.to(memory_format=...), torch.compile plain and frozen, every recipe
without a compiler that auto has to choose from, and what it chose with one. The raw file is
`results/zoo.json`; cases that it holds of this processor, with intervals, are left out, so this can be
stopped and started again, and another processor adds tables of its own.

Each case runs in a new process.

A precision is what is allowed: under `bfloat16` the peers compute in it, the unprepared network in
float32, and auto may choose. Compilers are timed in evaluation, and in training with `--compile`.

Weights are random. With `--warm-up STEPS` a network is trained for so many steps before anything is
tried on it, and its cases have tables of their own: what 16 bits make of gradients depends on the weights.
"""

import argparse
import contextlib
import copy
import itertools
import json
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import (
    convert_conv2d_weight_memory_format,
    convert_conv3d_weight_memory_format,
)
from zoo_networks import NETWORKS, Network
from zoo_tables import (
    AUTO,
    AUTO_COMPILED,
    PEERS,
    UNPREPARED,
    has_intervals,
    kind_of,
    line_of,
    place_of,
    tables,
)

from prepare.core.forward.call import tensors_in
from prepare.core.utils.json_records import write_json
from prepare.core.utils.machine import environment
from prepare.core.utils.text import first_line
from prepare.pipeline import Pipeline
from prepare.stages import bench
from prepare.stages.tune import tune
from prepare.stages.tune.candidates import candidates
from prepare.steps.compile import isolation

FILE = Path(__file__).parent / "results" / "zoo.json"
LIBRARIES = (
    "dynamic-network-architectures",
    "monai",
    "diffusers",
    "transformers",
    "torchvision",
    "timm",
)
# A variant that takes so many times as long as the best one is timed in few rounds only.
REACH = 1.2
# Seconds: a bench that only warms up.
NO_TIME = 1e-3
# Calls of each variant for which the last bench has time: half go into rounds, the rest before and between.
CALLS = 28
_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}

Made = tuple[Callable[..., Any], Callable[[Any], Any] | None]


def variants(
    model: nn.Module, network: Network, case: dict[str, Any], recipes: dict[str, Any]
) -> Iterator[tuple[str, Callable[[], Made]]]:
    """Yield each variant by name with its builder: the unprepared model, its peers, and recipes."""
    yield UNPREPARED, lambda: (model, None)
    dtype, last = getattr(torch, case["precision"]), _LAST[network.rank]
    small = {"half": {"dtype": case["precision"]}, "input_format": {}}
    formatter = None if dtype == torch.float32 else Pipeline.from_config(small).format

    def peer(change: Callable[[nn.Module], nn.Module]) -> Callable[[], Made]:
        return lambda: (change(copy.deepcopy(model).to(dtype)), formatter)

    yield "torch's converters", peer(lambda m: _converted(m, last))
    yield "model.to(memory_format)", peer(lambda m: m.to(memory_format=last))
    if case["compile"]:
        yield "torch.compile", peer(_compiled)
        if not case["train"]:
            yield "torch.compile, frozen", peer(lambda m: _compiled(m, options={"freezing": True}))
    for name, steps in recipes.items():
        yield name, lambda steps=steps: (_prepared(model, steps, case), None)


def _converted(model: nn.Module, last: torch.memory_format) -> nn.Module:
    if last is torch.channels_last:
        return convert_conv2d_weight_memory_format(model, last)
    return convert_conv3d_weight_memory_format(model, last)


def _compiled(model: nn.Module, **how: Any) -> nn.Module:
    model.compile(**how, **isolation())  # as if no other variant had been compiled before
    return model


def _prepared(model: nn.Module, steps: dict[str, Any], case: dict[str, Any]) -> nn.Module:
    """Return a copy of the model, prepared as auto prepares it; raise if it is refused."""
    known = "error" if case["train"] else "ignore"
    return Pipeline.from_config(steps).apply(copy.deepcopy(model), known_issues=known)


def chosen(model: nn.Module, batch: Any, case: dict[str, Any], budget: float) -> dict[str, Any]:
    """Return the choice of prepare.tune without a compiler and, if compilers are timed, with one."""
    mode = "train" if case["train"] else "eval"
    found = {}
    for name, allow in _allowed(case).items():
        result = tune(model, batch, allow=allow, budget=budget, mode=mode)
        found[name] = {
            "name": result.winner,
            "steps": result.recipe,
            "seconds": result.seconds,
            "candidates": {row.name: row.status for row in result.rows},
        }
    return found


def _allowed(case: dict[str, Any]) -> dict[str, list[str]]:
    """Return what each auto may use besides float32 and eager."""
    words = {"float32": [], "bfloat16": ["bfloat16"], "float16": ["half"]}[case["precision"]]
    allowed = {AUTO: words}
    if case["compile"]:
        allowed[AUTO_COMPILED] = [*words, "compile"]
    return allowed


def exhaustive(model: nn.Module, case: dict[str, Any], choices: dict[str, Any]) -> dict[str, Any]:
    """Return every recipe that auto may choose without a compiler, and its choice with one."""
    mode = "train" if case["train"] else "eval"
    looked_at = copy.deepcopy(model).train(case["train"])
    allow = tuple(_allowed(case)[AUTO])
    _, *found = candidates(looked_at, declared={}, allow=allow, mode=mode)
    recipes = {each.name: each.steps for each in found}
    recipes |= {choice["name"]: choice["steps"] for choice in choices.values()}
    recipes.pop(UNPREPARED, None)
    return recipes


def measure(
    network: Network,
    case: dict[str, Any],
    *,
    budget: float,
    tune_budget: float,
    device: str = "cpu",
) -> dict[str, Any]:
    """Measure one case; return its entry in the raw file."""
    torch.manual_seed(0)
    model, batch = network.build().train(case["train"]).to(device), network.batch(device)
    warm_up(model, network, case.get("warm_up", 0))
    choices = chosen(model, batch, case, tune_budget)
    made, left_out = {}, {}
    for variant, make in variants(model, network, case, exhaustive(model, case, choices)):
        try:
            made[variant] = make()
        except Exception as error:  # recorded as part of the result
            left_out[variant] = f"{type(error).__name__}: {first_line(error)}"
    kept = {UNPREPARED, *(choice["name"] for choice in choices.values())}
    rows, found = timed(made, batch, case, budget, kept)
    for variant, reason in left_out.items():
        rows[variant] = {"verdict": "failed", "seconds": None, "ratio": None, "interval": None}
        rows[variant]["reason"] = reason
    for auto, choice in choices.items():
        rows[auto] = rows[choice["name"]]
    return {
        **case,
        "device": device,
        "tune_budget": tune_budget,
        "shape": network.shape,
        "rows": rows,
        "choices": choices,
        "aa": {"ratio": found.aa.ratio, "noise": found.aa.noise} if found.aa else None,
        "settings": found.settings,
        "environment": found.environment | {"libraries": _versions()},
        "notes": found.notes,
    }


def apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run `work` in a new process and return its result; raise if the process dies."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(work, *arguments).result()


def _measured(
    name: str, case: dict[str, Any], threads: int, how: dict[str, float]
) -> dict[str, Any]:
    """Measure one case of a network, given by name, in this process."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    return measure(NETWORKS[name], case, **how)


def warm_up(model: nn.Module, network: Network, steps: int) -> None:
    """Train for some steps of SGD: the first two output channels tell which of two inputs is brighter."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    device, bright = next(model.parameters()).device, torch.tensor([0, 1])
    for _ in range(steps):
        noise = torch.randn(2, *network.shape[1:])
        shift = (bright - 0.5).reshape(2, *[1] * (noise.dim() - 1))
        output = next(tensors_in(model((noise + shift).to(device))))
        logits = output[:, :2].reshape(2, 2, -1).mean(-1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, bright.to(device)).backward()
        optimizer.step()
    optimizer.zero_grad()


def timed(
    made: dict[str, Made], batch: Any, case: dict[str, Any], budget: float, kept: set[str]
) -> tuple[dict[str, dict[str, Any]], bench.Comparison]:
    """Return the row of each variant, and the last bench, of the variants close to the best one.

    A first bench only compiles and warms up. A third of the budget goes to all variants, as most of them
    are far behind; the variants in `kept` stay in any case. The last bench runs longer if the calls are too
    slow for an interval.
    """
    rows, there = {}, dict(made)
    for seconds, calls in ((NO_TIME, 0), (budget / 3, 0), (budget * 2 / 3, CALLS)):
        a_round = sum(row["seconds"] or 0.0 for name, row in rows.items() if name in there)
        found = bench.compare(
            {name: model for name, (model, _) in there.items()},
            batch,
            train=case["train"],
            budget=max(seconds, calls * a_round),
            format={name: form for name, (_, form) in there.items() if form},
        )
        for row in found.rows:
            rows[row.name] = {"verdict": row.verdict, "seconds": row.seconds, "ratio": row.ratio}
            rows[row.name] |= {"interval": row.ratio_interval, "reason": row.reason}
            rows[row.name] |= {"repeats": len(row.samples)}
        if seconds > NO_TIME:
            ratios = {row.name: row.ratio for row in found.rows if row.ratio}
            recipes = {name: ratio for name, ratio in ratios.items() if name not in PEERS}
            near = {*_in_reach(ratios), *_in_reach(recipes)}  # where compilers lead, recipes too
            there = {name: one for name, one in made.items() if name in near | kept}
    return rows, found


def _in_reach(ratios: dict[str, float]) -> list[str]:
    return [name for name, ratio in ratios.items() if ratio < REACH * min(ratios.values())]


def _versions() -> dict[str, str]:
    """Return the versions of the libraries of networks and peers."""
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def saved() -> list[dict[str, Any]]:
    """Return the cases in the raw file."""
    return json.loads(FILE.read_text())["cases"] if FILE.exists() else []


def cases(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every case that the options select."""
    for mode, precision, name in itertools.product(options.mode, options.precision, NETWORKS):
        if not any(part in name for part in options.only):
            continue
        case = {"train": mode == "train", "precision": precision}
        case["compile"] = options.compile if mode == "train" else not options.no_compile
        if options.warm_up:
            case["warm_up"] = options.warm_up
        yield name, case


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], help="parts of networks' names")
    parser.add_argument("--mode", nargs="+", choices=["eval", "train"], default=["eval", "train"])
    parser.add_argument(
        "--precision", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"]
    )
    parser.add_argument("--compile", action="store_true", help="compilers in training too")
    parser.add_argument("--no-compile", action="store_true", help="no compilers in evaluation")
    parser.add_argument(
        "--warm-up", type=int, default=0, metavar="STEPS", help="of training, before all else"
    )
    parser.add_argument("--budget", type=float, default=30.0, help="seconds to time a case")
    parser.add_argument(
        "--tune-budget", type=float, default=60.0, help="seconds for each choice of auto"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--again", action="store_true", help="also cases that have a file")
    parser.add_argument(
        "--table", action="store_true", help="say what the raw files hold, and stop"
    )
    options = parser.parse_args()
    if options.table:
        print(*tables(saved()), sep="\n")
        return
    here = place_of({"environment": environment()})
    found = {(_label(case["network"], case), place_of(case)): case for case in saved()}

    def is_there(name: str, case: dict[str, Any]) -> bool:
        known = found.get((_label(name, case), here))
        return known is not None and known["compile"] >= case["compile"] and has_intervals(known)

    todo = [one for one in cases(options) if options.again or not is_there(*one)]
    began = time.perf_counter()
    for number, (name, case) in enumerate(todo):
        label = _label(name, case)
        try:
            how = {"budget": options.budget, "tune_budget": options.tune_budget}
            made = apart(_measured, name, case, options.threads, how)
            found[label, here] = {"network": name} | made
            write_json(FILE, {"cases": list(found.values())})
            line = line_of(found[label, here])
        except Exception:
            traceback.print_exc()
            line = "failed"
        left = (time.perf_counter() - began) / (number + 1) * (len(todo) - number - 1)
        print(f"{number + 1}/{len(todo)} {label}: {line} ({left / 60:.0f} min left)", flush=True)


def _label(name: str, case: dict[str, Any]) -> str:
    return f"{name}, {kind_of(case)}"


if __name__ == "__main__":
    main()
