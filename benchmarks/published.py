"""Join the speeds that timm's author publishes for NCHW and NHWC with the breaks that we predict.

    python benchmarks/published.py FOLDER [--networks]

FOLDER holds the pairs of CSV files of `results/` in huggingface/pytorch-image-models: the same networks, on
one card, in both layouts. A ratio is the speed in NHWC over that in NCHW, where batch and image size agree;
of the variants of a name (`net.tag`) the first is kept. `--networks` first counts, for each network that
has no line in `results/published_networks.jsonl`, its multiplications by kind, on the meta device.

Written are `results/published.csv` (a line for each ratio of a network with at least 10 convolutions),
`results/published.json` (the figures of the page; `python benchmarks/tables.py` writes it), the quantiles
that `prepare/stages/flow/published.yaml` holds for the tool, and the picture of the page.

The kinds of networks were chosen by the error for families that were left out: the expectation of a network
is the median over the networks of its kind in all *other* families (a file of timm is a family). The half
interval of a kind is the narrowest one around the median, of quantiles 25 to 75 % or wider, that holds at
least half of them.
"""

import argparse
import csv
import json
import math
import statistics
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import census
import torch
from census_networks import stand_in_for_torchvision
from torch.utils._python_dispatch import TorchDispatchMode

from prepare.app.report.charts import write_charts
from prepare.core.document import Bar, Bars
from prepare.stages.flow.published import FEWEST, FILE, LIKE, likeness
from prepare.stages.flow.torch_operators import multiplications

RESULTS = Path(__file__).parent / "results"
TABLE, FIGURES, NETWORKS = (
    RESULTS / f"published{end}" for end in (".csv", ".json", "_networks.jsonl")
)
THREADS = RESULTS / "published.yaml"
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "gpus.svg"
SOURCE = (
    "huggingface/pytorch-image-models aa4b5850, results/ (Apache-2.0); "
    "who measured it, and with which clocks, is not said"
)
# The files of a pair: the rest of their names, card, torch and mode, in the order of versions.
PAIRS = {
    "train-amp-{}-pt112-cu113-rtx3090": ("RTX 3090", "1.12", "training"),
    "infer-amp-{}-pt113-cu117-rtx3090": ("RTX 3090", "1.13", "inference"),
    "infer-amp-{}-pt210-cu121-rtx3090": ("RTX 3090", "2.1", "inference"),
    "infer-amp-{}-pt240-cu124-rtx3090": ("RTX 3090", "2.4", "inference"),
    "infer-amp-{}-pt240-cu124-rtx4090": ("RTX 4090", "2.4", "inference"),
}
COLUMNS = ("network", "card", "torch", "mode", "precision", "batch", "size", "ratio")
# Fewer networks than these have no quantiles.
_FEW = 8
# The part of networks that an interval must hold.
HALF = 0.5
_WIDTHS = tuple(percent / 100 for percent in range(25, 4, -1))

Row = dict[str, Any]
Kind = Callable[[Row], str]


def share(row: Row, *kinds: str) -> float:
    """Return the part of these kinds in all multiplications of a network."""
    return sum(row["work"].get(kind, 0) for kind in kinds) / max(sum(row["work"].values()), 1)


def _layout(row: Row) -> str:
    return "breaks" if row["breaks"] else "no breaks"


def _structure(row: Row) -> str:
    if share(row, "product") >= 0.2:
        return "products"
    if share(row, "grouped") >= 0.1:
        return "grouped"
    return "depthwise" if share(row, "depthwise") >= 0.01 else "dense"


# Ways to sort the networks into kinds.
CANDIDATES: dict[str, Kind] = {
    "all alike": lambda _: "",
    "breaks or none": _layout,
    "products, else breaks or none": lambda row: likeness(row["breaks"], row["work"]),
    "products, grouped, else breaks or none": lambda row: likeness(
        row["breaks"], row["work"], training=True
    ),
    "structure: products, grouped, depthwise, dense": _structure,
    "structure, and breaks or none": lambda row: f"{_structure(row)}, {_layout(row)}",
}
CHOSEN = {
    "inference": "products, else breaks or none",
    "training": "products, grouped, else breaks or none",
}


class Counting(TorchDispatchMode):
    """Counts the multiplications of a forward by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (
            kwargs or {}
        )
        kind, count = multiplications(func, named, args, kwargs or {}, output)
        if kind:
            self.work[kind] += count
        return output


def count_networks(names: Iterable[str]) -> None:
    """Add a line for each network of timm that has none: its family and its multiplications."""
    done = census.read(NETWORKS)
    with NETWORKS.open("a") as file:
        for name in names:
            if name not in done:
                network = census.Timm(name)
                try:
                    with torch.device("meta"):
                        model = network.build().eval()
                    with torch.no_grad(), Counting() as counting:
                        model(network.batch("meta"))
                except Exception as error:  # recorded as part of the result
                    print(f"{name}: {error}", file=sys.stderr)
                    continue
                family = type(model).__module__.rpartition(".")[2]
                row = {"network": name, "family": family, "work": dict(counting.work)}
                file.write(json.dumps(row) + "\n")
                file.flush()


def speeds(path: Path) -> dict[str, tuple[float, float, float]]:
    """Return samples per second, batch and image size of each network in a file."""
    found: dict[str, tuple[float, float, float]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            key = "train" if "train_batch_size" in row else "infer"
            cells = [row[f"{key}_{name}"] for name in ("samples_per_sec", "batch_size", "img_size")]
            if all(cells):
                speed, batch, size = map(float, cells)
                found.setdefault(row["model"], (speed, batch, size))
    return found


def ratios(folder: Path) -> Iterator[Row]:
    """Yield a row for each network of a pair that was measured alike in both layouts."""
    for file, (card, version, mode) in PAIRS.items():
        nchw, nhwc = (
            speeds(folder / f"benchmark-{file.format(layout)}.csv") for layout in ("nchw", "nhwc")
        )
        seen = set()
        for name, (speed, *how) in nchw.items():
            base = name.partition(".")[0]
            if name in nhwc and list(nhwc[name][1:]) == how and base not in seen:
                seen.add(base)
                cells = (
                    base,
                    card,
                    version,
                    mode,
                    "AMP",
                    int(how[0]),
                    int(how[1]),
                    nhwc[name][0] / speed,
                )
                yield dict(zip(COLUMNS, cells, strict=True))


def joined(rows: Iterable[Row]) -> list[Row]:
    """Return the ratios of convolutional networks, with what the census predicts of each."""
    predicted = census.read()
    found = []
    for row in rows:
        of = predicted.get(f"timm {row['network']}", {})
        if "as it is" in of and "breaks" in of["as it is"] and of["convolutions"] >= FEWEST:
            found.append(
                {
                    **row,
                    "breaks": of["as it is"]["breaks"],
                    "copied": of["as it is"]["copied_bytes"],
                }
            )
    return found


def quantile(values: list[float], part: float) -> float:
    """Return a quantile, by linear interpolation."""
    ordered, place = sorted(values), part * (len(values) - 1)
    low = math.floor(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


class LeftOut(NamedTuple):
    """A network, the logarithm of its ratio, and those of its kind in all other families, sorted."""

    kind: str
    value: float
    like: list[float]

    @property
    def error(self) -> float:
        """The distance from the median of the others."""
        return abs(self.value - statistics.median(self.like))

    def is_held(self, width: float) -> bool:
        """Return whether it is between two quantiles of the others."""
        return quantile(self.like, width) <= self.value <= quantile(self.like, 1 - width)


def left_out(rows: list[Row], kind: Kind) -> list[LeftOut]:
    """Return each network with those of the families that are not its own; all, if few are of its kind."""
    found = []
    for family in sorted({row["family"] for row in rows}):
        others: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            if row["family"] != family:
                others[kind(row)].append(math.log(row["ratio"]))
        everything = sorted(value for values in others.values() for value in values)
        for name, values in others.items():
            others[name] = sorted(values) if len(values) >= _FEW else everything
        found += [
            LeftOut(kind(row), math.log(row["ratio"]), others.get(kind(row), everything))
            for row in rows
            if row["family"] == family
        ]
    return found


def half_interval(cases: list[LeftOut]) -> tuple[float, float]:
    """Return the narrowest width that holds half, else the widest, and the part that it holds."""
    held = {width: statistics.fmean(case.is_held(width) for case in cases) for width in _WIDTHS}
    width = next((width for width in _WIDTHS if held[width] >= HALF), _WIDTHS[-1])
    return width, held[width]


def figures(every: list[Row], rows: list[Row]) -> dict[str, Any]:
    """Return what the page and the tool say of all pairs; in `rows` the multiplications are counted."""
    pairs, candidates = [], {name: [] for name in CANDIDATES}
    for card, version, mode in PAIRS.values():
        own = [
            row for row in rows if (row["card"], row["torch"], row["mode"]) == (card, version, mode)
        ]
        for name, kind in CANDIDATES.items():
            candidates[name].append(statistics.fmean(case.error for case in left_out(own, kind)))
        chosen = CANDIDATES[CHOSEN[mode]]
        groups: dict[str, list[float]] = defaultdict(list)
        for row in own:
            groups[chosen(row)].append(row["ratio"])
        cases, kinds = left_out(own, chosen), {}
        for name in LIKE:
            if len(groups[name]) >= _FEW:
                width, held = half_interval([case for case in cases if case.kind == name])
                kinds[name] = {
                    "networks": len(groups[name]),
                    "interval": width,
                    "held": round(held, 3),
                    "low": round(quantile(groups[name], width), 3),
                    "median": round(statistics.median(groups[name]), 3),
                    "high": round(quantile(groups[name], 1 - width), 3),
                    "slower": round(statistics.fmean(value < 0.95 for value in groups[name]), 3),
                }
        pair = {"card": card, "torch": version, "mode": mode, "networks": len(own)}
        pair["kinds"] = kinds
        alike = [
            row
            for row in every
            if (row["card"], row["torch"], row["mode"]) == (card, version, mode)
        ]
        pairs.append(pair | {"by_breaks": _by_breaks(alike)})
    errors = {name: [round(value, 3) for value in values] for name, values in candidates.items()}
    structures = {
        name: _by_structure([r for r in rows if r["mode"] == name])
        for name in ("inference", "training")
    }
    counted = len({row["network"] for row in rows}), len({row["network"] for row in every})
    return {
        "source": SOURCE,
        "counted": counted,
        "pairs": pairs,
        "errors": errors,
        "structures": structures,
    }


def _by_breaks(rows: list[Row]) -> dict[str, Any]:
    found = {}
    for name in ("no breaks", "breaks"):
        values = [row["ratio"] for row in rows if _layout(row) == name]
        slower = statistics.fmean(value < 0.95 for value in values)
        found[name] = {
            "networks": len(values),
            "median": round(statistics.median(values), 3),
            "slower": round(slower, 3),
        }
    return found


def _by_structure(rows: list[Row]) -> list[Row]:
    """Return medians by structure, layout, card and torch, of those with enough networks."""
    groups: dict[tuple, list[float]] = defaultdict(list)
    for row in rows:
        groups[_structure(row), _layout(row), row["card"], row["torch"]].append(row["ratio"])
    return [
        {"structure": structure, "layout": layout, "card": card, "torch": version, "networks": len(values),
         "median": round(statistics.median(values), 2)}
        for (structure, layout, card, version), values in sorted(groups.items())
        if len(values) >= _FEW
    ]  # fmt: skip


def write(every: list[Row], rows: list[Row]) -> None:
    """Write the table, the figures, the quantiles of the tool, and the picture."""
    lines = [
        f"# speed in NHWC over speed in NCHW, AMP, on networks with at least {FEWEST} convolutions; {SOURCE}"
    ]
    lines += [",".join(COLUMNS)]
    lines += [
        ",".join(f"{row[c]:.4f}" if c == "ratio" else str(row[c]) for c in COLUMNS) for row in every
    ]
    TABLE.write_text("\n".join(lines) + "\n")
    found = figures(every, rows)
    FIGURES.write_text(json.dumps(found, indent=1) + "\n")
    FILE.write_text("\n".join(_quantiles(found)) + "\n")
    bars = [
        Bars(title=f"{LIKE[kind][0].upper()}{LIKE[kind][1:]}", rows=(
            Bar(label="NCHW", value=1.0, text="1.00", mark="baseline"),
            *(_bar(pair, pair["kinds"][kind]) for pair in found["pairs"] if kind in pair["kinds"])))
        for kind in LIKE
    ]  # fmt: skip
    write_charts(bars, PICTURE)


def _bar(pair: Row, kind: Mapping[str, Any]) -> Bar:
    return Bar(
        label=f"{pair['card']}, torch {pair['torch']}, {pair['mode']}, {kind['networks']} networks",
        value=kind["median"],
        interval=(kind["low"], kind["high"]),
        text=f"{kind['median']:.2f} ({kind['low']:.2f} to {kind['high']:.2f})",
        mark="good" if kind["low"] > 1 else "same",
    )


def _quantiles(found: dict[str, Any]) -> Iterator[str]:
    yield "# Speed in channels-last over speed in contiguous, by others; from benchmarks/published.py."
    yield f"source: {json.dumps(found['source'])}"
    yield "pairs:"
    for pair in found["pairs"]:
        # Of other kinds there are too few networks to say anything of another.
        held = {name: kind for name, kind in pair["kinds"].items() if kind["held"] >= HALF}
        kinds = {
            name: {key: kind[key] for key in ("networks", "low", "median", "high")}
            for name, kind in held.items()
        }
        head = {key: pair[key] for key in ("card", "torch", "mode")}
        head["held"] = min(kind["held"] for kind in held.values())
        yield f"- {json.dumps({**head, 'kinds': kinds})}"


def table(found: dict[str, Any]) -> list[str]:
    """Return the table of all pairs, by predicted breaks."""
    lines = [
        "| card, torch, mode | without breaks | median | 5 % slower | with breaks | median | 5 % slower |"
    ]
    lines += ["|" + "---|" * 7]
    for pair in found["pairs"]:
        cells = [f"{pair['card']}, {pair['torch']}, {pair['mode']}"]
        for kind in pair["by_breaks"].values():
            cells += [
                str(kind["networks"]),
                f"{kind['median']:.2f}",
                f"{kind['slower']:.0%}".replace("%", " %"),
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def table_of_kinds(found: dict[str, Any]) -> list[str]:
    """Return the table of the kinds that the tool tells apart, with what their intervals held."""
    lines = [
        f"| card, torch, mode | {' | '.join(LIKE.values())} |",
        "|" + "---|" * (len(LIKE) + 1),
    ]
    for pair in found["pairs"]:
        cells = [f"{pair['card']}, {pair['torch']}, {pair['mode']}"]
        for name in LIKE:
            kind = pair["kinds"].get(name)
            text = "{median:.2f} ({low:.2f} to {high:.2f}), {networks}, {held:.0%}"
            cells.append(text.format(**kind).replace("%", " %") if kind else "-")
        lines.append(f"| {' | '.join(cells)} |")
    counted, every = found["counted"]
    said = f"The multiplications of {counted} of the {every} networks were counted."
    lines += ["", said]
    return lines


def table_of_errors(found: dict[str, Any]) -> list[str]:
    """Return the table of the errors for families that were left out."""
    heads = [f"{pair['card']}, {pair['torch']}, {pair['mode']}" for pair in found["pairs"]]
    lines = [f"| kinds | {' | '.join(heads)} |", "|" + "---|" * (len(heads) + 1)]
    for name, errors in found["errors"].items():
        cells = (f"{math.expm1(error):.0%}".replace("%", " %") for error in errors)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def table_of_structures(found: dict[str, Any]) -> list[str]:
    """Return the medians by structure and predicted breaks."""
    lines = [
        "| mode | networks with | layout | card, torch | networks | median |",
        "|" + "---|" * 6,
    ]
    for mode, rows in found["structures"].items():
        for row in rows:
            head = (
                f"| {mode} | {row['structure']} | {row['layout']} | {row['card']}, {row['torch']} |"
            )
            lines.append(f"{head} {row['networks']} | {row['median']:.2f} |")
    return lines


def table_of_threads(_: dict[str, Any]) -> list[str]:
    """Return the table of single figures from public threads."""
    from prepare.core.utils import plain_yaml

    rows: Any = plain_yaml.read(THREADS.read_bytes(), THREADS.name, remedy="").value
    lines = ["| what | card | contiguous | channels-last | faster by | said |", "|" + "---|" * 6]
    for row in rows:
        said = f"[{row['date']}]({row['link']})" + (f"; {row['note']}" if row["note"] else "")
        cells = (
            row["what"],
            row["card"],
            row["before"] or "-",
            row["after"] or "-",
            f"{row['ratio']:.2f}x",
            said,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="with the pairs of CSV files")
    parser.add_argument(
        "--networks", action="store_true", help="count the multiplications of new networks"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = joined(ratios(options.folder))
    if options.networks:
        with stand_in_for_torchvision():
            count_networks(census.shuffled({row["network"] for row in rows}))
    known = census.read(NETWORKS)
    write(
        rows,
        [
            row | {key: known[row["network"]][key] for key in ("family", "work")}
            for row in rows
            if row["network"] in known
        ],
    )


if __name__ == "__main__":
    main()
