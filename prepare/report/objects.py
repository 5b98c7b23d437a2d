"""Show single records in Python: one line, the text of the terminal, and HTML for a notebook."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from prepare.audit.rows import STATUSES
from prepare.core.utils.text import counts, line, output_to, plural, printable, size
from prepare.report.sentences import (
    case_sentence,
    export_sentence,
    flow_sentence,
    layouts_text,
    taken_out_text,
    tune_sentence,
    verify_sentence,
)

_LONGEST = 160
# What only the script of a page can show.
_DATA = re.compile(r"<script type=\"application/json\".*?</script>", re.DOTALL)


def one_line(record: Any) -> str:
    """Return the class of a record and its sentence, 160 letters at most."""
    kind = _kind(record)
    text = f"{kind}({printable(_SENTENCES[kind](record))})"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]}...)"


def text(record: Any) -> str:
    """Return the text of the terminal; one line if the package rich is not installed."""
    stream = io.StringIO()
    with output_to(stream):
        try:
            _TEXTS[_kind(record)](record)
        except ModuleNotFoundError:
            return f"{one_line(record)}\nthe whole table needs the extra: pip install 'torch-prepare[cli]'"
    return stream.getvalue().rstrip("\n")


def html(record: Any) -> str | None:
    """Return the section of a page with its style, scoped to itself; None without jinja2."""
    try:
        from prepare.report.render import render
    except ModuleNotFoundError:
        return None
    from prepare.report.pages.page import rendered
    from prepare.report.pages.run_sections import SECTIONS

    if _kind(record) not in _SECTIONS:
        return None
    wanted = [section for section in SECTIONS if section.name in _SECTIONS[_kind(record)]]
    parts = [(part.title, part.body) for part in rendered(_saved(record), wanted, [])]
    page = render("fragment.html", title=one_line(record), parts=parts, style=_style())
    return _DATA.sub("", page)


def _kind(record: Any) -> str:
    """Return the name of the class: importing that of a plan would load torch."""
    return next(cls.__name__ for cls in type(record).__mro__ if cls.__name__ in _SENTENCES)


def _plan_sentence(plan: Any) -> str:
    summary = plan.summary()
    parts = [f"{summary['to_change']} of {plural(summary['tensors'], 'tensor')} to change"]
    parts += [f"{action.step}: {plural(len(action.modules), 'module')}" for action in plan.actions]
    counted = (("error", plan.errors), ("warning", plan.warnings))
    return ", ".join([*parts, *(plural(len(found), word) for word, found in counted if found)])


def _audit_sentence(audit: Any) -> str:
    convolutions = counts(audit.summary["convolutions"], STATUSES)
    return f"{plural(audit.summary['tensors'], 'tensor')}; convolutions: {convolutions}"


def _bench_sentence(bench: Any) -> str:
    return "; ".join(map(case_sentence, bench.cases))


def _comparison_sentence(comparison: Any) -> str:
    rows = (f"{row.name} {row.verdict}" for row in comparison.rows)
    return f"{', '.join(rows)}; {plural(comparison.repeats, 'round')}"


def _diagnosis_sentence(diagnosis: Any) -> str:
    from prepare.report.terminal.doctor import diagnosis_lines

    return list(diagnosis_lines(diagnosis))[-1]


def _show_plan(plan: Any) -> None:
    from prepare.report.terminal.run import _show_changes

    summary = plan.summary()
    line(f"plan: {', '.join(plan.steps) or 'no step'}")
    line(f"  to change  {summary['to_change']} of {plural(summary['tensors'], 'tensor')}")
    line(f"  memory     {size(summary['bytes_before'])} now, {size(summary['bytes_after'])} after")
    for action in plan.actions:
        line(f"  {action.step}: {plural(len(action.modules), 'module')}")
    for error in plan.errors:
        line(f"  error: {error}")
    for warning in plan.warnings:
        line(f"  warning: {printable(warning)}")
    if changing := [tensor for tensor in plan.tensors if tensor.changes]:
        _show_changes(changing)


def _show_audit(audit: Any) -> None:
    from prepare.report.terminal.run_rows import missed_notes

    summary = audit.summary
    dtypes = ", ".join(f"{count} {name}" for name, count in summary["dtypes"].items())
    line(f"audit: {plural(summary['tensors'], 'tensor')}: {dtypes}")
    line(f"  convolutions  {counts(summary['convolutions'], STATUSES)}")
    line(
        f"  memory        {size(summary['bytes_before'])} before, {size(summary['bytes_after'])} after"
    )
    for note in missed_notes(audit.rows):
        line(f"  note: {printable(note)}")


def _show_flow(flow: Any) -> None:
    from prepare.report.terminal.flow import show_flow

    show_flow(flow)


def _show_verification(verification: Any) -> None:
    from prepare.report.terminal.verify import show_verify

    show_verify(verification)


def _show_bench(bench: Any) -> None:
    for case in bench.cases:
        line(case_sentence(case))


def _show_comparison(comparison: Any) -> None:
    from rich.table import Table

    from prepare.report.sentences import seconds, span
    from prepare.report.terminal.console import show_table

    table = Table("variant", "time", "ratio", "interval", "verdict", box=None, pad_edge=False)
    for row in comparison.rows:
        time = "" if row.seconds is None else seconds(row.seconds)
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        cells = (row.name, time, ratio, span(row.ratio_interval, "{:.3f}".format), row.verdict)
        table.add_row(*map(printable, cells))
    show_table(table)
    for note in comparison.notes:
        line(f"note: {printable(note)}")


def _show_export(export: Any) -> None:
    line(export_sentence(export))
    line(f"  inputs  {layouts_text(export)}")
    for stage in export.stages:
        line(
            printable(f"  {stage.name}  {stage.status}" + (f": {stage.note}" if stage.note else ""))
        )
    for item in export.taken_out:
        line(printable(f"  taken out  {taken_out_text(item)}"))


def _show_tuning(tuning: Any) -> None:
    from prepare.report.terminal.tune import show_tune

    show_tune(tuning)


def _show_diagnosis(diagnosis: Any) -> None:
    from prepare.report.terminal.doctor import show_diagnosis

    show_diagnosis(diagnosis)


def _parts(report: Any) -> list[Any]:
    parts = (report.audit, report.flow, report.verification, report.bench)
    return [part for part in parts if part is not None]


def _show_report(report: Any) -> None:
    line("\n\n".join(map(str, _parts(report))))


def _saved(record: Any) -> Any:
    """Return the record as a part of what a job saves, as the sections of a page take it."""
    from prepare.bench.records import Bench, Case
    from prepare.job.results import SavedResults

    kind = _kind(record)
    if kind == "Report":
        names = ("audit", "flow", "verification", "bench")
        return SavedResults(name="", **{name: getattr(record, name) for name in names})
    if kind == "Comparison":
        what = "training step" if record.settings["train"] else "inference"
        case = Case(what=what, comparison=record)
        record = Bench(level="", mode="eval", seconds=record.seconds, cases=(case,))
    key = {"Plan": "plan", "Audit": "audit", "Flow": "flow", "Verification": "verification"}
    key |= {"Export": "export", "Bench": "bench", "Comparison": "bench", "Tuning": "tuning"}
    value = record.to_dict() if kind == "Plan" else record
    return SavedResults(name="", **{key[kind]: value})


@cache
def _style() -> Any:
    """Return the style of the pages for the inside of one element."""
    from markupsafe import Markup

    from prepare.report.render import render

    style = re.sub(r"(?m)^(\s*)(:root|html|body)(?= \{)", r"\1:scope", render("report.css"))
    return Markup(style)  # noqa: S704  a file of this package


_SENTENCES: dict[str, Callable[[Any], str]] = {
    "Plan": _plan_sentence,
    "Audit": _audit_sentence,
    "Flow": lambda flow: f"{flow.mode}: {flow_sentence(flow)}",
    "Verification": verify_sentence,
    "Bench": _bench_sentence,
    "Comparison": _comparison_sentence,
    "Export": export_sentence,
    "Tuning": tune_sentence,
    "Diagnosis": _diagnosis_sentence,
    "Report": lambda report: ", ".join(map(one_line, _parts(report))),
}
_TEXTS: dict[str, Callable[[Any], None]] = {
    "Plan": _show_plan,
    "Audit": _show_audit,
    "Flow": _show_flow,
    "Verification": _show_verification,
    "Bench": _show_bench,
    "Comparison": _show_comparison,
    "Export": _show_export,
    "Tuning": _show_tuning,
    "Diagnosis": _show_diagnosis,
    "Report": _show_report,
}
_SECTIONS = {
    "Plan": ("result", "issues"),
    "Audit": ("result",),
    "Flow": ("flow",),
    "Verification": ("verify",),
    "Bench": ("bench",),
    "Comparison": ("bench",),
    "Export": ("export",),
    "Tuning": ("tune",),
    "Report": ("result", "flow", "verify", "bench"),
}
