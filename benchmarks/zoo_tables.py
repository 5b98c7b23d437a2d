"""Tables and sentences in Markdown for the cases that `zoo.py` has timed."""

import itertools
import statistics
from typing import Any

UNPREPARED = "unprepared"
AUTO, AUTO_COMPILED = "auto", "auto, compiler allowed"
PEERS = (
    "torch's converters",
    "model.to(memory_format)",
    "torch.compile",
    "torch.compile, frozen",
)
# Statuses that prepare.tune gives a candidate.
NOT_TO_BE_CHOSEN = ("wrong", "cannot tell", "failed")
# Rounds; with fewer, a variant is only known to be far behind.
ENOUGH = 6
# Ratios within this factor count as equal.
NEAR = 1.03


def overview(found: list[dict[str, Any]]) -> list[str]:
    """Return the geometric means of four variants for each kind of case and processor, as a table."""
    names = (AUTO, AUTO_COMPILED, "torch's converters", "torch.compile")
    lines = ["| " + " | ".join(("", "processor", *names)) + " |", "|---" * (len(names) + 2) + "|"]
    for cases in _groups(found):
        cells = [_geometric_mean(cases, name) for name in names]
        what = kind_of(cases[0]).replace(" allowed", "")
        place = place_of(cases[0]).replace("(R)", "").replace(" Processor", "")
        lines.append("| " + " | ".join((what, place, *cells)) + " |")
    return lines


def _geometric_mean(cases: list[dict[str, Any]], name: str) -> str:
    """Return the mean of the known ratios, with their number if it is not that of the cases.

    A choice of auto is summed up only if every network has one: others would be another set of networks.
    """
    ratios = [ratio for case in cases if (ratio := _ratio(case, name))]
    if name not in PEERS and not _all_have(cases, name):
        return "-"
    count = f" ({len(ratios)})" if len(ratios) < len(cases) else ""
    return f"{statistics.geometric_mean(ratios):.2f}{count}" if ratios else "-"


def _all_have(cases: list[dict[str, Any]], name: str) -> bool:
    return all(_ratio(case, name) for case in cases)


def _groups(found: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the cases of each kind and processor, in the order of the page."""
    weights = sorted({(case["train"], case.get("warm_up", 0)) for case in found})
    precisions = dict.fromkeys(case["precision"] for case in found)
    places = dict.fromkeys(map(place_of, found))
    keys = [
        (train, steps, precision, place)
        for (train, steps), precision, place in itertools.product(weights, precisions, places)
    ]
    groups = ([case for case in found if _key(case) == key] for key in keys)
    return [group for group in groups if group]


def summary(found: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table in Markdown for the cases of one mode and precision."""
    lines = ["| variant | networks | geometric mean | best | worst |", "|---|---|---|---|---|"]
    autos = [auto for auto in (AUTO, AUTO_COMPILED) if _all_have(found, auto)]
    every = {
        **{name: [_ratio(case, name) for case in found] for name in (*PEERS, *autos)},
        "the fastest of all, right or not": [_fastest(case) for case in found],
        "the unprepared one again (A/A)": [case["aa"] and case["aa"]["ratio"] for case in found],
    }
    for name, ratios in every.items():
        if known := [ratio for ratio in ratios if ratio]:
            mean = statistics.geometric_mean(known)
            lines.append(
                f"| {name} | {len(known)} | {mean:.2f} | {min(known):.2f} | {max(known):.2f} |"
            )
    for auto in autos:
        lines += ["", _fared(found, auto)]
    if said := _control(found):
        lines += ["", said]
    if said := _cast(found):
        lines += ["", said]
    if few := sum(not has_intervals(case) for case in found):
        lines += [
            "",
            f"{few} of {len(found)} networks have too few rounds for an interval; their figures are rough.",
        ]
    return lines


def has_intervals(case: dict[str, Any]) -> bool:
    """Return whether a case has enough rounds for an interval."""
    return case["aa"] is not None and case["aa"]["noise"] is not None


def _fared(found: list[dict[str, Any]], auto: str) -> str:
    """Compare an auto's choices with the best that it may choose, in a sentence."""
    others = [[n for n in _choices(case, auto) if _is_known(case, n)] for case in found]
    best = [
        min(names, key=lambda n: _ratio(case, n)) for case, names in zip(found, others, strict=True)
    ]
    pairs = list(zip(found, best, strict=True))
    near = sum(_ratio(case, auto) <= NEAR * _ratio(case, name) for case, name in pairs)
    behind = sum(_is_behind(case, auto, name) for case, name in pairs)
    return (
        f"`{auto}` is within {NEAR - 1:.0%} of the best variant that it may choose on {near} of "
        f"{len(found)} networks, and significantly slower on {behind} (the intervals do not overlap)."
    )


def _control(found: list[dict[str, Any]]) -> str:
    """Count how often two equal networks seem to differ, in a sentence."""
    ratios = [case["aa"]["ratio"] for case in found if case["aa"]]
    off = sum(not 1 / NEAR <= ratio <= NEAR for ratio in ratios)
    if not ratios:
        return ""
    return (
        f"Noise: the unprepared network against itself (A/A) differs by more than {NEAR - 1:.0%} on {off} of "
        f"{len(ratios)}."
    )


def _cast(found: list[dict[str, Any]]) -> str:
    """Compare the fastest recipe with a cast and the fastest one without, in a sentence."""
    precision, ratios = found[0]["precision"], []
    for case in found:
        recipes = [n for n in (UNPREPARED, *_recipes(case)) if _ratio(case, n)]
        cast = [_ratio(case, name) for name in recipes if name.startswith(precision)]
        rest = [_ratio(case, name) for name in recipes if not name.startswith(precision)]
        if cast:
            ratios.append(min(cast) / min(rest))
    if not ratios:
        return ""
    mean, longer = statistics.geometric_mean(ratios), sum(ratio > 1 for ratio in ratios)
    return (
        f"The fastest recipe with {precision} takes {mean:.2f} of the time of the fastest one without it, "
        f"and more time on {longer} of {len(ratios)} networks. {_cast_by_choice(found)}".rstrip()
    )


def _cast_by_choice(found: list[dict[str, Any]]) -> str:
    """Count where auto chose a cast and where none could be verified, in a sentence."""
    precision, taken = found[0]["precision"], {AUTO: [], AUTO_COMPILED: []}
    for case, (auto, ratios) in itertools.product(found, taken.items()):
        if case["choices"].get(auto, {"name": ""})["name"].startswith(precision):
            ratios.append(_ratio(case, auto))
    statuses = [
        {s for name, s in case["choices"][AUTO]["candidates"].items() if name.startswith(precision)}
        for case in found
    ]
    wrong = sum(each <= {*NOT_TO_BE_CHOSEN} for each in statuses if each)
    if not taken[AUTO]:
        return f"`auto` chose {precision} on no network."
    mean, more = statistics.geometric_mean(taken[AUTO]), ""
    compiled = taken[AUTO_COMPILED]
    if compiled and _all_have(found, AUTO_COMPILED):
        more = f" (with a compiler allowed: on {len(compiled)}, {statistics.geometric_mean(compiled):.2f})"
    return (
        f"`auto` chose {precision} on {len(taken[AUTO])} and takes {mean:.2f} of the unprepared time "
        f"there{more}; on {wrong} no such recipe runs and passes verification."
    )


def _is_known(case: dict[str, Any], name: str) -> bool:
    """Return whether a variant was timed often enough to be called the best."""
    row = case["rows"].get(name)
    to_the_end = {UNPREPARED, *(choice["name"] for choice in case["choices"].values())}
    return bool(row and row["ratio"]) and (row["repeats"] >= ENOUGH or name in to_the_end)


def _is_behind(case: dict[str, Any], auto: str, other: str) -> bool:
    """Return whether a variant is faster than auto's choice significantly: their intervals do not meet."""
    one, another = (_interval(case, name) for name in (auto, other))
    return bool(one and another) and one[0] > another[1]


def _interval(case: dict[str, Any], name: str) -> list[float] | None:
    """Return the interval of its ratio; that of the unprepared network is 1."""
    row = case["rows"].get(name)
    if row and row["ratio"] == 1.0 and row == case["rows"][UNPREPARED]:
        return [1.0, 1.0]
    return row and row["interval"]


def _ratio(case: dict[str, Any], name: str) -> float | None:
    return case["rows"].get(name, {}).get("ratio")


def _fastest(case: dict[str, Any]) -> float:
    """Return the ratio of the fastest variant that was timed, verified or not."""
    return min(row["ratio"] for row in case["rows"].values() if row["ratio"])


def _choices(case: dict[str, Any], auto: str) -> list[str]:
    """Return the variants that an auto may choose."""
    return [*_recipes(case), *(PEERS[2:] if auto == AUTO_COMPILED else ())]


def _recipes(case: dict[str, Any]) -> list[str]:
    """Return the variants that auto may choose without a compiler: those that run and are not wrong."""
    choice = case["choices"][AUTO]
    out = {n for n, status in choice["candidates"].items() if status in NOT_TO_BE_CHOSEN}
    return [name for name in choice["candidates"] if name in case["rows"] and name not in out]


def tables(found: list[dict[str, Any]]) -> list[str]:
    """Return a table for each kind of case and processor, as lines of Markdown."""
    lines = []
    for cases in _groups(found):
        what = kind_of(cases[0])
        lines += [
            f"### {what[0].upper()}{what[1:]}: {place_of(cases[0])}",
            "",
            _circumstances(cases),
        ]
        lines += ["", *summary(cases), "", *_folded(_networks(cases)), ""]
    return lines[:-1]


def _key(case: dict[str, Any]) -> tuple[Any, ...]:
    return case["train"], case.get("warm_up", 0), case["precision"], place_of(case)


def kind_of(case: dict[str, Any]) -> str:
    """Return what is timed, which precision is allowed, and the weights."""
    what = "training step" if case["train"] else "inference"
    warm = f", after {steps} steps of training" if (steps := case.get("warm_up", 0)) else ""
    return f"{what}, {case['precision']} allowed{warm}"


def place_of(case: dict[str, Any]) -> str:
    """Return the processor; one name may stand for machines with and without AMX."""
    place = case["environment"]
    if case.get("device", "cpu") != "cpu":
        return place["devices"][0]
    has_amx = any(name.startswith("amx") for name in place.get("instructions", ()))
    return f"{place['cpu']}, with AMX" if has_amx else place["cpu"]


def _circumstances(found: list[dict[str, Any]]) -> str:
    """Return date, torch version, threads and budget of the cases, in a sentence."""
    days = sorted(case["environment"]["date"][:10] for case in found)
    torch, threads, budget = (
        " or ".join(f"{value}" for value in dict.fromkeys(values))
        for values in (
            (case["environment"]["torch"] for case in found),
            (case["environment"]["threads"] for case in found),
            (f"{case['tune_budget']:.0f}" for case in found),
        )
    )
    return (
        f"Measured {' to '.join(dict.fromkeys((days[0], days[-1])))}, torch {torch}, {threads} threads; "
        f"`auto` had {budget} seconds to choose."
    )


def _folded(lines: list[str]) -> list[str]:
    """Return a long table behind a line to click, on the site and on GitHub."""
    title = '<details markdown="1"><summary>Network by network</summary>'
    return [title, "", *lines, "", "</details>"]


def _networks(found: list[dict[str, Any]]) -> list[str]:
    """Return a line for each network."""
    timed = [n for n in (*PEERS, AUTO, AUTO_COMPILED) if any(n in case["rows"] for case in found)]
    lines = ["| " + " | ".join(("network", *timed, "best recipe", "A/A")) + " |"]
    lines += ["|---" * (len(timed) + 3) + "|"]
    for case in found:
        cells = [_cell(case, name) for name in timed]
        again = f"{case['aa']['ratio']:.2f}" if case["aa"] else ""
        lines += ["| " + " | ".join((case["network"], *cells, _best(case), again)) + " |"]
    return lines


def line_of(case: dict[str, Any]) -> str:
    """Return a case in a line: the time ratio of auto, and the best recipe."""
    autos = f"auto {_cell(case, AUTO)} {_cell(case, AUTO_COMPILED)}"
    return f"{autos}, best recipe {_best(case)}, A/A {case['aa']['ratio']:.2f}"


def _cell(case: dict[str, Any], name: str) -> str:
    row = case["rows"].get(name)
    if row is None:
        return ""
    return f"{row['ratio']:.2f}" if row["ratio"] else "fails"


def _best(case: dict[str, Any]) -> str:
    known = [name for name in (UNPREPARED, *_recipes(case)) if _is_known(case, name)]
    best = min(known, key=lambda name: _ratio(case, name))
    return f"{best} {_ratio(case, best):.2f}"
