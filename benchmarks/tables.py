"""Write the tables of the pages from the raw files in benchmarks/results/.

    python benchmarks/tables.py [--check]

A block of a page between `<!-- results: NAME -->` and `<!-- end -->` is replaced by the table of the raw file
NAME.json, or of the lines of NAME.jsonl; NAME may have a second word, for another table of the same file.
With `--check` nothing is written, and the exit code is 1 if a page differs from the raw files.
"""

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import census
import first_command
import layout_repair
import prepare_cost_pairs
import published
import replay_zoo
import rewrites
import waiting
import zoo_tables

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = Path(__file__).parent / "results"
PAGES = (
    *sorted(RESULTS.glob("*.md")),
    DOCS / "benchmarks.md",
    DOCS / "decisions" / "keep-layout.md",
    DOCS / "gpus.md",
    DOCS / "rewrites.md",
)
CONTIGUOUS, AGAIN, WITHOUT, WITH = layout_repair.VARIANTS

_BLOCK = re.compile(r"(<!-- results: ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def layout_repair_table(found: dict) -> list[str]:
    """Return one line for each network, rank and dtype: geometric means over the batch sizes."""
    lines = _head(
        "network", "input", "dtype", "evaluation, without", "with", "training, without", "with"
    )
    cases = {case["case"]: case["seconds"] for case in found["cases"]}
    for group in dict.fromkeys(name.partition(" batch ")[0] for name in cases):
        name, rank, dtype = group.split()
        size = f"{found['sizes'][name][rank]}{'²' if rank == '2-d' else '³'}"
        cells = [
            _mean(
                [s for n, s in cases.items() if n.startswith(group) and n.endswith(mode)], variant
            )
            for mode in ("evaluation", "training")
            for variant in (WITHOUT, WITH)
        ]
        lines.append(_row(f"{name} {rank}", size, dtype, *cells))
    return [*lines, "", *layout_repair_summary(found), *_layout_repair_exceptions(found)]


def layout_repair_summary(found: dict) -> list[str]:
    """Return the geometric means over all cases, in a sentence."""
    of = {
        variant: f"{mean:.2f} (worst {worst:.2f})"
        for variant, (mean, worst) in layout_repair.summary(found["cases"]).items()
    }
    count = len(found["cases"])
    means = f"{of[WITHOUT]} without the repair and {of[WITH]} with it; A/A {of[AGAIN]}"
    place = f"{found['threads']} threads, torch {found['torch']}"
    return [f"Over all {count} cases the geometric mean is {means}. {place}."]


def _layout_repair_exceptions(found: dict) -> list[str]:
    """Return the cases that are slower with the repair, and those without a ratio."""
    lines = []
    over = sorted(
        (layout_repair.ratio(case["seconds"], WITH), case["case"]) for case in found["cases"]
    )
    slower = [f"{name} {ratio:.2f}" for ratio, name in reversed(over) if ratio > 1.02]
    if slower:
        lines += [
            "",
            f"Slower than contiguous by more than 2 % with the repair: {'; '.join(slower)}.",
        ]
    if found["not_run"]:
        names = "; ".join(case["case"] for case in found["not_run"])
        lines += ["", f"torch cannot run these in contiguous, so they have no ratio: {names}."]
    return lines


def breaks(found: dict) -> list[str]:
    """Return one line for each network that loses the layout, and a list of the others."""
    titles = ["network", "lost", "copied", "because of"]
    titles += ["repaired: lost", "copied", "kept: lost", "copied"]
    rows = {name: row for name, row in found["networks"].items() if "reason" not in row}
    with_contiguous = any("contiguous" in row for row in rows.values())
    lines = _head(*titles, *(["contiguous: copied"] if with_contiguous else []))
    for name, row in rows.items():
        before = row["as it is"]
        if before["breaks"]:
            causes = ", ".join(f"{count} {cause}" for cause, count in before["by_cause"].items())
            cells = [str(before["breaks"]), _mib(before), causes]
            for after in (row["repaired"], row["kept"]):
                cells += [str(after["breaks"]), _mib(after)]
            cells += [_mib(row["contiguous"])] if with_contiguous else []
            lines.append(_row(name, *cells))
    kept = [name for name, row in rows.items() if not row["as it is"]["breaks"]]
    lines += ["", f"Not lost in {len(kept)} of {len(rows)} networks: {', '.join(kept)}."]
    statuses = [row["verified"]["status"] for row in rows.values() if "verified" in row]
    passed = f"{statuses.count('pass')} of {len(statuses)}"
    lines += [
        "",
        f"Where calls were replaced, outputs and gradients passed their verification: {passed}.",
    ]
    failed = [
        f"{name} ({row['reason']})" for name, row in found["networks"].items() if "reason" in row
    ]
    return [*lines, *([f"Not predicted: {'; '.join(failed)}."] if failed else [])]


def breaks_summary(found: dict) -> list[str]:
    """Return how many networks lose the layout and what is copied for it, as a table."""
    networks = [row for row in found["networks"].values() if "reason" not in row]
    lines = _head(f"of {len(networks)} networks", "lose the layout", "breaks", "copied")
    names = {
        "as it is": "channels-last",
        "repaired": "channels-last and `repair_layout`",
        "kept": "channels-last, `repair_layout` and `keep_layout`",
    }
    for key, title in names.items():
        rows = [row[key] for row in networks]
        total = {"copied_bytes": sum(row["copied_bytes"] for row in rows)}
        losing = sum(row["breaks"] > 0 for row in rows)
        breaks_in_all = sum(row["breaks"] for row in rows)
        lines.append(_row(title, str(losing), str(breaks_in_all), _mib(total)))
    return lines


def keep_time_table(found: dict) -> list[str]:
    """Return one line for each decoder: its time ratios to contiguous, and what is copied."""
    lines = _head("decoder", "repaired", "kept", "A/A", "copied: repaired", "kept")
    for name, network in found["networks"].items():
        times = [_with_interval(network["rows"][row]) for row in ("repaired", "kept", "A/A")]
        copied = [_mib({"copied_bytes": count}) for count in network["copied_bytes"]]
        lines.append(_row(name, *times, *copied))
    statuses = [status for row in found["networks"].values() for status in row["verified"].values()]
    passed = f"{statuses.count('pass')} of {len(statuses)}"
    size, threads = found["size"], found["environment"]["threads"]
    text = f"Five frames of {size} x {size}, batch 2, {threads} threads, {found['busy']} busy processes"
    return [*lines, "", f"{text}; verified, outputs and gradients: {passed} pass."]


def _with_interval(row: dict) -> str:
    low, high = row["interval"]
    return f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"


def keep_cost_table(found: dict) -> list[str]:
    """Return what a forward takes with the call as it is, rewritten, and in a mode."""
    times = found["microseconds"]
    head = _head("as it is", "`cat` rewritten", "in a mode")
    return [*head, _row(*(f"{times[key]:.0f} us" for key in ("as it is", "rewritten", "mode")))]


def _mib(found: dict) -> str:
    return f"{found['copied_bytes'] / 2**20:,.1f} MiB"


def prepare_cost(found: dict) -> list[str]:
    lines = _head("", "seconds", "apply / this", "extra GB")
    base = found["copies"]["apply"]["seconds"]
    for name, result in found["copies"].items():
        seconds, extra = result["seconds"], result["extra_bytes"] / 1e9
        lines.append(_row(name, f"{seconds:.2f}", f"{base / seconds:.2f}", f"{extra:.2f}"))
    return lines


def prepare_cost_of_many(found: dict) -> list[str]:
    few, many = found["many"]["2000"], found["many"]["20000"]
    plan, audit = (f"{many[k]:.2f} s, {many[k] / few[k]:.1f} times" for k in ("plan", "audit"))
    return [
        f"`plan` of 20,000 modules takes {plan} that of 2,000; `audit` {audit}. `pipeline.format` of a batch",
        f"that needs nothing takes {found['format_seconds'] * 1e6:.1f} microseconds.",
    ]


def prepare_cost_busy(found: dict) -> list[str]:
    """Return one line for each size, rank and dtype: the ratios to torch's chain."""
    lines = _head("weights", "chain, ms", *prepare_cost_pairs.VARIANTS, "rounds")
    for case in found["cases"]:
        seconds = case["seconds"]
        chain = seconds[prepare_cost_pairs.CHAIN]
        cells = [f"{prepare_cost_pairs.ratio(seconds, v):.2f}" for v in prepare_cost_pairs.VARIANTS]
        name = f"{case['megabytes']} MB, {case['rank']}-d, {case['dtype']}"
        lines.append(_row(name, f"{statistics.median(chain) * 1e3:.0f}", *cells, str(len(chain))))
    place = f"{found['threads']} threads, threads wait: {found['waiting']}"
    return [*lines, "", f"Beside {found['busy']} busy processes; {place}, torch {found['torch']}."]


def waiting_table(found: dict) -> list[str]:
    """Return one line for each setting: the ratios of mean times to the default, by operator."""
    lines = []
    for busy, rounds in found["busy"].items():
        title = f"beside {busy} busy processes" if int(busy) else "no busy process of ours"
        lines += ["", *_head(title, "all", *rounds[0]["default"])]
        for setting in rounds[0]:
            ratios = list(waiting.ratios(rounds, setting).values())
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            lines.append(_row(setting, *(f"{ratio:.2f}" for ratio in (mean, *ratios))))
    return lines[1:]


def first_command_table(found: dict) -> list[str]:
    """Return one line for each number of busy processes: medians in seconds."""
    lines = _head("busy processes", *(f"{name}, s" for name in first_command.COLUMNS), "runs")
    for load, runs in found["busy"].items():
        seconds = first_command.medians(runs).values()
        lines.append(_row(load, *(f"{value:.1f}" for value in seconds), str(len(runs))))
    return lines


def startup(found: dict) -> list[str]:
    lines = _head("command", "ms", "ratio")
    medians = {
        name: statistics.median(wall for wall, _ in pairs)
        for name, pairs in found["seconds"].items()
    }
    base = next(iter(medians.values()))
    for name, seconds in medians.items():
        lines.append(_row(name, f"{seconds * 1e3:.0f}", f"{seconds / base:.2f}"))
    return lines


def segmentation(found: dict) -> list[str]:
    """Return the final loss and Dice of both trainings."""
    lines = _head("", "loss, mean of the last 20 steps", "Dice, held out")
    for name, losses in found["losses"].items():
        last = statistics.fmean(losses[-20:])
        lines.append(_row(name, f"{last:.4f}", f"{found['dice'][name]:.4f}"))
    ratio = found["seconds"]["prepared"] / found["seconds"]["unprepared"]
    said = (
        f"{found['steps']} steps; the median prepared step took {ratio:.2f} of the unprepared one."
    )
    return [*lines, "", said]


def sensitivity_table(found: dict) -> list[str]:
    """Return one line for each kind of network and precision: what was reported and what was found."""
    lines = _head(
        "networks", "precision", "count", "clean pass", "whole", "alone", "found of planted"
    )
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in found["rows"]:
        kind = "with kinks" if row["kinks"] else "smooth"
        groups.setdefault((kind, row["precision"]), []).append(row)
    for (kind, precision), rows in groups.items():
        whole = [
            max(size for what, size in row["whole"].items() if what.endswith("r gradients"))
            for row in rows
            if any(what.endswith("r gradients") for what in row["whole"])
        ]
        alone = [row["gradients"][0] for row in rows if row["gradients"]]
        clean = sum(row["clean"] == "pass" for row in rows)
        cells = [
            precision,
            str(len(rows)),
            str(clean),
            _percents(whole),
            _percents(alone),
            _planted(rows),
        ]
        lines.append(_row(kind, *cells))
    return lines


def _percents(fractions: list[float]) -> str:
    return f"{statistics.median(fractions):.2%}, worst {max(fractions):.2%}" if fractions else ""


def _planted(rows: list[dict]) -> str:
    """Return `1.0 %: 24 of 24 networks` for each planted fraction: all its errors found."""
    clean = [row for row in rows if row["clean"] == "pass"]
    planted = [(row["network"], item) for row in clean for item in row["planted"]]
    cells = []
    for fraction in sorted({item["fraction"] for _, item in planted}, reverse=True):
        of = [(name, item) for name, item in planted if item["fraction"] == fraction]
        tried = {name for name, _ in of}
        missed = {name for name, item in of if item["status"] != "fail"}
        cells.append(f"{fraction:.1%}: {len(tried - missed)} of {len(tried)}")
    return "; ".join(cells)


TABLES: dict[str, Callable[[dict], list[str]]] = {
    "census": lambda found: census.table(found["rows"]),
    "census places": lambda found: census.places(found["rows"]),
    "census costs": lambda found: census.costs(found["rows"]),
    "segmentation": segmentation,
    "zoo": lambda found: zoo_tables.tables(found["cases"]),
    "zoo summary": lambda found: zoo_tables.overview(found["cases"]),
    "breaks": breaks,
    "breaks summary": breaks_summary,
    "keep_time": keep_time_table,
    "keep_time_busy": keep_time_table,
    "keep_cost": keep_cost_table,
    "layout_repair": layout_repair_table,
    "layout_repair summary": layout_repair_summary,
    "prepare_cost_2048": prepare_cost,
    "prepare_cost_1024": prepare_cost,
    "prepare_cost_1024 many": prepare_cost_of_many,
    "prepare_cost_busy_0": prepare_cost_busy,
    "prepare_cost_busy_2": prepare_cost_busy,
    "layout_repair_small": layout_repair_table,
    "layout_repair_small summary": layout_repair_summary,
    "layout_repair_small_quiet": layout_repair_table,
    "layout_repair_small_quiet summary": layout_repair_summary,
    "waiting": waiting_table,
    "startup": startup,
    "first_command": first_command_table,
    "sensitivity": sensitivity_table,
    "replay": lambda found: replay_zoo.table(found["rows"]),
    "rewrites layers": rewrites.table_of_layers,
    "rewrites limits": rewrites.table_of_limits,
    "rewrites networks": rewrites.table_of_networks,
    "rewrites choices": rewrites.table_of_choices,
    "published": published.table,
    "published kinds": published.table_of_kinds,
    "published errors": published.table_of_errors,
    "published structures": published.table_of_structures,
    "published threads": published.table_of_threads,
}


def updated(page: str) -> str:
    """Return the text of the page with each block written from the raw files."""

    def block(match: re.Match) -> str:
        path = RESULTS / f"{match[2].split()[0]}.json"
        rows = path.with_suffix(".jsonl")
        if not path.exists() and not rows.exists():  # not measured yet
            return match[0]
        if path.exists():
            found = json.loads(path.read_text())
        else:
            found = {"rows": [json.loads(line) for line in rows.read_text().splitlines()]}
        return match[1] + "\n".join(["", *TABLES[match[2]](found), ""]) + "\n" + match[3]

    return _BLOCK.sub(block, page)


def _head(*titles: str) -> list[str]:
    return [_row(*titles), "|" + "---|" * len(titles)]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _mean(cases: list[dict], variant: str) -> str:
    """Return the geometric mean of a variant's ratios, or nothing if there are none."""
    ratios = [layout_repair.ratio(seconds, variant) for seconds in cases]
    return f"{math.exp(statistics.fmean(map(math.log, ratios))):.2f}" if ratios else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check, differs = parser.parse_args().check, False
    for page in PAGES:
        before = page.read_text()
        after = updated(before)
        differs = differs or before != after
        if not check:
            page.write_text(after)
    sys.exit(check and differs)


if __name__ == "__main__":
    main()
