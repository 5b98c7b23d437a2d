"""Sentences and figures that the terminal and the pages share, made from audits and figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from prepare.app.job.figures import CONVOLUTIONS, interval_of
from prepare.audit import STATUSES, Audit, AuditRow
from prepare.core.utils.numbers import (
    doubt,
    part_of_tolerance,
    share_text,
    speed_text,
    tolerance_text,
)
from prepare.core.utils.text import counts, plural, size
from prepare.errors import Problem

if TYPE_CHECKING:
    from prepare.app.job.results import Results

# The statuses of a tensor that nothing has changed.
_NOT_SHOWN = ("device", "input_format")
_AS_IT_WAS = ("already", "untouched")


def convolutions_text(numbers: Mapping[str, int], steps: Mapping[str, Any]) -> str:
    """Return the convolutions by status; in other words if no step requested anything but a device."""
    if steps.keys() <= {"device"} and not numbers.get("converted") and numbers.get("already"):
        return f"{numbers['already']:,} as they were: no memfmt and no precision was chosen"
    return counts(numbers, CONVOLUTIONS)


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
    return ", ".join(filter(None, (on, " + ".join([*formats, *others]), autocast_text(amp))))


def converted_text(audit: Audit) -> str:
    """Return `17 of 18 convolutions converted, 1 excluded: head`, who was not asked, and who runs as what."""
    counted = audit.summary["convolutions"]
    total, converted = sum(counted.values()), counted.get("converted", 0)
    if not total:
        found = audit.summary["status"].get("converted", 0)
        return f"{found:,} of {plural(audit.summary['tensors'], 'tensor')} converted"
    asking = {*(audit.summary.get("format_steps") or ())}
    asked = bool(asking)
    found = Counter(row.operation for row in audit.rows if row.operation)
    runs = "".join(
        f", {count:,} {'runs' if count == 1 else 'run'} as {name}"
        for name, count in found.items()
        if not name.startswith("conv")
    )
    if not asked and not converted:
        return plural(total, "convolution") + (runs or " as before")
    weights = convolution_weights(audit.rows)
    others = Counter(
        r.type for r in weights if asked and asking.isdisjoint(r.steps) and r.status in _AS_IT_WAS
    )
    skipped = [row.module for row in weights if row.status == "skipped"]
    missed = counted.get("skipped", 0)
    names = f"{skipped[0]}{f' and {missed - 1} more' if missed > 1 else ''}" if skipped else ""
    already = counted.get("already", 0) - sum(
        r.status == "already" for r in weights if asked and asking.isdisjoint(r.steps)
    )
    parts = [f"{converted:,} of {plural(max(total - others.total(), 0), 'convolution')} converted"]
    parts += [f"{already:,} already were so"] * (already > 0)
    parts += [f"{missed:,} excluded: {names}" if names else f"{missed:,} excluded"] * bool(missed)
    parts += [f"{n:,} INEFFECTIVE" for n in [counted.get("ineffective", 0)] if n]
    text = ", ".join(parts) + runs
    if others:
        named = ", ".join(f"{count:,} {kind}" for kind, count in others.most_common(2))
        text += f"; {named} not asked for (memfmt=by_rank converts both)"
    return text


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
        return counts(audit.summary["convolutions"], STATUSES)
    return layouts_text(audit.rows)


def layouts_text(rows: Iterable[AuditRow]) -> str:
    """Return the layouts of convolutions as they are: `3 convolutions: 2 channels_last, ...`."""
    found = [row.layouts for row in convolution_weights(rows)]
    words = Counter(
        "both (1x1 or one channel)" if len(names) > 1 else next(iter(names), "neither")
        for names in found
    )
    names = ("channels_last", "channels_last_3d", "contiguous", *words)
    shown = dict.fromkeys(name for name in names if words[name] or name == "contiguous")
    text = ", ".join(f"{words[name]:,} {name}" for name in shown)
    return f"{plural(len(found), 'convolution')}: {text}" if found else "no convolution"


def convolution_weights(rows: Iterable[AuditRow]) -> list[AuditRow]:
    """Return the weights of convolutions, in the order of the model."""
    weights = (row for row in rows if row.tensor == "weight" and row.shape is not None)
    return [row for row in weights if len(row.shape or ()) in (4, 5)]


def elsewhere(run: Results) -> str:
    """Return the end of a sentence: `; 1 repaired to a matrix product`, `; 13 not called by decode`."""
    flow, method = run.found.get("flow"), run.model.partition(".")[2] or "forward"
    if flow is None or run.audit is None:
        return ""
    ran, found = {row.module for row in flow.convolutions}, Counter[str]()
    for row in convolution_weights(run.audit.rows):
        if row.module not in ran:
            repaired = row.type.startswith("Keeping") and prod((row.shape or ())[2:]) == 1
            as_what = "" if row.operation.startswith("conv") else row.operation
            what = f"run as {as_what}" if as_what else f"not called by {method}"
            found["repaired to a matrix product" if repaired else what] += 1
    return "".join(f"; {n} {what}" for what, n in found.items())


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


def missed_notes(rows: Iterable[AuditRow]) -> list[str]:
    """Return one line for each reason of unconverted tensors, `ineffective` first."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    missed = [row for row in rows if row.status in ("ineffective", "skipped")]
    for row in sorted(missed, key=lambda row: row.status):
        path = f"{row.module}.{row.tensor}" if row.module else row.tensor
        by_reason.setdefault((row.status, row.reason or ""), []).append(path)
    lines = [
        f"{status}: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}"
        for (status, reason), names in by_reason.items()
    ]
    hidden = len(lines) - 4
    return [
        *lines[:4],
        *([f"{plural(hidden, 'more reason')}; see audit.csv"] if hidden > 0 else []),
    ]


def autocast_text(amp: str) -> str:
    """Return the clause on the autocast of every forward; empty without autocast."""
    return "" if amp == "none" else f"under autocast to {amp}"


def memory_text(figures: Mapping[str, Any]) -> str:
    """Return `5.4 MiB`, or `5.4 -> 2.7 MiB` if it changed; empty if it is not known."""
    before, after = figures.get("bytes_before"), figures.get("bytes_after")
    if before is None or after is None:
        return ""
    if before == after:
        return size(after)
    figure, _, unit = size(before).partition(" ")
    after_figure, _, after_unit = size(after).partition(" ")
    same = unit == after_unit
    return f"{figure}{'' if same else f' {unit}'} -> {after_figure} {after_unit}"


def verified_text(figures: Mapping[str, Any], *, short: bool = False) -> str:
    """Return `pass 3.1e-05 (17 % of the tolerance)`: the status, the error of the outputs, and its share.

    The `short` text is `pass 3e-05 17%`, for a column; it is empty if nothing was verified.
    """
    if (status := figures.get("verified")) is None:
        return ""
    error, text = figures.get("verified_error"), ""
    if error is not None and status != "cannot tell":
        share = part_of_tolerance(error, figures.get("verified_allowed"))
        text = f" {error:{'.1g' if short else '.2g'}}{_of_tolerance(share, short=short)}"
    # Wrong gradients do not count in a job for inference.
    return doubt(status) + text + (", wrong in training" if figures.get("verified_wrong") else "")


def _of_tolerance(share: float | None, *, short: bool) -> str:
    if share is None or share > 10:
        return ""
    return f" {share_text(share).replace(' ', '')}" if short else f" ({tolerance_text(share)})"


def timing_text(figures: Mapping[str, Any]) -> str:
    """Return verdict, times and interval: `1.3x faster, 163 instead of 214 ms (95 % interval: ...)`."""
    verdict, ratio = figures.get("verdict", ""), figures.get("time_ratio")
    return speed_text(verdict, ratio, interval_of(figures), time=figures.get("prepared_seconds"))
