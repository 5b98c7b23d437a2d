"""Sentences and figures that the terminal and the pages share, made from audits and figures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from prepare.app.job.record import interval_of
from prepare.audit import STATUSES, Audit, AuditRow
from prepare.core.utils.text import (
    doubt,
    part_of_tolerance,
    plural,
    share_text,
    size,
    speed_text,
)
from prepare.errors import Problem

if TYPE_CHECKING:
    from prepare.app.job.results import Results

# The statuses of a tensor that nothing has changed.
_NOT_SHOWN = ("device", "input_format")
_AS_IT_WAS = ("already", "untouched")


def title_text(
    model: str, steps: Mapping[str, Mapping[str, Any] | None], audit: Audit, amp: str
) -> str:
    """Return `UNet3d on cpu, channels_last_3d + repair_layout: 18 of 18 convolutions converted`."""
    text, half = converted_text(audit), steps.get("half")
    formats = {o["memory_format"] for o in steps.values() if o and "memory_format" in o}
    if half and formats <= {"contiguous"}:
        text = text.replace(" converted", f" converted to {_first(half)}", 1)
    return f"{declared_text(model, steps, audit.summary['devices'], amp)}: {text}"


def declared_text(
    model: str, steps: Mapping[str, Mapping[str, Any] | None], devices: Iterable[str], amp: str
) -> str:
    """Return `UNet3d on cpu, channels_last_3d + repair_layout`: its device and what the steps make of it."""
    shown = {name: options or {} for name, options in steps.items() if name not in _NOT_SHOWN}
    formats = dict.fromkeys(o["memory_format"] for o in shown.values() if "memory_format" in o)
    others = (
        _first(options) if name == "half" else name
        for name, options in shown.items()
        if "memory_format" not in options
    )
    on = f"{model} on {' and '.join(devices)}" if devices else model
    autocast = "" if amp == "none" else f"under autocast to {amp}"
    return ", ".join(filter(None, (on, " + ".join([*formats, *others]), autocast)))


def converted_text(audit: Audit) -> str:
    """Return `17 of 18 convolutions converted, 1 excluded: head`, who was not asked, and who runs as what."""
    counted, weights = audit.summary["convolutions"], convolution_weights(audit.rows)
    total, converted = sum(counted.values()), counted.get("converted", 0)
    if not total:
        found = audit.summary["status"].get("converted", 0)
        return f"{found:,} of {plural(audit.summary['tensors'], 'tensor')} converted"
    found = Counter(row.operation for row in audit.rows if row.operation)
    runs = "".join(
        f", {count:,} {'runs' if count == 1 else 'run'} as {name}"
        for name, count in found.items()
        if not name.startswith(("conv", "fused"))
    )
    runs += _fused_text([name.split(" + ")[1:] for name in found.elements() if "fused" in name])
    asking = {*(audit.summary.get("format_steps") or ())}
    if not asking and not converted:
        before = audited_text(audit) if not is_judged(audit) else plural(total, "convolution")
        return before + (runs or " as before" * is_judged(audit))
    others = [
        r for r in weights if asking and asking.isdisjoint(r.steps) and r.status in _AS_IT_WAS
    ]
    already = counted.get("already", 0) - sum(row.status == "already" for row in others)
    names = [row.module for row in weights if row.status == "skipped"]
    if more := len(names[1:]):
        names = [f"{names[0]} and {more} more"]
    missed, ineffective = counted.get("skipped", 0), counted.get("ineffective", 0)
    parts = [f"{converted:,} of {plural(max(total - len(others), 0), 'convolution')} converted"]
    parts += [f"{already:,} already were so"] * (already > 0)
    parts += [": ".join([f"{missed:,} excluded", *names])] * bool(missed)
    parts += [f"{ineffective:,} INEFFECTIVE"] * bool(ineffective)
    text = ", ".join(parts) + runs
    if kinds := Counter(row.type for row in others).most_common(2):
        named = ", ".join(f"{count:,} {kind}" for kind, count in kinds)
        text += f"; {named} not asked for (memfmt=by_rank converts both)"
    return text


def _fused_text(followed: list[list[str]]) -> str:
    """Return `, 51 run with their batch norm and SiLU, 2 on packed weights alone`."""
    named = {"add": "addition", "relu": "ReLU", "relu6": "ReLU6", "silu": "SiLU", "gelu": "GELU"}
    named["leaky_relu"] = "LeakyReLU"
    *names, last = [*dict.fromkeys(name for names in followed for name in names)] or [""]
    words = " and ".join(
        filter(None, (", ".join(named.get(n, n) for n in names), named.get(last, last)))
    )
    alone = followed.count([])
    parts = (len(followed) - alone, f"with their {words}"), (alone, "on packed weights alone")
    texts = (f", {n:,} {'runs' if n == 1 else 'run'} {how}" for n, how in parts if n)
    return "".join(texts).replace("_", " ")


def bytes_text(summary: Mapping[str, Any], first: str = "before") -> str:
    """Return the memory of the tensors of a plan or an audit: `1.0 MiB before, 512.0 KiB after`."""
    return f"{size(summary['bytes_before'])} {first}, {size(summary['bytes_after'])} after"


def changes_text(plan: Mapping[str, Any]) -> str:
    """Return what the summary of a plan says: `8 of 12 tensors would change`."""
    return f"{plan['to_change']:,} of {plural(plan['tensors'], 'tensor')} would change"


def is_judged(audit: Audit) -> bool:
    """Return whether an audit was made with a plan; one without says only what is."""
    return any(row.before is not None for row in audit.rows)


def audited_text(audit: Audit) -> str:
    """Return the convolutions by status; by the layouts of their weights if there was no plan."""
    if is_judged(audit):
        counted = audit.summary["convolutions"]
        return ", ".join(f"{counted.get(status, 0)} {status}" for status in STATUSES)
    found = [row.layouts for row in convolution_weights(audit.rows)]
    both = "both (1x1 or one channel)"
    words = Counter(both if len(names) > 1 else "".join(names) or "neither" for names in found)
    text = ", ".join(f"{count:,} {word}" for word, count in words.most_common())
    return f"{plural(len(found), 'convolution')}: {text}" if found else "no convolution"


def convolution_weights(rows: Iterable[AuditRow]) -> list[AuditRow]:
    """Return the weights of convolutions, in the order of the model."""
    weights = (row for row in rows if row.tensor == "weight" and row.shape is not None)
    return [row for row in weights if len(row.shape or ()) in (4, 5)]


def elsewhere(run: Results) -> str:
    """Return the end of a sentence: `; 1 runs as a matrix product`, `; 13 are not called by decode`."""
    flow, method = run.found.get("flow"), run.model.partition(".")[2] or "forward"
    if flow is None or run.audit is None:
        return ""
    ran, found = {row.module for row in flow.convolutions}, Counter[str]()
    for row in convolution_weights(run.audit.rows):
        if row.module not in ran:
            repaired = row.type.startswith("Keeping") and prod((row.shape or ())[2:]) == 1
            own = "" if row.operation.startswith("conv") else row.operation
            found["a matrix product" if repaired else own] += 1
    texts = (
        f"{n} {'runs' if n == 1 else 'run'} as {what}"
        if what
        else f"{n} {'is' if n == 1 else 'are'} not called by {method}"
        for what, n in found.items()
    )
    return "".join(f"; {text}" for text in texts)


def steps_text(steps: Mapping[str, Mapping[str, Any] | None]) -> str:
    """Return each step with the value of its first option: `device cpu, half bfloat16`."""
    texts = (f"{name} {_first(options)}".strip() for name, options in steps.items())
    return ", ".join(texts) or "no step"


def _first(options: Mapping[str, Any] | None) -> str:
    value = next(iter((options or {}).values()), "")
    return value if isinstance(value, str) else ""


def problems_of(plan: Mapping[str, Any] | None, *keys: str) -> list[Problem]:
    """Return the problems under these keys of a `plan.json`."""
    return [Problem(**each) for key in keys for each in (plan or {}).get(key) or ()]


def by_remedy(problems: Iterable[Problem]) -> dict[str, list[str]]:
    """Return the texts of problems by their remedy; empty for none."""
    groups: dict[str, list[str]] = {}
    for problem in problems:
        groups.setdefault(problem.remedy, []).append(str(replace(problem, remedy="")))
    return groups


def is_told(remedy: str, advised: str) -> bool:
    """Return whether an advice names every step of a remedy, which then need not be said again."""
    steps = re.findall(r"the step \w+", remedy)
    return bool(steps) and all(step in advised for step in steps)


def reasons_in(rows: Iterable[AuditRow]) -> list[tuple[str, str, int, str]]:
    """Return (status, reason, number of tensors, first tensor) of each reason, the worst status first."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.reason:
            # For tied tensors the reason ends with a place, which the table of all tensors shows.
            found.setdefault((row.status, row.reason.partition(" (as ")[0]), []).append(row.path)
    ranked = sorted(found, key=lambda key: STATUSES.index(key[0]))
    return [(*key, len(found[key]), found[key][0]) for key in ranked]


def missed_notes(rows: Iterable[AuditRow]) -> list[str]:
    """Return one line for each reason of unconverted tensors, `ineffective` first; four at most."""
    lines = [
        f"{status}: {first}{f' and {count - 1} more' if count > 1 else ''}: {reason}"
        for status, reason, count, first in reasons_in(rows)
        if status in ("ineffective", "skipped")
    ]
    hidden = len(lines) - 4
    return lines if hidden <= 0 else [*lines[:4], f"{plural(hidden, 'more reason')}; see audit.csv"]


def memory_text(figures: Mapping[str, Any]) -> str:
    """Return `5.4 MiB`, or `5.4 MiB -> 2.7 MiB` if it changed; empty if it is not known."""
    known = [figures.get("bytes_before"), figures.get("bytes_after")]
    texts = dict.fromkeys(size(count) for count in known if count is not None)
    return " -> ".join(texts) if None not in known else ""


def verified_text(figures: Mapping[str, Any]) -> str:
    """Return `pass 3e-05 17%`: the status, the error of the outputs, and its share of the tolerance."""
    if (status := figures.get("verified")) is None:
        return ""
    error, text = figures.get("verified_error"), doubt(status)
    if error is not None and status != "cannot tell":
        share = part_of_tolerance(error, figures.get("verified_allowed"))
        part = "" if share is None or share > 10 else f" {share_text(share).replace(' ', '')}"
        text += f" {error:.1g}{part}"
    # Wrong gradients do not count in a job for inference.
    return text + (", wrong in training" if figures.get("verified_wrong") else "")


def timing_text(figures: Mapping[str, Any]) -> str:
    """Return verdict, times and interval: `1.3x faster, 163 instead of 214 ms (95 % interval: ...)`."""
    verdict, ratio = figures.get("verdict", ""), figures.get("time_ratio")
    return speed_text(verdict, ratio, interval_of(figures), time=figures.get("prepared_seconds"))
