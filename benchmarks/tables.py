"""Write the tables of the pages from the raw files in benchmarks/results/.

    python benchmarks/tables.py [--check]

A block of a page between `<!-- results: NAME -->` and `<!-- end -->` is replaced by the table of the raw file
NAME.json; NAME may have a second word, for another table of the same file.
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

import layout_repair
import peers
import rewrites
import zoo_tables

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = Path(__file__).parent / "results"
PAGES = (
    *sorted(RESULTS.glob("*.md")),
    DOCS / "benchmarks.md",
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


def _mib(found: dict) -> str:
    return f"{found['copied_bytes'] / 2**20:,.1f} MiB"


TABLES: dict[str, Callable[[dict], list[str]]] = {
    "peers": peers.tables,
    "peers summary": peers.summary,
    "zoo": lambda found: zoo_tables.tables(found["cases"]),
    "zoo summary": lambda found: zoo_tables.overview(found["cases"]),
    "breaks": breaks,
    "breaks summary": breaks_summary,
    "layout_repair": layout_repair_table,
    "layout_repair summary": layout_repair_summary,
    "layout_repair_small": layout_repair_table,
    "layout_repair_small summary": layout_repair_summary,
    "layout_repair_small_quiet": layout_repair_table,
    "layout_repair_small_quiet summary": layout_repair_summary,
    "rewrites layers": rewrites.table_of_layers,
    "rewrites limits": rewrites.table_of_limits,
    "rewrites networks": rewrites.table_of_networks,
    "rewrites choices": rewrites.table_of_choices,
}


def updated(page: str) -> str:
    """Return the text of the page with each block written from the raw files."""

    def block(match: re.Match) -> str:
        path = RESULTS / f"{match[2].split()[0]}.json"
        found = json.loads(path.read_text()) if path.exists() else {}
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


def write_pages(*, check: bool = False) -> bool:
    """Write the tables of all pages; return whether a page differs. With `check`, write nothing."""
    differs = False
    for page in PAGES:
        before = page.read_text()
        after = updated(before)
        differs = differs or before != after
        if not check:
            page.write_text(after)
    return differs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    sys.exit(write_pages(check=check) and check)


if __name__ == "__main__":
    main()
