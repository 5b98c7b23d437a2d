"""Prepare every network of timm, and those of the zoo: strides as torch's converters give them, and breaks.

    python benchmarks/census.py [--only NAME] [--seconds 60] [--again DATE] [--observe 100] [--keep 900]

Each network is built without initialising its weights, in a process of its own, and prepared: the plan, the
strides of all parameters and buffers against `torch.nn.utils.convert_conv2d_weight_memory_format` and
`convert_conv3d_weight_memory_format`, the audit, and the breaks of the layout that are predicted as it is,
with `repair_layout`, and with the calls that `keep_layout` replaces. `--observe` compares predictions with
real forwards of the first networks that were examined, with small inputs. `--keep` runs as many networks as
it can in these seconds, with all calls that `keep_layout` replaces and without: `results/census_kept.jsonl`
has the number of calls, and the largest difference of the outputs.

A line of `results/census.jsonl` is a network, one of `results/census_observed.jsonl` a real forward. The
order is shuffled, always alike, so that what is there is a sample at any time; a second start goes on after
the last one. `--again` also replaces the lines with breaks that are older than this time.
`python benchmarks/tables.py` writes the tables. timm imports torchvision for its data loaders
only; where torchvision is not installed, its models are built without it.
"""

import argparse
import hashlib
import importlib.util
import json
import multiprocessing
import re
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from census_networks import more_networks, stand_in_for_torchvision
from torch import nn
from torch.nn.utils import convert_conv2d_weight_memory_format as convert_conv2d
from torch.nn.utils import convert_conv3d_weight_memory_format as convert_conv3d
from torch.utils._pytree import tree_leaves
from video_networks import REAL_NETWORKS, VIDEO_NETWORKS
from zoo_networks import NETWORKS, Network

from prepare.audit import audit
from prepare.core.forward.call import call_of
from prepare.core.model.module_tree import copy_tree
from prepare.core.utils.environment import environment
from prepare.core.utils.text import first_line
from prepare.pipeline import Pipeline
from prepare.stages.flow import Flow, observe, predict
from prepare.steps.keeping.choose_calls import choose_calls
from prepare.steps.keeping.rewrite_method import replaced_calls

RESULTS = Path(__file__).parent / "results"
FILE = RESULTS / "census.jsonl"
OBSERVED = RESULTS / "census_observed.jsonl"
KEPT = RESULTS / "census_kept.jsonl"
FORMATS: dict[str, Any] = {"conv2d_memory_format": {}, "conv3d_memory_format": {}}
HEAD = """\
| library | networks | examined | other strides | computed | breaks | repaired | kept | as observed |
|---|---|---|---|---|---|---|---|---|"""
STATES = ("as it is", "repaired", "kept")
# Files with lines that no step mends, and that docs/upstream/timm.md patches.
PATCHED = ("cait.py", "mvitv2.py", "halo_attn.py")
# Parameters of a network that is prepared with its tensors; a larger one is on the meta device.
# Bytes that a network may take beside what its process has: three copies of the largest, and activations.
LARGEST = 4 * 10**8
MEMORY = 14 * 2**30


def networks() -> dict[str, Network]:
    """Return all networks by name."""
    found = (
        NETWORKS | VIDEO_NETWORKS | {f"{name} (real size)": n for name, n in REAL_NETWORKS.items()}
    )
    found |= more_networks()
    if importlib.util.find_spec("timm"):
        with stand_in_for_torchvision():
            import timm

        found |= {f"timm {name}": Timm(name) for name in timm.list_models()}
    return found


class Timm:
    """A network of timm in its default configuration, with the input that it names."""

    def __init__(self, name: str) -> None:
        self.name = name

    def build(self) -> nn.Module:
        """Return the network with random weights."""
        import timm

        return timm.create_model(self.name)

    def batch(self, device: str = "cpu", side: int = 0) -> torch.Tensor:
        """Return two images of the network's size, or of this height and width."""
        import timm

        size = timm.get_pretrained_cfg(self.name, allow_unregistered=True)
        shape = size.input_size if size else (3, 224, 224)
        return (
            torch.randn(2, 3, side, side, device=device)
            if side
            else torch.randn(2, *shape, device=device)
        )


def uninitialised(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a network whose weights are what the memory held."""
    originals = {name: getattr(nn.init, name) for name in dir(nn.init) if name.endswith("_")}
    originals = {name: f for name, f in originals.items() if callable(f) and name[0] != "_"}
    try:
        for name in originals:
            setattr(nn.init, name, lambda tensor, *_, **__: tensor)
        return build().eval()
    finally:
        for name, function in originals.items():
            setattr(nn.init, name, function)


def strides(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the strides of all parameters and buffers by name."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: x.stride() for name, x in tensors.items() if x.layout == torch.strided}


def examine(name: str) -> dict[str, Any]:
    """Return what preparing the network shows."""
    network = networks()[name]
    torch.manual_seed(0)
    model, device = uninitialised(network.build), "cpu"
    if sum(x.numel() for x in model.parameters()) > LARGEST:
        model, device = model.to("meta"), "meta"
    batch = network.batch(device)
    original = {key: x.stride() for key, x in model.named_parameters()}
    pipeline = Pipeline.from_config(FORMATS | {"input_format": {}})
    theirs = copy_tree(model, lambda tensor: torch.empty_like(tensor, device="meta"))
    convert_conv2d(theirs, torch.channels_last)
    convert_conv3d(theirs, torch.channels_last_3d)
    expected = strides(theirs)
    del theirs
    plan = pipeline.plan(model)
    pipeline.apply(model, strict=False, known_issues="ignore")
    rows = audit(model, plan=plan).rows
    found: dict[str, Any] = {
        "device": device,
        "tensors": len(expected),
        "converted": sum(row.status == "converted" for row in rows),
        "ineffective": sum(row.status == "ineffective" for row in rows),
        "other strides": sum(expected[key] != own for key, own in strides(model).items()),
        "left to do": bool(pipeline.plan(model)),
        "moved": sum(original.get(key) != x.stride() for key, x in model.named_parameters()),
    }
    flow = predict(model, pipeline.format(batch))
    found |= {"convolutions": flow.summary["convolutions"], "as it is": figures(flow)}
    if flow.status == "ok" and flow.summary["breaks"]:
        both = repair(model)
        choice = choose_calls(model, both.format(batch), backward=False, prune=False)
        found["repaired"], found["kept"] = figures(choice.before), figures(choice.after)
    return found


def repair(model: nn.Module) -> Pipeline:
    """Prepare the network with `repair_layout`."""
    pipeline = Pipeline.from_config({"repair_layout": {}} | FORMATS | {"input_format": {}})
    pipeline.apply(model, strict=False, known_issues="ignore")
    return pipeline


def compare(name: str) -> dict[str, Any]:
    """Return the breaks of a prepared network, and of the repaired one, as predicted and as observed."""
    network = networks()[name]
    torch.manual_seed(0)
    model, flow = uninitialised(network.build), None
    pipeline = Pipeline.from_config(FORMATS | {"input_format": {}})
    pipeline.apply(model, strict=False, known_issues="ignore")
    # The smallest images that the network takes.
    sides = ({"side": side} for side in (64, 128)) if isinstance(network, Timm) else ()
    for options in (*sides, {}):
        batch = pipeline.format(network.batch(**options))
        flow = predict(model, batch)
        if flow.status == "ok":
            break
    found = {"shape": list(getattr(batch, "shape", ())), "predicted": figures(flow)}
    found["observed"] = figures(observe(model, batch))
    repair(model)
    found["repaired, predicted"] = figures(predict(model, batch))
    found["repaired, observed"] = figures(observe(model, batch))
    return found


def keep(name: str) -> dict[str, Any]:
    """Return what a network returns with all calls that `keep_layout` replaces, against itself without."""
    network = networks()[name]
    torch.manual_seed(0)
    model = network.build().eval()
    pipeline = Pipeline.from_config(FORMATS | {"input_format": {}})
    pipeline.apply(model, strict=False, known_issues="ignore")
    sides = ({"side": side} for side in (64, 128)) if isinstance(network, Timm) else ()
    for options in (*sides, {}):
        try:
            batch = pipeline.format(network.batch(**options))
            expected = outputs(model, batch)
            break
        except Exception:
            if not options:
                return {"unprepared": "it does not run"}
    Pipeline.from_config(FORMATS | {"keep_layout": {}}).apply(
        model, strict=False, known_issues="ignore"
    )
    found = {"calls": sum(len(replaced_calls(module)) for module in model.modules())}
    try:
        actual = outputs(model, batch)
    except Exception as error:
        return found | {"raises": f"{type(error).__name__}: {first_line(error)}"}
    pairs = list(zip(actual, expected, strict=True))
    alike = all(one.dtype == other.dtype and one.shape == other.shape for one, other in pairs)
    off = max((difference(one, other) for one, other in pairs), default=0.0)
    return found | {"tensors": len(pairs), "alike": alike, "off": off}


def outputs(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    """Return the tensors that a network returns."""
    torch.manual_seed(0)
    with torch.no_grad():
        call = call_of(batch)
        found = model(*call.args, **call.kwargs)
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two tensors, as a part of the largest value."""
    one, other = one.double().nan_to_num(), other.double().nan_to_num()
    return float((one - other).abs().max() / (other.abs().max() + 1e-30)) if other.numel() else 0.0


def figures(flow: Flow) -> dict[str, Any]:
    """Return the number of breaks, and of those with each operation and line."""
    if flow.status != "ok":
        return {"reason": flow.reason}
    breaks = [e for e in flow.events if e.kind == "break" and e.phase == "forward"]
    places: Counter[str] = Counter()
    for event in breaks:
        source = min((event.source.removeprefix(f"{folder}/") for folder in sys.path), key=len)
        places[f"{event.operation} in {event.type}{source and f' ({source})'}"] += event.count
    return {
        "breaks": flow.summary["breaks"],
        "copied_bytes": flow.summary["copied_bytes"],
        "places": dict(places.most_common()),
    }


def _child(function: Callable[[str], dict[str, Any]], name: str, seconds: int, pipe: Any) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        pipe.send(function(name))
    except Exception as error:  # recorded as part of the result
        pipe.send({"error": f"{type(error).__name__}: {first_line(error)}"})


def run(function: Callable[[str], dict[str, Any]], name: str, *, seconds: int) -> dict[str, Any]:
    """Call the function in a process of its own, within `seconds` of the CPU's time."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(function, name, seconds, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        process.join()
        is_late = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        return {"error": f"longer than {seconds} s" if is_late else "the process died"}
    finally:
        process.kill()
        process.join()


def read(path: Path = FILE) -> dict[str, dict[str, Any]]:
    """Return the results that are there, by network."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["network"]: row for row in map(json.loads, lines)}


def shuffled(names: Iterable[str]) -> list[str]:
    """Return the names in an order that is the same whichever others there are."""
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of the networks by library."""
    observed = read(OBSERVED)
    lines = [HEAD]
    for library in sorted({row["network"].split()[0] for row in rows}):
        own = [row for row in rows if row["network"].split()[0] == library]
        lines.append(f"| {library} | {len(own)} | {' | '.join(map(str, totals(own, observed)))} |")
    return lines


def places(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of the operations and lines that break with repairs and kept calls."""
    networks: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for row in rows:
        found = after(row, "kept").get("places", {})
        networks.update(found.keys())
        counts.update(found)
    lines = ["| operation and line | networks | breaks |", "|---|---|---|"]
    ordered = sorted(counts, key=lambda place: (-networks[place], -counts[place], place))
    return lines + [f"| `{place}` | {networks[place]} | {counts[place]} |" for place in ordered]


def costs(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of the five lines whose networks copy most with repairs and kept calls.

    A network counts for the line that breaks most often in it.
    """
    networks: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if after(row, "kept").get("breaks"):
            networks.setdefault(next(iter(row["kept"]["places"])), []).append(row)

    def copied(place: str, what: str) -> float:
        return sum(after(row, what)["copied_bytes"] for row in networks[place]) / 2**20

    titles = "| operation and line | networks | examined anew |"
    lines = [f"{titles} {' | '.join(STATES)} | cure |", "|---|---|---|---|---|---|---|"]
    for place in sorted(networks, key=lambda each: -copied(each, "kept"))[:5]:
        sizes = " | ".join(f"{copied(place, what):,.0f} MiB" for what in STATES)
        new = sum("date" in row for row in networks[place])
        cure = (
            "[patch](../../docs/upstream/timm.md)"
            if any(file in place for file in PATCHED)
            else "none yet"
        )
        lines.append(f"| `{place}` | {len(networks[place])} | {new} | {sizes} | {cure} |")
    breaks = [row for row in rows if after(row, "as it is").get("breaks")]
    new = sum("date" in row for row in breaks)
    return [*lines, "", f"Of {len(breaks)} networks with breaks, {new} were examined anew."]


def after(row: dict[str, Any], what: str) -> dict[str, Any]:
    """Return the figures of the network as it is, repaired or kept: all alike where nothing breaks."""
    return row.get(what, row.get("as it is", {}))


def totals(rows: list[dict[str, Any]], observed: dict[str, dict[str, Any]]) -> list[int | str]:
    """Return the figures of a line of the table."""
    ran = [observed[row["network"]] for row in rows if row["network"] in observed]
    ran = [row for row in ran if "observed" in row]
    equal = sum(
        row["predicted"] == row["observed"]
        and row.get("repaired, predicted") == row.get("repaired, observed")
        for row in ran
    )
    cells: list[int | str] = [
        sum("error" not in row for row in rows),
        sum(row.get("other strides", 0) for row in rows),
        sum(row.get("ineffective", 0) for row in rows),
    ]
    for what in STATES:
        breaks = [after(row, what).get("breaks", 0) for row in rows]
        cells += [f"{sum(breaks)} in {sum(map(bool, breaks))}"]
    return [*cells, f"{equal} of {len(ran)}"]


def fill(
    path: Path,
    names: list[str],
    function: Any,
    *,
    seconds: int,
    again: str = "",
    budget: float = float("inf"),
) -> None:
    """Write a line for each network that has none yet, or has breaks and is older than `again`."""
    end = time.monotonic() + budget
    rows, commit = read(path), environment()["git_commit"]
    for number, name in enumerate(names):
        row = rows.get(name, {})
        is_old = row.get("date", "") < again and after(row, "as it is").get("breaks")
        if time.monotonic() > end:
            return
        if not row or is_old:
            made = {"date": datetime.now(UTC).isoformat(timespec="minutes"), "commit": commit}
            rows[name] = {"network": name} | made | run(function, name, seconds=seconds)
            lines = "".join(json.dumps(row) + "\n" for row in rows.values())
            (written := path.with_suffix(".part")).write_text(lines)
            written.replace(path)
            print(f"{number + 1}/{len(names)} {json.dumps(rows[name])[:250]}", flush=True)


def main() -> None:
    """Examine all networks that have no result yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression for the names")
    parser.add_argument("--seconds", type=int, default=60, help="time of the CPU for one network")
    parser.add_argument("--again", default="", help="also those with breaks that are older")
    parser.add_argument("--observe", type=int, default=0, help="run this many networks for real")
    parser.add_argument(
        "--keep", type=float, default=0, help="compare kept calls for these seconds"
    )
    options = parser.parse_args()
    # Imported here, so that the processes of the networks do not import it again.
    names = shuffled(name for name in networks() if re.search(options.only, name))
    if options.keep:
        Pipeline.from_config(FORMATS).apply(
            nn.Conv2d(1, 1, 1), strict=False
        )  # imports what it needs
        fill(KEPT, names, keep, seconds=options.seconds, budget=options.keep)
        return
    if options.observe:
        done = read()
        names = [name for name in names if "error" not in done.get(name, {"error": ""})]
        fill(OBSERVED, names[: options.observe], compare, seconds=options.seconds)
        return
    fill(FILE, names, examine, seconds=options.seconds, again=options.again)
    (RESULTS / "census_environment.json").write_text(json.dumps(environment(), indent=1) + "\n")


if __name__ == "__main__":
    main()
